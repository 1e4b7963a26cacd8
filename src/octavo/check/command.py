"""The command `octavo check`, ready to be registered: `app.command("check")(command.check)`."""

from __future__ import annotations

from typing import Annotated

import typer

EXIT_FAILED, EXIT_BAD_INPUT = 1, 2
TABLE_WIDTH = 150


def check(
    target: Annotated[
        list[str] | None,
        typer.Option(
            help="gfx942, gfx950 or sm_90; several with commas or by repeating it.", show_default="all three"
        ),
    ] = None,
    kernel: Annotated[
        str | None, typer.Option(help="One kernel, in every configuration.", metavar="NAME")
    ] = None,
    every: Annotated[
        bool,
        typer.Option(
            "--all", help="Every configuration of every kernel, not the first of each kernel and kind."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    write_budget: Annotated[
        bool, typer.Option("--write-budget", help="Make what is found the committed budget.")
    ] = False,
) -> int:
    """Compile kernels for a GPU that need not be there; check instructions, spills, LDS, budgets; model the loop.

    Exits with 0 if all checks pass, 1 if one fails, 2 for input that cannot work.
    """
    from rich.console import Console

    from octavo import check as checking
    from octavo.check.compile import TARGETS

    console, errors = Console(), Console(stderr=True, highlight=False)
    targets = [name.strip() for value in target or TARGETS for name in value.split(",") if name.strip()]
    try:
        with errors.status("compiling") as status:
            report = checking.run(
                list(dict.fromkeys(targets)), kernel, every, write_budget=write_budget,
                done=lambda name: status.update(f"compiled {name}"),
            )  # fmt: skip
    except ValueError as error:
        errors.print(f"octavo: {error}", style="red", soft_wrap=True, markup=False)
        return EXIT_BAD_INPUT
    if as_json:
        console.file.write(report.to_json() + "\n")
    else:
        # Cut names and numbers help nobody: a narrow terminal wraps the lines, a pipe gets them whole.
        Console(width=max(console.width, TABLE_WIDTH)).print(report.table())
        for line in report.limits():
            console.print(
                f"known limit: {line}", style="yellow", soft_wrap=True, markup=False, highlight=False
            )
        for line in report.failures():
            console.print(f"failed: {line}", style="red", soft_wrap=True, markup=False, highlight=False)
        if report.left_out:
            console.print(report.left_out, style="dim", soft_wrap=True, markup=False, highlight=False)
        console.print(report.summary, markup=False, highlight=False)
    return 0 if report.ok else EXIT_FAILED
