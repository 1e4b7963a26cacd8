"""The models ``octavo train`` knows by name.

Adding one is a line in ``PRESETS``: a name and a configuration whose ``build()`` returns the module.
"""

from __future__ import annotations

from octavo.models import llama3
from octavo.models.llama3 import Llama3, Llama3Config

__all__ = ["PRESETS", "Llama3", "Llama3Config", "names", "preset"]

PRESETS: dict[str, Llama3Config] = llama3.PRESETS


def names() -> list[str]:
    """Names of the presets, smallest model first."""
    return list(PRESETS)


def preset(name: str) -> Llama3Config:
    """The configuration called ``name``.

    Raises:
        ValueError: no preset has this name; the message lists those there are.
    """
    if name not in PRESETS:
        raise ValueError(f"unknown model {name!r}: choose one of {', '.join(names())}")
    return PRESETS[name]
