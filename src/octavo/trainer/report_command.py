"""The command `octavo report`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from octavo.errors import UserError

OUT = Path("octavo-report")


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Folders that octavo train --out wrote, or their report.json.", metavar="RUN..."),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the report.")] = OUT,
    baseline: Annotated[
        str | None,
        typer.Option(help="Run that others are compared with.", show_default="the first job's own"),
    ] = None,
) -> int:
    """Write one report of the runs of one or several jobs: report.html, report.md, report.json and loss.png.

    The jobs must have trained the same model on the same text in the same order. Exits with 0 if it is written,
    1 if it cannot be, 2 for reports that do not fit.
    """
    from rich.console import Console

    from octavo.trainer import report as reports
    from octavo.trainer import report_files, report_merge
    from octavo.trainer.config import check_writable

    data = report_merge.load(runs, baseline, command=shlex.join(["octavo", *sys.argv[1:]]))
    if data["report"] == report_merge.MERGED and any(_holds(out, run) for run in runs):
        raise UserError(
            f"--out {str(out)!r} holds one of the reports to merge, which would be lost: give another folder"
        )
    check_writable(out)
    console = Console()
    console.print(reports.table(data))
    try:
        written = report_files.write(data, out)
    except OSError as error:
        console.print(
            f"cannot write {error.filename or out} ({error.strerror or error}): make room and try again",
            style="red", soft_wrap=True, highlight=False, markup=False,
        )  # fmt: skip
        return 1
    console.print(f"written: {', '.join(map(str, written))}", soft_wrap=True, highlight=False, markup=False)
    return 0


def _holds(folder: Path, run: Path) -> bool:
    """Whether the report ``run`` lies in ``folder``, or was written there."""
    place = run if run.is_dir() else run.parent
    return place.resolve() == folder.resolve()
