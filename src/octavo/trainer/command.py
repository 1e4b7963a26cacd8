"""The command `octavo train`, ready to be registered: `app.command("train")(command.train)`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo import models
from octavo.trainer.config import TrainConfig, recipe_names
from octavo.trainer.settings import DEFAULT_RECIPES

_DEFAULTS = TrainConfig()


def _whole(text: str | int) -> int:
    """A whole number as typed; the message names what was typed, which Typer's own does not."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number") from None


def _number(text: str | float) -> float:
    """A number as typed, such as 0.001 or 1e-3."""
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number") from None


def _option(help: str, default: Any = None, **settings: Any) -> Any:
    """An option that is None unless given, so that a file's value is not taken for overruled."""
    return typer.Option(help=help, show_default=str(default) if default is not None else False, **settings)


def _count(help: str, default: Any = None) -> Any:
    return _option(help, default, parser=_whole, metavar="N")


def _rate(help: str, default: Any = None) -> Any:
    return _option(help, default, parser=_number, metavar="X")


def train(
    config: Annotated[
        Path | None,
        _option("Options from a TOML or JSON file, or a report.json; those given here win over it."),
    ] = None,
    model: Annotated[str | None, _option(f"One of {', '.join(models.names())}.", _DEFAULTS.model)] = None,
    recipe: Annotated[
        list[str] | None,
        _option(
            f"Precision of the linear layers: {', '.join(recipe_names())}. Several with commas or by "
            "repeating the option.",
            ",".join(DEFAULT_RECIPES),
        ),
    ] = None,
    compare: Annotated[
        list[str] | None,
        _option("Recipes to train as well; differences are stated against the first one."),
    ] = None,
    data: Annotated[
        Path | None,
        _option("A text file, JSONL or a folder of them.", "the Python standard library's source"),
    ] = None,
    tokenizer: Annotated[
        Path | None, _option("A Hugging Face tokenizer.json.", "bytes are the tokens")
    ] = None,
    init_from: Annotated[
        Path | None, _option("Safetensors to start from, a file or a folder.", "random weights")
    ] = None,
    steps: Annotated[int | None, _count("Optimizer steps.", _DEFAULTS.steps)] = None,
    seq_len: Annotated[int | None, _count("Tokens in a sequence.", _DEFAULTS.seq_len)] = None,
    batch_size: Annotated[int | None, _count("Sequences in a step.", _DEFAULTS.batch_size)] = None,
    grad_accum: Annotated[
        int | None, _count("Parts to compute a step's batch in, one after the other.", _DEFAULTS.grad_accum)
    ] = None,
    lr: Annotated[float | None, _rate("Largest learning rate.", _DEFAULTS.lr)] = None,
    min_lr: Annotated[
        float | None, _rate("Learning rate at the end, as a share of --lr.", _DEFAULTS.min_lr)
    ] = None,
    warmup: Annotated[int | None, _count("Steps of warm-up.", "a tenth of the steps")] = None,
    weight_decay: Annotated[float | None, _rate("AdamW's weight decay.", _DEFAULTS.weight_decay)] = None,
    clip: Annotated[float | None, _rate("Largest norm of the gradient.", _DEFAULTS.clip)] = None,
    seed: Annotated[
        int | None, _count("Of the weights and of the order of the text.", _DEFAULTS.seed)
    ] = None,
    device: Annotated[str | None, _option("cpu, cuda or cuda:N.", "a GPU if any")] = None,
    dtype: Annotated[
        str | None, _option("Outside FP8: float32 or bfloat16.", "float32 on CPU, bfloat16 on GPU")
    ] = None,
    compile: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="Compile each block with torch.compile.")
    ] = None,
    activation_checkpoint: Annotated[
        bool | None,
        typer.Option(
            "--activation-checkpoint/--no-activation-checkpoint",
            help="Compute each block's activations again in backward instead of keeping them.",
        ),
    ] = None,
    fast_accum: Annotated[
        bool | None,
        typer.Option(
            "--fast-accum/--no-fast-accum",
            help="Fast accumulation in every 8-bit product, not just where the recipe has it.",
        ),
    ] = None,
    eval_every: Annotated[int | None, _count("Steps between validations.", "one at the end")] = None,
    monitor_every: Annotated[
        int | None,
        _count(
            "Steps from one whose operands are watched to the next; 0 for none.",
            "ten times a run with --compare, else none",
        ),
    ] = None,
    checkpoint_dir: Annotated[Path | None, _option("Folder for checkpoints, one below it a recipe.")] = None,
    checkpoint_every: Annotated[
        int | None, _count("Steps between checkpoints.", "a tenth of the steps")
    ] = None,
    keep: Annotated[int | None, _count("Checkpoints that stay, the newest ones.", _DEFAULTS.keep)] = None,
    resume: Annotated[
        bool | None,
        typer.Option(
            "--resume/--no-resume", help="Go on from the newest good checkpoint in --checkpoint-dir, if any."
        ),
    ] = None,
    save_final: Annotated[Path | None, _option("Folder for the trained weights as safetensors.")] = None,
    log: Annotated[Path | None, _option("File that gets one JSON object a step.")] = None,
    tensorboard: Annotated[Path | None, _option("Folder for TensorBoard.")] = None,
    out: Annotated[Path | None, _option("Folder for the report.", _DEFAULTS.out)] = None,
) -> int:
    """Train a model once per recipe on the same batches from the same weights, and compare.

    Exits with 0 if all is trained, 1 if it failed on the way, 2 for input that cannot work, 130 or 143 after
    Ctrl-C or SIGTERM.
    """
    given = {name: value for name, value in locals().items() if name != "config"}

    from rich.console import Console

    from octavo.trainer import job, settings

    job_config = settings.resolve(given, config)
    corpus = job.prepare(job_config)
    return job.run(job_config, corpus, Console(), command=shlex.join(["octavo", *sys.argv[1:]]))
