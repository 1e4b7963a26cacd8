"""What ``octavo bench`` does, without the command line's colours.

python -m octavo.bench SUITE ... --force --out FOLDER        time suites
python -m octavo.bench wins FOLDER [--overlay | --to FOLDER] make the table of wins from their results files
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from octavo.bench import wins_table
from octavo.bench.cases import SUITES
from octavo.bench.main import precompile, run
from octavo.operators import wins


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _wins(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m octavo.bench wins", description=wins_table.__doc__)
    parser.add_argument("results", type=Path, help="folder with topk-*.json and rmsnorm-*.json")
    parser.add_argument(
        "--to", type=Path, default=wins.COMMITTED, help="folder of the table, the package's by default"
    )
    parser.add_argument("--overlay", action="store_true", help="write to the owner's own folder instead")
    arguments = parser.parse_args(words)
    path = wins_table.write(arguments.results, wins.overlay_folder() if arguments.overlay else arguments.to)
    _say(str(path))


def main() -> None:
    """Parse arguments and run the suites in turn."""
    if sys.argv[1:2] == ["wins"]:
        _wins(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(prog="python -m octavo.bench", description=__doc__)
    parser.add_argument("suites", nargs="+", choices=sorted(SUITES))
    parser.add_argument("--out", default="benchmarks/results", help="folder for the results")
    parser.add_argument("--only", default="", help="only cases whose group or name contains this")
    parser.add_argument("--force", action="store_true", help="take calls that were not measured faster")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile")
    parser.add_argument("--compile-only", default="", help="torch.compile for cases whose name contains this")
    parser.add_argument("--jobs", type=int, default=0, help="compile kernels first, in so many processes")
    parser.add_argument("--no-host", action="store_true", help="leave out event, wall and host times")
    arguments = parser.parse_args()
    for suite in arguments.suites:
        if arguments.jobs:
            precompile(suite, arguments.jobs, arguments.only, arguments.force)
        path = run(
            suite,
            arguments.out,
            only=arguments.only,
            compile=not arguments.no_compile,
            compile_only=arguments.compile_only,
            host=not arguments.no_host,
            force=arguments.force,
            command=" ".join(["python -m octavo.bench", *sys.argv[1:]]),
            progress=_say,
        )
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
