"""The models ``octavo train`` knows by name, and their weights as safetensors.

Adding one is a line in ``PRESETS``: a name and a configuration whose ``build()`` returns the module.
"""

from __future__ import annotations

from octavo.models import deepseek, llama3
from octavo.models.base import Model, ModelConfig
from octavo.models.checkpoint import from_pretrained, load_safetensors, save_safetensors
from octavo.models.deepseek import DeepSeek, DeepSeekConfig
from octavo.models.llama3 import Llama3, Llama3Config

__all__ = [
    "PRESETS",
    "DeepSeek",
    "DeepSeekConfig",
    "Llama3",
    "Llama3Config",
    "Model",
    "ModelConfig",
    "from_pretrained",
    "load_safetensors",
    "names",
    "preset",
    "save_safetensors",
]

PRESETS: dict[str, ModelConfig] = {**llama3.PRESETS, **deepseek.PRESETS}


def names() -> list[str]:
    """Names of the presets, smallest model of a family first."""
    return list(PRESETS)


def preset(name: str) -> ModelConfig:
    """The configuration called ``name``.

    Raises:
        ValueError: no preset has this name; the message lists those there are.
    """
    if name not in PRESETS:
        raise ValueError(f"unknown model {name!r}: choose one of {', '.join(names())}")
    return PRESETS[name]
