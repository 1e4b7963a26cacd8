"""``python -m octavo.bench SUITE ... --out FOLDER``: what ``octavo bench`` does, without the command line's colours."""

from __future__ import annotations

import argparse
import sys

from octavo.bench.cases import SUITES
from octavo.bench.main import run


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Parse arguments and run the suites in turn."""
    parser = argparse.ArgumentParser(prog="python -m octavo.bench", description=__doc__)
    parser.add_argument("suites", nargs="+", choices=sorted(SUITES))
    parser.add_argument("--out", default="benchmarks/results", help="folder for the results")
    parser.add_argument("--only", default="", help="only cases whose group or name contains this")
    parser.add_argument("--force", action="store_true", help="take calls that were not measured faster")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile")
    parser.add_argument("--no-host", action="store_true", help="leave out event, wall and host times")
    arguments = parser.parse_args()
    for suite in arguments.suites:
        path = run(
            suite,
            arguments.out,
            only=arguments.only,
            compile=not arguments.no_compile,
            host=not arguments.no_host,
            force=arguments.force,
            command=" ".join(["python -m octavo.bench", *sys.argv[1:]]),
            progress=_say,
        )
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
