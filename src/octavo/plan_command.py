"""The command ``octavo plan``."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def plan(
    model: Annotated[str, typer.Option(help="llama3-8b, llama3-70b or deepseek-v3.")],
    gpus: Annotated[int, typer.Option(help="GPUs of the whole run.", metavar="N")],
    recipe: Annotated[str, typer.Option(help="Recipe of the linear layers and experts.")] = "rowwise",
    tp: Annotated[int, typer.Option(help="GPUs of a tensor-parallel group.", metavar="N")] = 1,
    ep: Annotated[int, typer.Option(help="GPUs of an expert-parallel group.", metavar="N")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages.", metavar="N")] = 1,
    tokens: Annotated[
        int, typer.Option(help="Tokens of a micro-batch of a data-parallel rank.", metavar="N")
    ] = 8192,
    micro_batches: Annotated[
        int | None, typer.Option(help="Micro-batches in a step.", metavar="N", show_default="--pp")
    ] = None,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Keep each layer's input alone and compute it again.")
    ] = False,
    gather_16_bits: Annotated[
        bool, typer.Option("--gather-16-bits", help="Gather weights in 16 bits whatever the recipe.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Work out memory and communication of a GPU in a run on many: a plan from formulas, not a measurement."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from octavo import plan as planning

    layout = planning.Layout(
        gpus=gpus, tp=tp, ep=ep, pp=pp, tokens=tokens,
        micro_batches=max(pp, 1) if micro_batches is None else micro_batches,
        full_checkpointing=checkpointing, gather_8_bits=not gather_16_bits,
    )  # fmt: skip
    result = planning.plan(model, recipe, layout)
    if as_json:
        typer.echo(json.dumps(result.as_data(), indent=1))
        return
    console = Console()
    title = (
        f"{model}, {result.parameters / 1e9:.1f} B parameters, {recipe}, {gpus} GPUs "
        f"(dp {layout.dp}, tp {tp}, ep {ep}, pp {pp}), {layout.micro_batches} x {tokens} tokens a rank: a plan"
    )
    console.print(title, style="bold", soft_wrap=True, highlight=False, markup=False)
    for heading, parts, total in (
        ("memory a GPU", result.memory, result.total_memory),
        ("communication a GPU and step", result.communication, result.total_communication),
    ):
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
        table.add_column(heading)
        table.add_column("bytes", justify="right")
        for name, count in parts.items():
            table.add_row(name, planning.format_bytes(count))
        table.add_row("total", planning.format_bytes(total), style="bold")
        console.print(table)
        console.print()
    share = result.flops_in_8_bits / result.flops
    console.print(
        f"{result.flops / 1e12:,.0f} TFLOP a GPU and step, {share:.0%} of them in 8 bits "
        "(attention's scores not counted)",
        highlight=False,
    )
    for note in result.notes:
        console.print(f"note: {note}", soft_wrap=True, highlight=False, markup=False)
