"""What TorchTitan counts and keeps: MFU with 8-bit products, and selective activation checkpointing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.moe import MoE

from octavo.training.recipes import Recipe

FP8_OVER_BF16 = 2.0
"""Dense FP8 peak over BF16 peak, of the data sheets of H100, H200, MI300X, MI325X and MI355X alike."""


def flops_in_8_bits(model_parts: Iterable[nn.Module]) -> float:
    """Floating-point operations a token, forward and backward, of the products that run in 8 bits.

    Two a weight and product, by the whole layer's size whatever shard of it lies here; of experts, those that a
    token is sent to.
    """
    total = 0.0
    for model in model_parts:
        shares: dict[int, float] = {}
        for module in model.modules():
            if isinstance(module, MoE):
                moe: Any = module
                shares[id(moe.routed_experts.inner_experts)] = moe.router.top_k / moe.router.num_experts
        for module in model.modules():
            recipe = getattr(module, "recipe", None)
            if isinstance(recipe, Recipe):
                products = len(recipe.quantized_products)
                total += 2 * products * _size(module) * shares.get(id(module), 1.0)
    return total


def _size(module: Any) -> int:
    """Weights of a whole layer."""
    if isinstance(module, nn.Linear):
        return module.in_features * module.out_features
    return module.octavo_size


def effective_peak(peak: float, flops: float, in_8_bits: float) -> float:
    """FLOP/s at which work of which ``in_8_bits`` of ``flops`` run in 8 bits would end if nothing were lost.

    ``peak`` is that of BF16; MFU against this peak is the ideal time over the time taken.
    """
    rest = max(flops - in_8_bits, 0.0)
    return peak * flops / (rest + in_8_bits / FP8_OVER_BF16) if flops > 0 else peak


class OctavoMetrics(MetricsProcessor):
    """TorchTitan's metrics with MFU against :func:`effective_peak`."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    _pipeline_stages: int = 1
    _peak_known: bool = False

    def __init__(self, config: Any, *, parallel_dims: Any, **kwargs: Any) -> None:
        super().__init__(config, parallel_dims=parallel_dims, **kwargs)
        self._pipeline_stages = parallel_dims.pp

    def log(self, *args: Any, **kwargs: Any) -> None:
        """As TorchTitan's; the model is complete when the first step is logged."""
        if not self._peak_known and self.model_parts is not None:
            # A pipeline's stages are taken as equal: each sees its own layers alone.
            in_8_bits = flops_in_8_bits(self.model_parts) * self._pipeline_stages
            self.gpu_peak_flops = effective_peak(self.gpu_peak_flops, self.num_flops_per_token, in_8_bits)
            self._peak_known = True
        super().log(*args, **kwargs)


class OctavoSelectiveAC(SelectiveAC):
    """TorchTitan's selective activation checkpointing that keeps the outputs of scaled products too."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set[Any]:
        """TorchTitan's set and ours: a scaled product costs as much to compute again as any other."""
        ours = (torch.ops.octavo.scaled_mm.default, torch.ops.octavo.scaled_grouped_mm.default)
        return super().get_save_ops() | set(ours)
