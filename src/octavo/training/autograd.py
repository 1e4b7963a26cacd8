"""The autograd Function of linear layers; every recipe runs through it, as through that of :mod:`.grouped`.

No FP8 tensor is ever an output of a Function: the engine would cast the incoming gradient to that dtype,
where 1e-4 becomes 0 without an error. What backward needs of the input is saved in its 8-bit form, made in
the same pass as the forward's operand; the weight is saved as it is and quantized again, because a second
8-bit copy of every weight would live from forward to backward.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from octavo.formats import Format, ScaledTensor
from octavo.matmul import scaled_mm
from octavo.quantize import quantize, quantize_both
from octavo.training.observe import observe
from octavo.training.recipes import Product, Recipe
from octavo.training.shared import share
from octavo.training.weight_cache import cast_weight, quantize_weight

Stats = torch.Tensor | None
AUTOCAST_DEVICES = ("cpu", "cuda")
"""Named here, because PyTorch 2.11 cannot trace the question which devices have autocast."""
NO_CONTEXT = contextlib.nullcontext()


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, recipe: Recipe, stats: Stats = None
) -> torch.Tensor:
    """``x[..., K] @ weight[N, K].T + bias[N]`` with the products of ``recipe``, forward and backward.

    Under autocast the operands are cast first, as ``F.linear`` does. ``stats`` is a monitor's buffer.

    Raises:
        ValueError: if shapes or dtypes do not fit, as ``F.linear`` would raise.
    """
    x, weight, bias = autocast(x, weight, bias)
    check(x, weight, x.ndim >= 1 and weight.ndim == 2 and x.shape[-1:] == weight.shape[-1:], "weight[N, K]")
    if not recipe.quantized_products:
        return torch.nn.functional.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias, recipe, stats, torch.is_grad_enabled())


def autocast(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The operands in the dtype of autocast where that is on, the copy of the weight known to the weight cache."""
    if not autocasts(x):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), cast_weight(weight, dtype), None if bias is None else bias.to(dtype)


def autocasts(x: torch.Tensor) -> bool:
    """Whether an enabled autocast would cast ``x``."""
    return x.device.type in AUTOCAST_DEVICES and torch.is_autocast_enabled(x.device.type)


def without_autocast(x: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Products in backward run in the dtypes they were given, also where backward is called under autocast."""
    return torch.autocast(x.device.type, enabled=False) if x.device.type in AUTOCAST_DEVICES else NO_CONTEXT


def flat(x: torch.Tensor) -> torch.Tensor:
    """[..., K] as a matrix [rows, K]; its own sizes, since -1 cannot be inferred for zero elements."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def check(x: torch.Tensor, weight: torch.Tensor, fits: bool, needed: str) -> None:
    """ValueError unless the shapes fit and the dtypes are one."""
    if not fits or x.dtype != weight.dtype:
        raise ValueError(
            f"need x[..., K] and {needed} of one dtype; got x {tuple(x.shape)} {x.dtype} and weight "
            f"{tuple(weight.shape)} {weight.dtype}: cast one of them, or use autocast"
        )


def both(
    x: torch.Tensor, fmt: Format | None, transposed_fmt: Format | None
) -> tuple[ScaledTensor | None, ScaledTensor | None]:
    """``x`` and its transpose, each quantized if its format is given, in one pass if both are."""
    if fmt is not None and transposed_fmt is not None:
        return quantize_both(x, fmt, transposed_fmt)
    return (
        None if fmt is None else quantize(x, fmt),
        None if transposed_fmt is None else quantize(x, transposed_fmt, transpose=True),
    )


def save(ctx: Any, high: torch.Tensor, low: ScaledTensor | None, *others: torch.Tensor | None) -> None:
    """Save the 8-bit operand if there is one, else the 16-bit tensor, and ``others``."""
    if low is None:
        ctx.saved_format, ctx.saved_ends = None, False
        ctx.save_for_backward(high, None, None, *others)
    else:
        ctx.saved_format, ctx.saved_ends = low.format, low.group_ends is not None
        ctx.save_for_backward(low.data, low.scale, low.group_ends, *others)


def restore(ctx: Any) -> tuple[Any, ...]:
    """(high, low, *others) as given to :func:`save`, one of the first two None."""
    data, scale, ends, *others = ctx.saved_tensors
    if ctx.saved_format is None:
        return data, None, *others
    return None, ScaledTensor(data, scale, ctx.saved_format, group_ends=ends), *others


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        recipe: Recipe,
        stats: Stats,
        grad_enabled: bool,
    ) -> torch.Tensor:
        output, grad_weight = (recipe.product(name, x.device) for name in ("output", "grad_weight"))
        rows = flat(x)
        needs_weight = grad_enabled and ctx.needs_input_grad[1]
        # A frozen weight has no weight-gradient product, so nothing of the input is quantized for it or kept.
        saved_fmt = grad_weight.b if grad_weight is not None and needs_weight else None
        formats = (output and output.a, saved_fmt)
        a, saved = share(x, formats, lambda: both(rows, *formats))
        if output is None:
            out = torch.nn.functional.linear(rows, weight, bias)
        else:
            assert a is not None
            b = quantize_weight(weight, output.b)
            observe(stats, "output", 0, rows, a)
            observe(stats, "output", 1, weight, b)
            out = scaled_mm(a, b, bias=bias, out_dtype=x.dtype, fast_accum=output.fast_accum)
        observe(stats, "grad_weight", 1, rows, saved, transpose=True)
        save(ctx, rows if needs_weight else rows.new_empty(0), saved, weight)
        ctx.recipe, ctx.stats, ctx.x_shape = recipe, stats, x.shape
        return out.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (g,) = grads
        rows, saved, weight = restore(ctx)
        grad_input, grad_weight = (ctx.recipe.product(n, g.device) for n in ("grad_input", "grad_weight"))
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        g = flat(g)
        a, a_t = both(
            g,
            grad_input.a if grad_input and needs_x else None,
            grad_weight.a if grad_weight and needs_weight else None,
        )
        with without_autocast(g):
            dx = _grad_input(ctx.stats, g, a, weight, grad_input) if needs_x else None
            dw = None
            if needs_weight:
                observe(ctx.stats, "grad_weight", 0, g, a_t, transpose=True)
                if saved is None or a_t is None:
                    dw = g.T @ rows
                else:
                    dw = scaled_mm(a_t, saved, out_dtype=weight.dtype, fast_accum=grad_weight.fast_accum)
        db = g.sum(0) if needs_bias else None
        return None if dx is None else dx.view(ctx.x_shape), dw, db, None, None, None


def _grad_input(
    stats: Stats, g: torch.Tensor, a: ScaledTensor | None, weight: torch.Tensor, product: Product | None
) -> torch.Tensor:
    if product is None or a is None:
        return g @ weight
    b = quantize_weight(weight, product.b, transpose=True, after=g)
    observe(stats, "grad_input", 0, g, a)
    observe(stats, "grad_input", 1, weight, b, transpose=True)
    return scaled_mm(a, b, out_dtype=g.dtype, fast_accum=product.fast_accum)
