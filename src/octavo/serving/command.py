"""The command ``octavo export``, ready to be registered with the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    model: Annotated[Path, typer.Argument(help="Folder of a checkpoint in Hugging Face's layout.")],
    out: Annotated[Path, typer.Option(help="Folder for the quantized checkpoint.")],
    form: Annotated[str, typer.Option("--format", help="mxfp8, mxfp4 or fp8-blockwise.")] = "mxfp8",
    activations: Annotated[
        str | None,
        typer.Option(help="quantized or 16-bit.", show_default="quantized for 8-bit weights, else 16-bit"),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Text, JSONL or folder to measure perplexity on, before and after.")
    ] = None,
    seq_len: Annotated[int, typer.Option(help="Tokens of a sequence of the text.")] = 512,
    tokens: Annotated[int, typer.Option(help="About so many tokens of the text.")] = 16_384,
) -> None:
    """Quantize the weights of a checkpoint for serving in transformers and vLLM."""
    from rich.console import Console

    from octavo.serving import export as exporting

    console = Console()
    report, quality = exporting.export(
        model, out, form, activations=activations, text=text, seq_len=seq_len, tokens=tokens
    )
    console.print(str(report), soft_wrap=True, highlight=False, markup=False)
    if quality is not None:
        console.print(
            f"perplexity {quality.perplexity_before:.4f} -> {quality.perplexity_after:.4f} "
            f"({quality.change_percent:+.2f}%) over {quality.tokens:,} tokens of {quality.text}",
            soft_wrap=True, highlight=False, markup=False,
        )  # fmt: skip
    console.print(f"written: {out}", soft_wrap=True, highlight=False, markup=False)
