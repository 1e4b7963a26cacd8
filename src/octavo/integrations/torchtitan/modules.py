"""TorchTitan's linear layers and grouped experts by a recipe: their parameters and sharding, our products."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import spmd_types as spmd
import torch
from torchtitan.models.common.linear import Linear as TitanLinear
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.tools.logging import logger

from octavo.training.expert_spanning import sorted_experts
from octavo.training.experts import local
from octavo.training.fsdp import prepare_module
from octavo.training.modules import Linear, grouped_mm
from octavo.training.recipes import Recipe, get_recipe
from octavo.training.weight_cache import cast_weight


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

    TorchTitan's own are one spanning Function. Where a model has a forward of its own, or TorchTitan's type checking
    follows each product, ``_grouped_mm`` serves them one by one. Groups of any size need no padding.
    """
    spans = parent.forward is GroupedExperts.forward

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

        def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
            """Rows [R, D] in the order of the experts, with the number of rows of each, to rows [R, D]."""
            if not spans or spmd.is_type_checking():
                return super().forward(x_RD, num_tokens_per_expert_E)
            offs = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)
            # In bfloat16, as TorchTitan multiplies them whatever they are kept in.
            w1, w3, w2 = (
                cast_weight(local(w), torch.bfloat16) for w in (self.w1_EFD, self.w3_EFD, self.w2_EDF)
            )
            return sorted_experts(x_RD.bfloat16(), offs, (w1, w3, w2), self.recipe).type_as(x_RD)

        def _grouped_mm(self, *, A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
            return grouped_mm(A, B_t, offs, recipe=self.recipe)

    OctavoExperts.__name__ = OctavoExperts.__qualname__ = f"Octavo{parent.__name__}"
    # What TorchTitan's log calls it.
    OctavoExperts.Config.__qualname__ = f"{OctavoExperts.__qualname__}.Config"
    return OctavoExperts
