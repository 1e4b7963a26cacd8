"""Other people's kernels, timed beside ours where their package is installed. A missing one is never an error."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import Any

import torch

from octavo.bench.timing import Contender

PACKAGES = {"liger": "liger-kernel", "torchao": "torchao"}
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
