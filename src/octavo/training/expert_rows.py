"""Tokens to the rows of their experts and back, in high precision, with gradients that need no atomics.

The gradient of a gather is a sum over the choices of a token, which :func:`octavo.fused.experts.combine_rows` computes
in float32, in a fixed order, rounded once. Indexing's own gradient sorts the indices or adds in 16 bits.
Shape letters as in :mod:`octavo.fused.experts`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from octavo.fused.experts import combine_rows


def permute(x: torch.Tensor, order: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
    """The token of each row, ``x[order // k]``: [R, D] of x [T, D].

    Args:
        order: int64 [R], the choice (t k + j) of each row.
        back: int64 [T, k], the row of each choice.
    """
    return _Permute.apply(x, order, back)  # type: ignore[return-value]


def combine(y: torch.Tensor, scores: torch.Tensor, order: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
    """``sum over j of scores[t, j] y[back[t, j]]`` [T, D] of y [R, D] and scores float32 [T, k]."""
    return _Combine.apply(y, scores, order, back)  # type: ignore[return-value]


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, order // back.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (back,) = ctx.saved_tensors
        return combine_rows(grads[0], back, None), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, scores: torch.Tensor, order: torch.Tensor, back: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(y, scores, order, back)
        return combine_rows(y, back, scores)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        y, scores, order, back = ctx.saved_tensors
        rows = grads[0].index_select(0, order // back.shape[1])
        dy = dscores = None
        if ctx.needs_input_grad[0]:
            dy = (rows * scores.flatten().index_select(0, order).unsqueeze(-1)).to(y.dtype)
        if ctx.needs_input_grad[1]:
            products = (rows.float() * y.float()).sum(-1)
            dscores = products.index_select(0, back.flatten()).view(back.shape)
        return dy, dscores, None, None
