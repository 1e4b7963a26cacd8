"""The command ``octavo``.

To add a command, add a function here, or a line to ``ELSEWHERE`` for one that is written beside what it
runs. What it needs is imported inside it, so that ``octavo --help`` stays quick, and what the user can mend
ends in ``_bad_input``: one line that says what to do, and exit status 2.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterable
from typing import Annotated, Any, NoReturn

import typer

from octavo._version import __version__
from octavo.errors import UserError

app = typer.Typer(
    name="octavo",
    help="8-bit floating-point training and faster kernels behind PyTorch's own operators.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its boxes cut long names off in a terminal of 80 columns
    context_settings={"help_option_names": ["-h", "--help"]},
)

# Typer's base of all errors in what was typed; it comes from click, which newer typer versions carry inside.
UsageMistake: type[Exception] = typer.BadParameter.__mro__[2]
EXIT_BAD_INPUT = 2

ELSEWHERE = {
    "train": "octavo.trainer.command:train",
    "report": "octavo.trainer.report_command:report",
    "plan": "octavo.plan_command:plan",
    "check": "octavo.check.command:check",
    "bench": "octavo.bench.command:bench",
    "tune": "octavo.bench.command:tune",
    "run": "octavo.operators.command:run",
    "operators": "octavo.operators.command:app",
    "export": "octavo.serving.command:export",
    "serve-bench": "octavo.bench.serving.command:serve_bench",
}
"""Commands that live in other packages, ``module:attribute``; imported when one is called or all are listed.

The attribute is a function, which may carry ``context_settings`` for Typer, or a ``typer.Typer`` of commands.
"""


def main(arguments: list[str] | None = None) -> NoReturn:
    """Runs the command line and exits: 0 done, 1 failed on the way, 2 for input that cannot work."""
    arguments = sys.argv[1:] if arguments is None else arguments
    _add_commands(arguments)
    try:
        status = app(arguments, prog_name="octavo", standalone_mode=False)
    except UsageMistake as mistake:
        context = getattr(mistake, "ctx", None)
        command = context.command_path if context else "octavo"
        message = getattr(mistake, "format_message", mistake.__str__)()
        status = _bad_input(f"{message} See '{command} --help'.")
    except UserError as error:
        status = _bad_input(str(error))
    except (KeyboardInterrupt, typer.Abort):
        status = 130
    sys.exit(status if isinstance(status, int) else 0)


def _add_commands(arguments: list[str]) -> None:
    """Registers those of ``ELSEWHERE`` that the command line can mean."""
    called = next((argument for argument in arguments if not argument.startswith("-")), None)
    present = {entry.name for entry in (*app.registered_commands, *app.registered_groups)}
    for name, where in ELSEWHERE.items():
        if called in (None, name) and name not in present and "--version" not in arguments:
            module, _, attribute = where.partition(":")
            found = getattr(importlib.import_module(module), attribute)
            if isinstance(found, typer.Typer):
                app.add_typer(found, name=name)
            else:
                app.command(name, context_settings=getattr(found, "context_settings", None))(found)


def _bad_input(message: str) -> int:
    from rich.console import Console

    line = " ".join(message.split())
    Console(stderr=True).print(f"octavo: {line}", style="red", soft_wrap=True, highlight=False, markup=False)
    return EXIT_BAD_INPUT


@app.callback(invoke_without_command=True)
def _octavo(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
) -> None:
    if version:
        typer.echo(f"octavo {__version__}")
        raise typer.Exit


@app.command()
def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show devices, formats, versions, and every kernel with the reason why it cannot serve."""
    from rich.markup import escape

    from octavo.info import info as describe

    content = describe()
    if as_json:
        typer.echo(json.dumps(content, indent=1))
        return
    versions = {name: version or "not installed" for name, version in content["versions"].items()}
    _show("versions", ["package", "version"], versions.items())
    providers = ((name, escape(reason or "usable")) for name, reason in content["providers"].items())
    _show("optional kernel languages", ["language", "state"], providers)
    devices = content["devices"]
    keys = list(devices[-1])  # a GPU's, which has more to say than the CPU before it
    _show("devices", keys, ([device.get(key, "-") for key in keys] for device in devices))
    elements = content["formats"]["elements"].items()
    _show(
        "formats",
        ["element", "max", "smallest"],
        ((n, e["max"], f"{e['smallest']:.3g}") for n, e in elements),
    )
    scales = [*content["formats"]["granularities"], *content["formats"]["mx"]]
    _show("scales", ["granularity"], ([scale] for scale in scales))
    recipes = ((name, ", ".join(products) or "none") for name, products in content["recipes"].items())
    _show("recipes", ["recipe", "products in 8 bits"], recipes)
    for device, ops in content["kernels"].items():
        rows = [(op, *_verdict_row(**verdict)) for op, verdicts in ops.items() for verdict in verdicts]
        _show(f"kernels on {device}", ["op", "kernel", "serves"], rows)


