"""The definition of Octavo's TopK in plain PyTorch: any device, any shape, slow."""

from __future__ import annotations

import torch


def order_keys(x: torch.Tensor) -> torch.Tensor:
    """int32 keys that order as ``torch.topk`` orders float32, bfloat16 or float16 values.

    NaN is above everything whatever its sign, -0 equals +0.
    """
    f = x.float()
    bits = (f + 0.0).view(torch.int32)
    bits = torch.where(f.isnan(), torch.full_like(bits, 0x7FFFFFFE), bits)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def topk(
    x: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values of x's dtype and int64 indices with ``dim`` cut to ``k``; equal values by the lowest index.

    The result is sorted whatever ``sorted`` says, which PyTorch's contract allows.
    """
    keys = order_keys(x)
    order = torch.sort(keys if largest else ~keys, dim=dim, descending=True, stable=True).indices
    indices = order.narrow(dim, 0, k).contiguous()
    return x.gather(dim, indices), indices
