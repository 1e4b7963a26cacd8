"""The commands ``octavo bench`` and ``octavo tune``, ready to be registered with the command line."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from octavo.errors import UserError

EXIT_FAILED = 1

OPERATOR_SUITES = ("topk", "rmsnorm", "attention", "gemm", "grouped-bf16", "grouped-fp8", "mx", "scaled")
"""Suites that measure operators of PyTorch, and so make the tables of wins."""


def bench(
    suites: Annotated[
        list[str] | None, typer.Argument(help="Suites to time: rmsnorm, topk, ...", metavar="SUITE...")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every suite.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("benchmarks/results"),
    only: Annotated[str, typer.Option(help="Only cases whose group or name contains this.")] = "",
    force: Annotated[bool, typer.Option("--force", help="Take calls that were not measured faster.")] = False,
    no_compile: Annotated[bool, typer.Option("--no-compile", help="Leave out torch.compile.")] = False,
    compile_only: Annotated[
        str, typer.Option(help="torch.compile only for cases whose name contains this.")
    ] = "",
    jobs: Annotated[int, typer.Option(help="Compile kernels first, in so many processes.")] = 0,
    no_host: Annotated[bool, typer.Option("--no-host", help="Leave out event, wall and host times.")] = False,
) -> int:
    """Time suites on this GPU beside PyTorch, torch.compile and other libraries; results as JSON and Markdown."""
    from octavo.bench import cases

    names = sorted(cases.SUITES) if every else list(dict.fromkeys(suites or []))
    known = ", ".join(sorted(cases.SUITES))
    unknown = [name for name in names if name not in cases.SUITES]
    if unknown:
        raise UserError(f"unknown suite {unknown[0]!r}: choose from {known}")
    if not names:
        raise UserError(f"no suite is named: choose from {known}, or --all")
    _need_gpu(f"suite {names[0]!r} is timed on a GPU")
    failures = 0
    for name in names:
        failures += not _time(name, out, only, force, not no_compile, compile_only, jobs, not no_host)
    return EXIT_FAILED if failures else 0


def tune(
    wins: Annotated[
        bool, typer.Option("--wins", help="Where operators are faster than PyTorch's own on this card.")
    ] = False,
    launch: Annotated[
        list[str] | None,
        typer.Option(
            help="Launch tables of quantize, fused or matmul, by repeating it; or all.", metavar="ROOM"
        ),
    ] = None,
    sizes: Annotated[
        bool, typer.Option("--sizes", help="Layers too small to gain, from --results; times nothing.")
    ] = False,
    arch: Annotated[str, typer.Option(help="With --sizes: the architecture of the results.")] = "sm_90",
    seconds: Annotated[float, typer.Option(help="With --launch: start nothing new after so long.")] = 600.0,
    results: Annotated[
        Path | None, typer.Option(help="Make the table from the results files in this folder; time nothing.")
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the table.",
            show_default="$OCTAVO_WINS or ~/.cache/octavo/wins, $OCTAVO_TABLES or ~/.config/octavo/tables",
        ),
    ] = None,
    only: Annotated[str, typer.Option(help="Only cases whose group or name contains this.")] = "",
    jobs: Annotated[int, typer.Option(help="Compile kernels first, in so many processes.")] = 4,
) -> int:
    """Measure on this card: where operators win, or which launch configurations are fastest; write the tables."""
    if launch and not wins:
        return _tune_launches(launch, to, seconds)
    if sizes and not wins:
        return _size_table(results or Path("benchmarks/results"), to, arch)
    from octavo.bench import wins_table
    from octavo.operators import wins as tables

    if not wins:
        raise UserError(
            "say what to tune: --wins measures where operators are faster than PyTorch's own, "
            "--launch all the launch tables of quantize, fused and matmul, --sizes layers too small to gain"
        )
    if results is not None and not results.is_dir():
        raise UserError(
            f"no folder {str(results)!r}: --results takes one with results of octavo bench, such as topk-*.json"
        )
    folder = to or tables.overlay_folder()
    complete = True
    if results is None:
        _need_gpu("--wins times kernels on a GPU")
        results = folder / "results"
        for suite in OPERATOR_SUITES:
            complete = _time(suite, results, only, True, False, "", jobs, True) and complete
    try:
        path = wins_table.write(results, folder)
    except ValueError as error:
        raise UserError(str(error)) from None
    tables.reload()
    typer.echo(f"wrote {path}; octavo operators status shows it")
    return 0 if complete else EXIT_FAILED


def _size_table(results: Path, to: Path | None, arch: str) -> int:
    from octavo.bench import sizes_table
    from octavo.training import sizes

    try:
        path = sizes_table.write(results, to or sizes.TABLES, arch)
    except ValueError as error:
        raise UserError(str(error)) from None
    typer.echo(f"wrote {path}; convert goes by it on {arch}")
    return 0


ROOMS = ("quantize", "fused", "matmul")


def _tune_launches(names: list[str], to: Path | None, seconds: float) -> int:
    unknown = [name for name in names if name not in (*ROOMS, "all")]
    if unknown:
        raise UserError(f"unknown room {unknown[0]!r}: choose from {', '.join(ROOMS)}, or all")
    _need_gpu("--launch times kernels on a GPU")
    from octavo.bench import launch_tuning
    from octavo.quantize.launch_tables import overlay_folder

    rooms = ROOMS if "all" in names else tuple(dict.fromkeys(names))
    folder = to or overlay_folder()
    paths, rows = launch_tuning.tune(rooms, folder, seconds, typer.echo)
    failed = sum("error" in row and not row["candidate"] for row in rows)
    for path in paths:
        typer.echo(f"wrote {path}; it is read before the committed table")
    if not paths:
        typer.echo("no candidate beat the tables: nothing was written")
    return EXIT_FAILED if failed else 0


def _need_gpu(what: str) -> None:
    import torch

    if not torch.cuda.is_available():
        raise UserError(f"{what} and torch sees none: run it on the machine with the card")


def _time(
    suite: str,
    out: Path,
    only: str,
    force: bool,
    compile: bool,
    compile_only: str,
    jobs: int,
    host: bool,
) -> bool:
    """Run a suite, saying each case; whether all cases were right."""
    from octavo.bench.main import precompile, run

    if jobs:
        precompile(suite, jobs, only, force)
    try:
        path = run(
            suite,
            out,
            only=only,
            compile=compile,
            compile_only=compile_only,
            host=host,
            force=force,
            command=shlex.join(["octavo", *sys.argv[1:]]),
            progress=typer.echo,
        )
    except ValueError as error:  # no case is left
        raise UserError(str(error)) from None
    except RuntimeError as error:
        typer.echo(str(error), err=True)
        return False
    typer.echo(str(path))
    return True
