"""TorchTitan's linear layers and grouped experts by a recipe: their parameters and sharding, our products."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.models.common.linear import Linear as TitanLinear
from torchtitan.tools.logging import logger

from octavo.training.fsdp import prepare_module
from octavo.training.modules import Linear, grouped_mm
from octavo.training.recipes import Recipe, get_recipe


class OctavoLinear(Linear, TitanLinear):
    """TorchTitan's ``Linear`` whose three products run by a recipe."""

    @dataclass(kw_only=True, slots=True)
    class Config(TitanLinear.Config):
        recipe: str | Recipe = "rowwise"
        gather_path: str = ""
        """Path of the layer, if FSDP2 shall gather it in 8 bits."""

    def __init__(self, config: Any) -> None:
        TitanLinear.__init__(self, config)
        self.recipe = get_recipe(config.recipe)
        self.gather_path = config.gather_path

    def parallelize(self, parallel_dims: Any) -> None:
        """As TorchTitan's, which runs before FSDP2 and after every other sharding."""
        super().parallelize(parallel_dims)
        _prepare(self)


def _prepare(layer: Any) -> None:
    if layer.gather_path:
        for decision in prepare_module(layer, layer.gather_path):
            logger.info(f"FSDP2 gathers {decision.name} in {decision.bits} bits: {decision.reason}")


@functools.cache
def experts_class(parent: type) -> type:
    """A subclass of TorchTitan's grouped experts, or of a model's own, whose products run by a recipe.

    TorchTitan calls ``_grouped_mm`` for each of the products; groups of any size are served without padding.
    """

    class OctavoExperts(parent):
        @dataclass(kw_only=True, slots=True)
        class Config(parent.Config):
            recipe: str | Recipe = "rowwise"
            gather_path: str = ""

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.recipe = get_recipe(config.recipe)
            self.gather_path = config.gather_path
            weights = {n: p for n, p in self.named_parameters(recurse=False) if p.ndim == 3}
            self.octavo_weights = tuple(weights)
            self.octavo_size = sum(weight.numel() for weight in weights.values())

        def parallelize(self, parallel_dims: Any) -> None:
            super().parallelize(parallel_dims)
            _prepare(self)

        def _grouped_mm(self, *, A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
            return grouped_mm(A, B_t, offs, recipe=self.recipe)

    OctavoExperts.__name__ = OctavoExperts.__qualname__ = f"Octavo{parent.__name__}"
    return OctavoExperts
