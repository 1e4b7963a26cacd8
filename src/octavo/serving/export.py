"""A checkpoint in Hugging Face's layout to one with quantized weights, and a report of what that cost."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from octavo.errors import UserError
from octavo.serving import files
from octavo.serving.schemes import Scheme, get_scheme
from octavo.serving.weights import WeightsReport, quantize_weights

REPORT = "export.json"
BESIDE = (
    "tokenizer",
    "special_tokens_map",
    "vocab",
    "merges",
    "generation_config",
    "chat_template",
    "added_tokens",
)
"""Beginnings of the names of files that go along with the weights."""


@dataclass(frozen=True)
class Quality:
    """What a text says of the weights: perplexity per token before and after, over so many tokens."""

    text: str
    tokens: int
    perplexity_before: float
    perplexity_after: float

    @property
    def change_percent(self) -> float:
        """By how much the perplexity rose."""
        return 100 * (self.perplexity_after / self.perplexity_before - 1)


def export(
    source: Path,
    out: Path,
    scheme: str,
    *,
    activations: str | None = None,
    text: Path | None = None,
    seq_len: int = 512,
    tokens: int = 16_384,
) -> tuple[WeightsReport, Quality | None]:
    """Quantize the checkpoint in ``source`` and write it to ``out`` with its tokenizer and ``export.json``.

    Args:
        source: a folder that ``transformers.AutoModelForCausalLM`` loads: ``config.json`` and safetensors.
        out: another folder; made if missing.
        scheme: ``"mxfp8"``, ``"mxfp4"`` or ``"fp8-blockwise"``.
        activations: as for :func:`octavo.quantize_weights`.
        text: a text file, JSONL or folder; perplexity is then measured on its held-out part, before and after.
        seq_len: tokens of a sequence of that text.
        tokens: about so many tokens of it.

    Raises:
        UserError: something of this cannot be done; nothing was written.
    """
    try:
        chosen = get_scheme(scheme)
    except ValueError as error:
        raise UserError(f"--format: {error}") from None
    _check_folders(source, out)
    model = _load(source)
    batches = None if text is None else list(_batches(text, source, model, seq_len, tokens))
    before = None if batches is None else perplexity(model, batches)
    report = _quantize(model, chosen, activations)
    quality = None
    if batches is not None and before is not None:
        count = sum(targets.numel() for _, targets in batches)
        quality = Quality(str(text), count, before, perplexity(model, batches))
    try:
        files.save(model, out)
        _copy_beside(source, out)
        (out / REPORT).write_text(json.dumps(as_data(report, chosen, quality), indent=2) + "\n")
    except OSError as error:
        raise UserError(
            f"cannot write {error.filename or out} ({error.strerror}): make room or give another --out"
        ) from None
    return report, quality


def as_data(report: WeightsReport, scheme: Scheme, quality: Quality | None) -> dict[str, Any]:
    """The report as JSON: layers with bytes and SQNR, and the perplexities."""
    found = None if quality is None else {**asdict(quality), "change_percent": quality.change_percent}
    activation = None if scheme.activation is None else scheme.activation.key
    layers = [asdict(layer) for layer in report.layers]
    return {
        "format": scheme.name, "weight": scheme.weight.key, "activation": activation,
        "bytes_before": sum(x.bytes_before for x in report.layers),
        "bytes_after": sum(x.bytes_after for x in report.layers), "layers": layers, "quality": found,
    }  # fmt: skip


@torch.inference_mode()
def perplexity(model: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """exp of the mean loss a token over ``batches`` of inputs and targets [rows, length]."""
    device = next(model.parameters()).device
    total, count = 0.0, 0
    for inputs, targets in batches:
        out: Any = model(inputs.to(device))
        logits = getattr(out, "logits", out).float()
        total += F.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten(), reduction="sum").item()
        count += targets.numel()
    return math.exp(total / count)


def _check_folders(source: Path, out: Path) -> None:
    if not (source / files.CONFIG).is_file():
        raise UserError(
            f"{str(source)!r} has no config.json: give the folder of a checkpoint in Hugging Face's layout"
        )
    if "quantization_config" in json.loads((source / files.CONFIG).read_text()):
        raise UserError(f"{str(source)!r} is quantized already: export the checkpoint that it was made from")
    if out.exists() and source.resolve() == out.resolve():
        raise UserError(f"--out is the checkpoint itself, {str(source)!r}: give another folder")


def _load(source: Path) -> nn.Module:
    try:
        import transformers
    except ModuleNotFoundError:
        raise UserError("export loads checkpoints with transformers: pip install 'octavo[hf]'") from None
    from safetensors import SafetensorError

    try:
        return transformers.AutoModelForCausalLM.from_pretrained(
            source, dtype="auto", local_files_only=True
        ).eval()
    except (ValueError, KeyError, OSError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise UserError(f"cannot load {str(source)!r}: {reason}") from None


def _batches(text: Path, source: Path, model: nn.Module, seq_len: int, tokens: int):
    from octavo.trainer.data.corpus import load
    from octavo.trainer.data.packing import validation_batches

    tokenizer = source / "tokenizer.json"
    config: Any = model.config
    corpus = load(text, seq_len, tokenizer if tokenizer.is_file() else None, model_vocab=config.vocab_size)
    return validation_batches(corpus.validation, seq_len, 4, tokens)


def _quantize(model: nn.Module, scheme: Scheme, activations: str | None) -> WeightsReport:
    try:
        return quantize_weights(model, scheme, activations=activations)
    except ValueError as error:
        raise UserError(str(error)) from None


def _copy_beside(source: Path, out: Path) -> None:
    for path in sorted(source.iterdir()):
        if path.is_file() and path.name.startswith(BESIDE):
            shutil.copyfile(path, out / path.name)
