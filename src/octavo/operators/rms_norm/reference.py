"""The definition of Octavo's RMSNorm in plain PyTorch: any device, slow."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def default_eps() -> float:
    """``eps=None`` means the float32 epsilon, the accumulation type's, as in PyTorch's GPU kernel."""
    return torch.finfo(torch.float32).eps


def fused_rms_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None, eps: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``aten::_fused_rms_norm``: (y of input's dtype and shape, rstd float32 [..., 1 for each normalized dim])."""
    dims = tuple(range(-len(normalized_shape), 0))
    x = input.float()
    rstd = torch.rsqrt(x.pow(2).mean(dims, keepdim=True) + (default_eps() if eps is None else eps))
    y = x * rstd
    if weight is not None:
        y = y * weight.float()
    return y.to(input.dtype), rstd


def fused_rms_norm_backward(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """As ``aten::_fused_rms_norm_backward``: (dx of input's dtype, dw of weight's dtype)."""
    dims = tuple(range(-len(normalized_shape), 0))
    n = math.prod(normalized_shape)
    x, g = input.float(), grad_out.float()
    gw = g if weight is None else g * weight.float()
    dx = dw = None
    if output_mask[0]:
        dot = (gw * x).sum(dims, keepdim=True)
        dx = (rstd * (gw - x * (dot * rstd * rstd / n))).to(input.dtype)
    if output_mask[1] and weight is not None:
        dw = (g * (x * rstd)).reshape(-1, *normalized_shape).sum(0).to(weight.dtype)
    return dx, dw
