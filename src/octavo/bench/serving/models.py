"""Models to serve: random weights at published dimensions, or a checkpoint of Hugging Face's layout."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from octavo.errors import UserError

SUFFIX = "-random"


@dataclass(frozen=True)
class Published:
    """Dimensions of a published model.

    Args:
        kind: ``model_type`` of transformers.
        source: where the dimensions stand.
        config: arguments of that model's configuration.
    """

    kind: str
    source: str
    config: dict[str, Any] = field(default_factory=dict)


def _dims(
    width: int, ffn: int, layers: int, heads: int, kv_heads: int, vocabulary: int, **more: Any
) -> dict[str, Any]:
    return {
        "hidden_size": width, "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": vocabulary, "head_dim": 128, **more,
    }  # fmt: skip


PUBLISHED = {
    "llama3-8b": Published("llama", "arXiv:2407.21783, table 3", _dims(4096, 14_336, 32, 32, 8, 128_256)),
    "llama3-70b": Published("llama", "arXiv:2407.21783, table 3", _dims(8192, 28_672, 80, 64, 8, 128_256)),
    "qwen3-8b": Published("qwen3", "arXiv:2505.09388, table 1", _dims(4096, 12_288, 36, 32, 8, 151_936)),
    "qwen3-32b": Published("qwen3", "arXiv:2505.09388, table 1", _dims(5120, 25_600, 64, 64, 8, 151_936)),
    "llama3-debug": Published("llama", "small enough for a CPU", _dims(256, 512, 2, 4, 2, 512, head_dim=64)),
}


@dataclass(frozen=True)
class Served:
    """What ``--model`` names: ``name`` for tables, and how to make it anew with the same weights each time."""

    name: str
    folder: Path | None
    published: Published | None
    layers: int | None = None

    def build(self, dtype: torch.dtype, device: torch.device, room: int) -> nn.Module:
        """The model in evaluation mode on ``device``, with positions for ``room`` tokens.

        Raises:
            UserError: transformers is missing, or the folder holds no checkpoint that it can read.
        """
        transformers = _transformers()
        if self.folder is not None:
            try:
                model = transformers.AutoModelForCausalLM.from_pretrained(
                    self.folder, dtype=dtype, local_files_only=True, attn_implementation="sdpa"
                )
            except (OSError, ValueError, KeyError, RuntimeError) as error:
                first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
                raise UserError(
                    f"--model {str(self.folder)!r} cannot be loaded by transformers: {first}"
                ) from None
            return model.to(device).eval()
        assert self.published is not None
        config = transformers.AutoConfig.for_model(
            self.published.kind,
            max_position_embeddings=room,
            tie_word_embeddings=False,
            **self.published.config,
        )
        if self.layers is not None:
            config.num_hidden_layers = self.layers
        torch.manual_seed(0)
        with device:
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation="sdpa"
            )
        return model.eval()

    @property
    def vocabulary(self) -> int:
        """Tokens that a prompt may consist of."""
        if self.published is not None:
            return self.published.config["vocab_size"]
        return _transformers().AutoConfig.from_pretrained(self.folder, local_files_only=True).vocab_size


def find(model: str, layers: int | None = None) -> Served:
    """What ``--model`` names.

    Args:
        model: a name of ``PUBLISHED`` with ``-random`` behind it, or a folder.
        layers: only so many of a random model's layers.

    Raises:
        UserError: neither of both, or ``layers`` with a folder.
    """
    name = model.removesuffix(SUFFIX)
    if name in PUBLISHED and model.endswith(SUFFIX):
        if layers is not None and layers < 1:
            raise UserError(f"--layers is {layers}: give at least 1")
        return Served(model, None, PUBLISHED[name], layers)
    folder = Path(model)
    if (folder / "config.json").is_file():
        if layers is not None:
            raise UserError("--layers goes with random weights only: leave it out for a checkpoint")
        return Served(folder.resolve().name, folder, None)
    if folder.is_dir():
        raise UserError(f"--model {model!r} has no config.json: give a checkpoint in Hugging Face's layout")
    known = [key + SUFFIX for key in PUBLISHED]
    close = difflib.get_close_matches(model, known, 1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise UserError(
        f"--model {model!r} is no folder and no known model: {hint}choose from {', '.join(known)}"
    )


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise UserError(
            "serve-bench needs transformers, which is not installed: pip install 'octavo[hf]'"
        ) from None
    return transformers
