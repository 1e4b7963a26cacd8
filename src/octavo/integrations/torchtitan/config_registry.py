"""Ready configurations: TorchTitan's own of a model, with Octavo's overrides, for every recipe.

``--module octavo.integrations.torchtitan --config llama3_8b_rowwise``. A name is a model of :data:`MODELS`, an
underscore and a recipe. ``bf16`` is the stock configuration, to compare with.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from octavo.integrations.torchtitan import versions
from octavo.training.fsdp import why_not_8_bits
from octavo.training.recipes import RECIPES

MODELS = {
    "llama3_debugmodel": ("llama3", ("linear",)),
    "llama3_8b": ("llama3", ("linear",)),
    "llama3_70b": ("llama3", ("linear",)),
    "deepseek_v3_debugmodel": ("deepseek_v3", ("linear", "experts")),
    "deepseek_v3_16b": ("deepseek_v3", ("linear", "experts")),
    "deepseek_v3_671b": ("deepseek_v3", ("linear", "experts")),
}
"""TorchTitan's configuration function -> (its module, what is overridden)."""
BESIDE = ("metrics", "selective_ac")
"""Overrides that belong to every recipe."""
PREFIX = "octavo.integrations.torchtitan"


def names() -> list[str]:
    """Every ready configuration."""
    return [f"{model}_{recipe}" for model in MODELS for recipe in RECIPES]


def overrides(model: str, recipe: str) -> list[Any]:
    """Entries for ``override.imports``: 8-bit all-gather where the recipe allows it."""
    if not RECIPES[recipe].quantized_products:
        return []
    arguments = {"recipe": recipe, "gather_8_bits": why_not_8_bits(RECIPES[recipe]) is None}
    quantized = [(f"{PREFIX}.{kind}", arguments) for kind in MODELS[model][1]]
    return [*quantized, *(f"{PREFIX}.{kind}" for kind in BESIDE)]


def _make(model: str, recipe: str) -> Callable[[], Any]:
    def configuration() -> Any:
        versions.check()
        stock = importlib.import_module(f"torchtitan.models.{MODELS[model][0]}.config_registry")
        config = getattr(stock, model)()
        config.override.imports.extend(overrides(model, recipe))
        return config

    configuration.__name__ = f"{model}_{recipe}"
    configuration.__doc__ = f"TorchTitan's {model} by recipe {recipe}."
    return configuration


def __getattr__(name: str) -> Callable[[], Any]:
    for model in MODELS:
        if name.startswith(f"{model}_") and name.removeprefix(f"{model}_") in RECIPES:
            return _make(model, name.removeprefix(f"{model}_"))
    raise AttributeError(f"no ready configuration {name!r}: choose one of {', '.join(names())}")


def __dir__() -> list[str]:
    return names()