@app.command()
def explain(
    op: Annotated[str, typer.Argument(help="quantize, scaled_mm, scaled_grouped_mm, grouped_mm, ...")],
    shapes: Annotated[
        list[str] | None, typer.Argument(help="Operands' shapes: 8192x4096 14336x4096.")
    ] = None,
    recipe: Annotated[str, typer.Option(help="Whose formats.")] = "rowwise",
    product: Annotated[str, typer.Option(help="output, grad_input or grad_weight.")] = "output",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    device: Annotated[
        str | None, typer.Option(help="Where the tensors are.", show_default="a GPU if any")
    ] = None,
    arch: Annotated[
        str | None,
        typer.Option(help="Answer as this GPU would, which need not be here: gfx942, gfx950, sm_90."),
    ] = None,
) -> None:
    """Say which kernel an op would choose for operands of these shapes, and why not the others."""
    import torch

    from octavo import info as description

    dtypes = {str(d).removeprefix("torch."): d for d in (torch.bfloat16, torch.float16, torch.float32)}
    try:
        if dtype not in dtypes:
            raise ValueError(f"--dtype is {dtype!r}: choose one of {', '.join(dtypes)}")
        asked = (op, [description.parse_shape(shape) for shape in shapes or []])
        options: dict[str, Any] = {
            "recipe": recipe, "product": product, "dtype": dtypes[dtype], "arch": arch,
            "device": device or ("cuda" if torch.cuda.is_available() else "cpu"),
        }  # fmt: skip
        verdicts = description.explain(*asked, **options)
        behind = description.explain_operators(*asked, **options)
    except (ValueError, RuntimeError) as error:  # RuntimeError: a device that PyTorch does not know
        raise typer.Exit(_bad_input(str(error))) from None
    rows = [_verdict_row(v.kernel, v.reason, v.chosen) for v in verdicts]
    where = f" on {arch}" if arch else ""
    _show(f"{op} {' '.join(shapes or [])}, {recipe}, {product}{where}", ["kernel", "serves"], rows)
    if behind:
        rows = [_verdict_row(overload, reason, False) for overload, reason in behind]
        _show("behind PyTorch's operators, where octavo.operators is enabled", ["operator", "served"], rows)


def _verdict_row(kernel: str, reason: str | None, chosen: bool) -> tuple[str, str]:
    from rich.markup import escape

    # A reason may name an extra, octavo[triton], which is no markup.
    no = f"no: {escape(reason or '')}"
    return kernel, "[bold]yes, chosen[/bold]" if chosen else "yes" if reason is None else no


def _show(title: str, headers: list[str], rows: Iterable[Iterable[object]]) -> None:
    """Prints a table under its title."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for header in headers:
        table.add_column(header.replace("_", " "))
    for row in rows:
        table.add_row(*map(str, row))
    console = Console()
    console.print(title, style="bold", soft_wrap=True, highlight=False, markup=False)
    console.print(table)
    console.print()
