"""The command ``octavo serve-bench``, ready to be registered with the command line."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from octavo.errors import UserError

EXIT_FAILED = 1


def serve_bench(
    model: Annotated[
        str, typer.Option(help="A checkpoint's folder, or llama3-8b-random, qwen3-8b-random, ...")
    ] = "llama3-8b-random",
    form: Annotated[
        str, typer.Option("--format", help="bf16, mxfp8, mxfp4, fp8-blockwise; several with commas.")
    ] = "bf16,mxfp8,mxfp4",
    concurrency: Annotated[str, typer.Option(help="Requests at once; several with commas.")] = "1,8,32,128",
    isl: Annotated[int, typer.Option(help="Tokens of a prompt.", metavar="N")] = 256,
    osl: Annotated[int, typer.Option(help="Tokens of an answer.", metavar="N")] = 512,
    rounds: Annotated[int, typer.Option(help="Counted rounds of each contender.", metavar="N")] = 3,
    activations: Annotated[
        str | None, typer.Option(help="quantized or 16-bit.", show_default="the format's own")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="Layers of a random model.", metavar="N", show_default="all")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:N.", show_default="a GPU if any")
    ] = None,
    no_graphs: Annotated[bool, typer.Option("--no-graphs", help="Launch every step anew.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Take operator calls that were not measured faster.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("benchmarks/results"),
) -> int:
    """Time whole requests with Octavo off and on, interleaved, through transformers.

    Checks logits and greedy tokens of every format before it times them. Exits with 1 if a check failed.
    """
    from rich.console import Console

    from octavo.bench.serving import job

    asked = job.Job(
        model=model, formats=_names(form), concurrency=_counts(concurrency), isl=isl, osl=osl, rounds=rounds,
        activations=activations, layers=layers, device=device, graphs=not no_graphs, force=force, out=out,
    )  # fmt: skip
    passed = job.run(asked, Console(), shlex.join(["octavo", *sys.argv[1:]]))
    return 0 if passed else EXIT_FAILED


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _counts(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(part) for part in _names(text)}))
    except ValueError:
        raise UserError(f"--concurrency is {text!r}: give whole numbers with commas, as 1,8,32") from None
