"""Quantization methods ``octavo_mxfp8``, ``octavo_mxfp4`` and ``octavo_fp8_blockwise`` of vLLM.

They take a 16-bit checkpoint and quantize each linear layer once its weights are loaded. Checkpoints that
``octavo export`` wrote need none of this: their ``quantization_config`` is one that vLLM reads with its own kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod  # type: ignore[import-not-found]
from vllm.model_executor.layers.quantization import register_quantization_config  # type: ignore[import-not-found]
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig  # type: ignore[import-not-found]

from octavo.serving import SCHEMES, QuantizedLinear, Scheme

PREFIX = "octavo_"
MIN_CAPABILITY = 90


def method_name(scheme: Scheme) -> str:
    """What vLLM's ``--quantization`` calls a scheme."""
    return PREFIX + scheme.name.replace("-", "_")


class OctavoLinearMethod(UnquantizedLinearMethod):
    """Loads a layer as vLLM loads one in 16 bits, then keeps codes and scales instead.

    Args:
        scheme: how the weight is kept and what inputs are turned into.
    """

    def __init__(self, scheme: Scheme) -> None:
        super().__init__()
        self.scheme = scheme

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Quantizes ``layer.weight`` [N, K] of this rank and drops it."""
        weight = layer.weight
        assert isinstance(weight, torch.Tensor)
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
        layer.octavo = QuantizedLinear.of(linear, self.scheme)
        del layer.weight

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] -> [..., N] in x's dtype."""
        quantized = layer.octavo
        assert isinstance(quantized, QuantizedLinear)
        out = quantized(x)
        return out if bias is None else out + bias


class OctavoConfig(QuantizationConfig):
    """What vLLM asks of a quantization method; a class for each scheme says which."""

    scheme: Scheme

    def get_name(self) -> str:
        """As in ``--quantization``."""
        return method_name(self.scheme)

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Of the layers' inputs."""
        return [torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Hopper; AMD's gfx942 and gfx950 count as 94 and 95."""
        return MIN_CAPABILITY

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: a 16-bit checkpoint says nothing about it."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> OctavoConfig:
        """Refuses: vLLM calls it for a checkpoint that is quantized already."""
        raise ValueError(
            f"--quantization {method_name(cls.scheme)} quantizes 16-bit weights and this checkpoint is quantized "
            f"already ({config.get('quant_method', 'unknown')}): leave --quantization out, or give 16-bit weights"
        )

    def get_quant_method(self, layer: nn.Module, prefix: str) -> OctavoLinearMethod | None:
        """Linear layers alone: embeddings, the output head and attention stay as they are."""
        return OctavoLinearMethod(self.scheme) if isinstance(layer, LinearBase) else None


def register() -> None:
    """Makes the methods known to vLLM."""
    for scheme in SCHEMES.values():
        kind = type("Octavo" + scheme.name.title().replace("-", ""), (OctavoConfig,), {"scheme": scheme})
        register_quantization_config(method_name(scheme))(kind)
