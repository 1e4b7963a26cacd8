"""The interfaces of vLLM 0.22 that the plugin uses, without vLLM: registries, a norm, linear layers and their loading.

``vllm`` itself needs a GPU build of PyTorch. What stands here follows its documented plugin seams: an out-of-tree class
is instantiated in place of the class of that name, and a method creates, loads and applies weights.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from octavo.integrations import vllm as plugin


class CustomOp(nn.Module):
    oot: dict[str, type] = {}
    name: str

    def __new__(cls, *arguments: Any, **named: Any) -> Any:
        return super().__new__(CustomOp.oot.get(cls.__name__, cls))

    @classmethod
    def register_oot(cls, name: str) -> Any:
        def decorator(kind: Any) -> Any:
            assert name not in CustomOp.oot, f"Duplicate op name: {name}"
            kind.name = name
            CustomOp.oot[name] = kind
            return kind

        return decorator

    def forward(self, *arguments: Any) -> Any:
        return self.forward_cuda(*arguments)

    def forward_cuda(self, *arguments: Any) -> Any:
        raise NotImplementedError


class RMSNorm(CustomOp):
    name = "rms_norm"

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, var_hidden_size: int | None = None, has_weight: bool = True
    ):
        super().__init__()
        self.variance_epsilon, self.has_weight = eps, has_weight
        self.variance_size_override = None if var_hidden_size == hidden_size else var_hidden_size
        self.weight: Any = torch.ones(hidden_size)
        if has_weight:
            self.weight = nn.Parameter(self.weight)
        self.own_calls = 0

    def forward_cuda(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        self.own_calls += 1
        total = x if residual is None else x + residual
        out = (total.float() * torch.rsqrt(total.float().square().mean(-1, True) + self.variance_epsilon)).to(
            x.dtype
        )
        return out * self.weight if residual is None else (out * self.weight, total)


class QuantizationConfig:
    def __init__(self) -> None:
        self.packed_modules_mapping: dict[str, list[str]] = {}


class UnquantizedLinearMethod:
    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        dtype: torch.dtype,
    ) -> None:
        rows = sum(output_partition_sizes)
        layer.register_parameter(
            "weight",
            nn.Parameter(torch.empty(rows, input_size_per_partition, dtype=dtype), requires_grad=False),
        )

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        return

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, layer.weight, bias)


class LinearBase(nn.Module):
    """A layer as vLLM makes one: its method from the configuration, weights loaded, then processed."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, config: Any, prefix: str = ""
    ) -> None:
        super().__init__()
        method = config.get_quant_method(self, prefix) if config else None
        self.quant_method: Any = method or UnquantizedLinearMethod()
        self.quant_method.create_weights(self, weight.shape[1], [weight.shape[0]], weight.dtype)
        weights: Any = self
        weights.weight.data.copy_(weight)
        self.bias = bias
        self.quant_method.process_weights_after_loading(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.quant_method.apply(self, x, self.bias)


METHODS: dict[str, Any] = {}


def register_quantization_config(quantization: str) -> Any:
    def decorator(kind: Any) -> Any:
        if not issubclass(kind, QuantizationConfig):
            raise ValueError("The quantization config must be a subclass of `QuantizationConfig`.")
        METHODS[quantization] = kind
        return kind

    return decorator


def install(monkeypatch: pytest.MonkeyPatch, without: str = "") -> None:
    """Puts the stand-ins where ``import vllm...`` finds them; ``without`` names a module that is not there."""
    CustomOp.oot.clear()
    METHODS.clear()
    contents: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.model_executor": {},
        "vllm.model_executor.custom_op": {"CustomOp": CustomOp},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.layernorm": {"RMSNorm": RMSNorm},
        "vllm.model_executor.layers.linear": {
            "LinearBase": LinearBase, "UnquantizedLinearMethod": UnquantizedLinearMethod,
        },
        "vllm.model_executor.layers.quantization": {"register_quantization_config": register_quantization_config},
        "vllm.model_executor.layers.quantization.base_config": {"QuantizationConfig": QuantizationConfig},
    }  # fmt: skip
    for name, names in contents.items():
        module: Any = ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, None if name == without else module)
    for part in ("norm", "quantization"):
        monkeypatch.delitem(sys.modules, f"octavo.integrations.vllm.{part}", raising=False)
        monkeypatch.delattr(plugin, part, raising=False)
