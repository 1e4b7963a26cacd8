"""The autograd Function of grouped products, for every recipe and both forms of ``torch._grouped_mm``.

The two forms are the three products of one layer of experts seen from different sides. With g [M, N], x [M, K],
w [G, N, K] and rows that belong to groups:

    output      [M, N]     x[rows of g] @ w[g].T
    grad_input  [M, K]     g[rows of g] @ w[g]
    grad_weight [G, N, K]  g[rows of g].T @ x[rows of g]

``2-D x 3-D`` is output, and the other two are its gradients; ``2-D x 2-D`` is grad_weight, and output and grad_input
are its gradients. Rows past the last group end are zero in what has rows; what has groups is zero for empty ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from octavo.formats import Format, ScaledTensor
from octavo.matmul import grouped_mm as grouped_mm_hp
from octavo.matmul import scaled_grouped_mm
from octavo.quantize import alignment, quantize_grouped
from octavo.training.autograd import Stats, autocast, check, restore, save, without_autocast
from octavo.training.observe import observe
from octavo.training.recipes import Product, Recipe
from octavo.training.weight_cache import quantize_weight


def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    offs: torch.Tensor,
    bias: torch.Tensor | None,
    recipe: Recipe,
    stats: Stats = None,
) -> torch.Tensor:
    """``x[rows of g] @ weight[g].T + bias[g]`` for x[M, K], weight[G, N, K], int32 ends offs[G], bias[G, N].

    Rows past the last end are zero in the output and in the gradient of ``x``; an empty group's weight
    gradient is exactly zero. No scale is shared by two groups.

    Raises:
        ValueError: if shapes, dtypes or ``offs`` do not fit.
    """
    x, weight, bias = autocast(x, weight, bias)
    fits = x.ndim == 2 and weight.ndim == 3 and x.shape[1] == weight.shape[2]
    check(x, weight, fits, "weight[G, N, K], x a matrix")
    return _Grouped.apply(x, weight, offs, bias, recipe, stats, torch.is_grad_enabled())


def grouped_outer(g: torch.Tensor, x: torch.Tensor, offs: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """``g[rows of g].T @ x[rows of g]`` for g[M, N], x[M, K], int32 ends offs[G]: [G, N, K], by ``grad_weight``.

    Raises:
        ValueError: if shapes, dtypes or ``offs`` do not fit.
    """
    g, x, _ = autocast(g, x, None)
    if g.ndim != 2 or x.ndim != 2 or g.shape[0] != x.shape[0] or g.dtype != x.dtype:
        raise ValueError(
            f"a grouped product of two matrices takes a[N, M] and b[M, K] of one dtype, contracting over the M rows "
            f"of the groups; got a {tuple(g.shape[::-1])} {g.dtype} and b {tuple(x.shape)} {x.dtype}"
        )
    return _Grouped.apply(g, x, offs, None, recipe, None, torch.is_grad_enabled())


class _Grouped(torch.autograd.Function):
    """``grouped_linear`` of (x, weight) if the second operand is 3-D, ``grouped_outer`` of (g, x) if it is 2-D."""

    @staticmethod
    def forward(
        ctx: Any,
        a: torch.Tensor,
        b: torch.Tensor,
        offs: torch.Tensor,
        bias: torch.Tensor | None,
        recipe: Recipe,
        stats: Stats,
        grad_enabled: bool,
    ) -> torch.Tensor:
        ctx.recipe, ctx.stats, ctx.outer = recipe, stats, b.ndim == 2
        product = recipe.product("grad_weight", a.device)
        if ctx.outer:
            save(ctx, a, None, b, offs)
            saved = None if product is None else group_columns(b, offs, product, product.b)
            return _outer_product(None, a, b, saved, offs, product, a.dtype)
        needs_weight = grad_enabled and ctx.needs_input_grad[1]
        saved = group_columns(a, offs, product, product.b) if product is not None and needs_weight else None
        observe(stats, "grad_weight", 1, a, saved, offs=offs)
        save(ctx, a if needs_weight else a.new_empty(0), saved, b, offs)
        return _output(stats, a, b, offs, bias, recipe.product("output", a.device))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        high, saved, other, offs = restore(ctx)
        needs_a, needs_b, _, needs_bias = ctx.needs_input_grad[:4]
        output, grad_input, grad_weight = (
            ctx.recipe.product(name, grad.device) for name in ("output", "grad_input", "grad_weight")
        )
        da = db = None
        with without_autocast(grad):
            if ctx.outer:
                da = _output(ctx.stats, other, grad, offs, None, output) if needs_a else None
                db = _grad_input(ctx.stats, high, grad, offs, grad_input) if needs_b else None
            else:
                stats, dtype = ctx.stats, other.dtype
                da = _grad_input(stats, grad, other, offs, grad_input) if needs_a else None
                db = _outer_product(stats, grad, high, saved, offs, grad_weight, dtype) if needs_b else None
        bias = group_sums(grad, offs) if needs_bias else None
        return da, db, None, bias, None, None, None


def group_columns(x: torch.Tensor, offs: torch.Tensor, product: Product, fmt: Format) -> ScaledTensor:
    """The transpose of ``x`` in ``fmt`` in padded groups that suit both operands of ``product``."""
    return quantize_grouped(x, offs, fmt, transpose=True, align=alignment(product.a, product.b))


def _output(
    stats: Stats,
    x: torch.Tensor,
    weight: torch.Tensor,
    offs: torch.Tensor,
    bias: torch.Tensor | None,
    product: Product | None,
) -> torch.Tensor:
    if product is None:
        return grouped_mm_hp(x, weight, offs, bias=bias)
    a, b = quantize_grouped(x, offs, product.a), quantize_weight(weight, product.b)
    observe(stats, "output", 0, x, a, offs=offs)
    observe(stats, "output", 1, weight, b)
    return scaled_grouped_mm(a, b, offs, bias=bias, out_dtype=x.dtype, fast_accum=product.fast_accum)


def _grad_input(
    stats: Stats, g: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor, product: Product | None
) -> torch.Tensor:
    if product is None:
        return grouped_mm_hp(g, weight.mT, offs)
    a, b = quantize_grouped(g, offs, product.a), quantize_weight(weight, product.b, transpose=True, after=g)
    observe(stats, "grad_input", 0, g, a, offs=offs)
    observe(stats, "grad_input", 1, weight, b, transpose=True)
    return scaled_grouped_mm(a, b, offs, out_dtype=g.dtype, fast_accum=product.fast_accum)


def _outer_product(
    stats: Stats,
    g: torch.Tensor,
    x: torch.Tensor | None,
    columns: ScaledTensor | None,
    offs: torch.Tensor,
    product: Product | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """grad_weight [G, N, K] of g [M, N] and x [M, K], or of ``columns``, which are x quantized for ``product``."""
    if product is None or columns is None:
        assert x is not None
        return grouped_mm_hp(g.T, x.T, offs)
    a = group_columns(g, offs, product, product.a)
    observe(stats, "grad_weight", 0, g, a, offs=offs)
    return scaled_grouped_mm(a, columns, out_dtype=dtype, fast_accum=product.fast_accum)


def group_sums(g: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """[G, N] sums of the rows of each group in float32; rows past the last end belong to none."""
    rows = torch.arange(g.shape[0], device=g.device)
    member = torch.searchsorted(offs, rows, right=True)
    sums = g.new_zeros((offs.shape[0] + 1, g.shape[1]), dtype=torch.float32)
    return sums.index_add_(0, member, g.float())[:-1].to(g.dtype)
