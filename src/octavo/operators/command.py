"""The commands ``octavo run`` and ``octavo operators``, ready to be registered with the command line."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from octavo.errors import UserError

app = typer.Typer(
    help="Faster kernels behind PyTorch's own operators: their compiled router and what was measured.",
    no_args_is_help=True,
)


def show(title: str, headers: Iterable[str], rows: Iterable[Iterable[object]], stderr: bool = False) -> None:
    """Prints a table under its title; a narrow pipe gets its lines whole."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for header in headers:
        table.add_column(header, overflow="fold")
    for row in rows:
        table.add_row(*map(str, row))
    console = Console(stderr=stderr)
    console.print(title, style="bold", highlight=False, markup=False)
    console.print(table)


def run(
    script: Annotated[str, typer.Argument(help="A Python file; what follows it is its own.", metavar="FILE")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGUMENTS]...")] = None,
    operators: Annotated[
        str | None,
        typer.Option(
            help="topk, rms_norm, ...; several with commas.", show_default="$OCTAVO_OPERATORS or all"
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Take every call that the kernels are right for, measured or not.")
    ] = False,
    report: Annotated[
        bool, typer.Option("--report", help="Say at the end which calls were taken and which refused.")
    ] = False,
) -> None:
    """Run a program that cannot be edited with Octavo's kernels behind PyTorch's operators."""
    from octavo.operators import script as program

    names = [name.strip() for name in (operators or "").split(",") if name.strip()]
    if not Path(script).is_file():
        raise UserError(f"no script at {script!r}: give a Python file")
    try:
        program.switch_on(names, force)
    except ValueError as error:
        raise UserError(str(error)) from None
    try:
        program.run_script(script, arguments or [], switch=False)
    finally:
        if report:
            _report()


run.context_settings = {"ignore_unknown_options": True, "allow_interspersed_args": False}  # type: ignore[attr-defined]


def _report() -> None:
    from octavo.operators import registry

    rows = []
    if not registry.status():
        typer.echo("no operator is taken over: this PyTorch was built without a GPU", err=True)
        return
    for entry in registry.status():
        refused = "; ".join(f"{count} {reason}" for reason, count in entry.refused.items()) or "-"
        rows.append((entry.overload, entry.taken, refused, entry.router))
    show("calls of PyTorch's operators", ("overload", "taken", "refused", "router"), rows, stderr=True)


@app.command()
def build() -> None:
    """Compile the router, after which a call that is not taken costs under a microsecond more."""
    from octavo.operators import native

    try:
        path = native.build()
    except native.BuildError as error:
        raise UserError(str(error)) from None
    typer.echo(f"built {path}; operators use it from now on")


@app.command()
def status(
    arch: Annotated[
        str | None, typer.Option(help="As for this GPU, which need not be here: sm_90, gfx942, gfx950.")
    ] = None,
) -> None:
    """Show the router and the tables of measured wins that operators would use here."""
    import torch

    from octavo import hardware
    from octavo.operators import native, registry, wins

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = [hardware.architecture(torch.device("cuda", index)) for index in range(count)]
    architectures = [arch] if arch else list(dict.fromkeys(found))
    built = native.library_path()
    router = f"compiled, {built}" if native.load() is not None else "Python (octavo operators build)"
    typer.echo(f"router: {router}")
    typer.echo(f"own measurements: {wins.overlay_folder()} (octavo tune --wins)")
    if not architectures:
        typer.echo("no GPU is seen here: nothing is taken over (--arch shows another machine's tables)")
    for name in architectures:
        tables = wins.tables(name)
        rows = []
        for operator in registry.MEASURED:
            table = tables.get(operator)
            rows.append((operator, len(table.boxes), table.run) if table else (operator, 0, "not measured"))
        show(f"measured wins on {name}", ("operator", "boxes of shapes", "run"), rows)
