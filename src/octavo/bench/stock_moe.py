"""What PyTorch alone offers for experts: BF16 by ``torch._grouped_mm``, FP8 by ``torch._scaled_grouped_mm``.

Quantization here is plain PyTorch steps, to be run under torch.compile. The operator wants groups that end at
multiples of 16 where it contracts over them, and checks that by an assertion on the device: sizes that are no such
multiples need a padding that PyTorch has no operator for, so :func:`fits` says which ones it may be given.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

LARGEST = 448.0


def fits(sizes: tuple[int, ...]) -> bool:
    """Whether ``torch._scaled_grouped_mm`` can contract over groups of these sizes as they are."""
    return all(size % 16 == 0 for size in sizes)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes [..., M, K], scale [..., M]): a scale a row, a power of two."""
    encode = _encode(x.abs().amax(-1, keepdim=True).float())
    return (x.float() * encode).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), (1 / encode).squeeze(-1)


def quantize_columns(x: torch.Tensor, offs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes of the transpose [K, M], scale [G K]): a scale for each column of each group of rows."""
    sizes = torch.diff(offs, prepend=offs.new_zeros(1)).long()
    amax = torch.segment_reduce(x.abs(), "max", lengths=sizes, axis=0, unsafe=True, initial=0.0)
    encode = _encode(amax.float())
    group = torch.searchsorted(offs, torch.arange(x.shape[0], device=x.device), right=True)
    scaled = x.float() * encode[group.clamp(max=offs.shape[0] - 1)]
    codes = scaled.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return codes.t().contiguous(), (1 / encode).flatten()


def _encode(amax: torch.Tensor) -> torch.Tensor:
    exact = LARGEST / amax.clamp(min=1e-12)
    return ((exact.view(torch.int32) >> 23) << 23).view(torch.float32)


class Fp8Grouped(torch.autograd.Function):
    """``x[rows of g] @ w[g].T`` with all three products by ``torch._scaled_grouped_mm``, rowwise."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        """[M, N] of x [M, K], w [G, N, K] and int32 ends [G]."""
        ctx.save_for_backward(x, w, offs)
        return fp8_product(quantize_rows(x), quantize_rows(w), offs, fast=True)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of x and w, precise accumulation."""
        (g,) = grads
        x, w, offs = ctx.saved_tensors
        turned = quantize_rows(w.mT.contiguous())
        dx = fp8_product(quantize_rows(g), turned, offs, fast=False)
        dw = fp8_product(quantize_columns(g, offs), quantize_columns(x, offs), offs, fast=False)
        return dx, dw, None


def fp8_product(
    a: tuple[torch.Tensor, torch.Tensor],
    b: tuple[torch.Tensor, torch.Tensor],
    offs: torch.Tensor,
    *,
    fast: bool,
) -> torch.Tensor:
    """``a @ b.mT`` in bfloat16 of quantized operands, contraction last on both sides."""
    return torch._scaled_grouped_mm(  # pyright: ignore[reportPrivateImportUsage]
        a[0], b[0].mT, a[1], b[1], offs=offs, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


def bf16_grouped(x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """``x[rows of g] @ w[g].T`` by ``torch._grouped_mm``, with its own gradients."""
    return torch._grouped_mm(x, w.mT, offs=offs)  # pyright: ignore[reportPrivateImportUsage]


def bf16_over_groups(g: torch.Tensor, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """``g[rows of g].T @ x[rows of g]`` [G, N, K] by ``torch._grouped_mm``."""
    return torch._grouped_mm(g.t(), x, offs=offs)  # pyright: ignore[reportPrivateImportUsage]


def fp8_grouped(x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """:class:`Fp8Grouped` as a function."""
    return Fp8Grouped.apply(x, w, offs)  # type: ignore[return-value]


def experts(
    product: Any,
    x: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    offs: torch.Tensor,
    rows: torch.Tensor | None,
    back: torch.Tensor | None,
    scores: torch.Tensor | None,
) -> torch.Tensor:
    """The expert MLP of gate w1, up w3 [G, F, D] and down w2 [G, D, F], given in that order, from such products.

    Args:
        x: rows [R, D] in the order of the experts, or tokens [T, D] with ``rows`` int64 [R], the token of each
            row, ``back`` int64 [T, k], the row of each choice, and ``scores`` [T, k].
    """
    w1, w3, w2 = weights
    sent = x if rows is None else x.index_select(0, rows)
    y = product(F.silu(product(sent, w1, offs)) * product(sent, w3, offs), w2, offs)
    if back is None or scores is None:
        return y
    picked = y.index_select(0, back.flatten()).view(*back.shape, -1)
    return (picked.float() * scores.unsqueeze(-1)).sum(1).to(x.dtype)


def compiled(function: Any) -> Any:
    """``function`` under torch.compile from its first call on, so that a suite can be listed without compiling."""
    made: list[Any] = []

    def call(*inputs: Any) -> Any:
        if not made:
            made.append(torch.compile(function, dynamic=False))
        return made[0](*inputs)

    return call
