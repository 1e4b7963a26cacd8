"""Other people's kernels, timed beside ours where their package is installed. A missing one is never an error."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from octavo.bench.timing import Contender

PACKAGES = {"liger": "liger-kernel", "torchao": "torchao", "deep_gemm": "deep_gemm"}
"""Contender name to the distribution that provides it."""


def versions() -> dict[str, str]:
    """Installed peers and their versions."""
    found = {}
    for package in PACKAGES.values():
        if importlib.util.find_spec(package.replace("-", "_")) is not None:
            try:
                found[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                found[package] = "unknown"
    return found


def liger_rms_norm_forward(eps: float) -> dict[str, Contender]:
    """Liger's forward kernel as ``(x, w) -> y``; empty if Liger is not installed."""
    if importlib.util.find_spec("liger_kernel") is None:
        return {}
    from liger_kernel.ops.rms_norm import rms_norm_forward  # type: ignore[import-not-found]

    def call(x: torch.Tensor, w: torch.Tensor) -> Any:
        return rms_norm_forward(x, w, eps, 0.0, "llama", None)

    return {"liger": Contender(call)}


def liger_rms_norm_backward() -> dict[str, Contender]:
    """Liger's backward kernels as ``(g, x, rstd, w) -> dx, dw``; empty if Liger is not installed."""
    if importlib.util.find_spec("liger_kernel") is None:
        return {}
    from liger_kernel.ops.rms_norm import rms_norm_backward  # type: ignore[import-not-found]
    from liger_kernel.ops.utils import calculate_settings  # type: ignore[import-not-found]

    def call(g: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, w: torch.Tensor) -> Any:
        block, warps = calculate_settings(x.shape[-1])
        return rms_norm_backward(g, x, w, rstd.view(-1), 0.0, 0, block, warps, False, None)

    return {"liger": Contender(call)}


TORCHAO_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
"""Names that mean the same in ``torchao.float8``."""


def has_torchao_recipe(recipe: str) -> bool:
    """Whether torchao is installed and has this recipe."""
    return recipe in TORCHAO_RECIPES and importlib.util.find_spec("torchao") is not None


def torchao_float8(model: nn.Module, recipe: str) -> nn.Module:
    """``model`` with its linear layers converted by torchao's recipe of that name, in place."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # type: ignore[import-not-found]

    config = Float8LinearConfig.from_recipe_name(recipe)
    return convert_to_float8_training(model, config=config)


def deep_gemm_blockwise() -> dict[str, Contender]:
    """DeepGEMM's 1x128 by 128x128 product of two quantized operands; empty if it is not installed.

    The package may stand alone or inside vLLM's wheel (``vllm/third_party/deep_gemm``).
    """
    product = _deep_gemm()
    if product is None:
        return {}

    def call(a: Any, b: Any, *_rest: Any) -> torch.Tensor:
        out = torch.empty(a.shape[0], b.shape[0], device=a.data.device, dtype=torch.bfloat16)
        product((a.data, a.scale), (b.data, b.scale), out)
        return out

    return {"deep_gemm": Contender(call)}


def _deep_gemm() -> Callable[..., Any] | None:
    for name in ("deep_gemm", "vllm.third_party.deep_gemm"):
        try:
            if importlib.util.find_spec(name) is not None:
                return importlib.import_module(name).fp8_gemm_nt
        except (ImportError, AttributeError, OSError):
            # Built for another PyTorch or CUDA: a peer that cannot load is one that is missing.
            continue
    return None
