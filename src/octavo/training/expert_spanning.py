"""The expert MLP as one autograd Function: permute, gate and up, SwiGLU, down, combine with the router's weight.

Shape letters as in :mod:`octavo.fused.experts`: T tokens, k experts a token is sent to, R = T k rows in the order
of the experts, G experts, D model width, F width of an expert.

What is quantized, and how often: a token once, not once an expert it is sent to (its codes are permuted); gate and
up as one weight; the activation where it is made. Backward quantizes the gradient of a token once as well, and the
router's weight multiplies the activation's gradient there instead of each expert's output, so no output is kept.

What is saved for backward: h = [gate | up] in 16 bits, since SwiGLU is differentiated there; the input for the
weight gradient in 8 bits in the layout that product wants, or, where tokens in 16 bits are smaller than rows in 8
(k above 2), the tokens. Rows in 16 bits, the activation and the experts' outputs are not saved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from octavo.formats import ALL, Format, ScaledTensor
from octavo.fused.experts import combine_rows, permute_quantize, swiglu_backward_rows, swiglu_quantize_rows
from octavo.fused.reference import swiglu
from octavo.matmul import grouped_mm as grouped_mm_hp
from octavo.matmul import scaled_grouped_mm
from octavo.quantize import alignment, check_offs, quantize
from octavo.training.autograd import Stats, autocasts, without_autocast
from octavo.training.expert_rows import combine, permute
from octavo.training.gathered import GatheredWeight
from octavo.training.grouped import grouped_linear
from octavo.training.observe import observe
from octavo.training.recipes import PRODUCTS, Product, Recipe
from octavo.training.weight_cache import cached, cast_weight, quantize_weight

Weights = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]
"""Gate [G, F, D], up [G, F, D] and down [G, D, F]; or gate and up in one [G, 2 F, D], None, and down."""
Watched = tuple[Stats, Stats]
"""Buffers of a monitor for the products with gate and up, and for those with down; None where nobody watches."""
NOBODY: Watched = (None, None)


@dataclass(frozen=True)
class Routing:
    """Where the rows of the tokens' choices stand.

    ``offs`` int32 [G] are the ends of the experts' rows, ``order`` int64 [R] the choice (t k + j) of each row and
    ``back`` int64 [T, k] the row of each choice. Choices of no expert come after the last end.
    """

    offs: torch.Tensor
    order: torch.Tensor
    back: torch.Tensor


def route(indices: torch.Tensor, experts: int) -> Routing:
    """The routing of ``indices`` [T, k], computed on their device without a look at them.

    Numbers below 0 or from ``experts`` on stand for no expert.
    """
    choice = torch.where(indices < 0, experts, indices).flatten()
    expert, order = choice.sort(stable=True)
    numbers = torch.arange(experts, device=indices.device, dtype=expert.dtype)
    offs = torch.searchsorted(expert, numbers, right=True, out_int32=True)
    places = torch.arange(order.shape[0], device=order.device)
    back = torch.empty_like(order).scatter(0, order, places)
    return Routing(offs, order, back.view(indices.shape))


def routed_experts(
    x: torch.Tensor,
    indices: torch.Tensor,
    scores: torch.Tensor,
    weights: Weights,
    recipe: Recipe,
    stats: Watched = NOBODY,
) -> torch.Tensor:
    """The weighted sum of each token's experts: ``sum_j scores[t, j] w2[e] (silu(w1[e] x_t) * (w3[e] x_t))``.

    Args:
        x: [T, D].
        indices: integers [T, k], the experts e; a number that is no expert's adds nothing.
        scores: [T, k].
        weights: see :data:`Weights`, in the dtype of ``x`` or under autocast.
        stats: buffers of a monitor.

    Returns:
        [T, D] in the dtype of ``x`` (of autocast under it), summed in float32, with gradients for x, scores and
        weights.

    Raises:
        ValueError: if shapes or dtypes do not fit.
    """
    x, weights = _autocast(x, weights)
    experts = _check(x, weights)
    if indices.ndim != 2 or indices.shape != scores.shape or indices.shape[0] != x.shape[0]:
        raise ValueError(
            f"indices and scores are [T, k] for the T tokens of x [T, D]; got x {tuple(x.shape)}, indices "
            f"{tuple(indices.shape)} and scores {tuple(scores.shape)}"
        )
    if indices.dtype.is_floating_point or indices.dtype is torch.bool:
        raise ValueError(f"indices are integers; got {indices.dtype}: give the indices that topk returns")
    # What stands for no expert has no say, whatever its score is.
    live = (indices >= 0) & (indices < experts)
    scores = torch.where(live, scores.float(), 0.0)
    routing = route(indices, experts)
    if not _spannable(weights, recipe, x.device):
        rows = _rows_by_layer(permute(x, routing.order, routing.back), routing.offs, weights, recipe, stats)
        return combine(rows, scores, routing.order, routing.back)
    return _Experts.apply(
        x,
        scores,
        *weights,
        routing.offs,
        routing.order,
        routing.back,
        recipe,
        *stats,
        torch.is_grad_enabled(),
    )


def sorted_experts(
    x: torch.Tensor, offs: torch.Tensor, weights: Weights, recipe: Recipe, stats: Watched = NOBODY
) -> torch.Tensor:
    """Each expert on its own rows, as they arrive from other ranks: rows x [R, D] in the order of the experts.

    Args:
        offs: int32 [G], cumulative ends; rows past the last give zero and get a zero gradient.
        stats: buffers of a monitor.

    Returns:
        [R, D], with gradients for x and weights.

    Raises:
        ValueError: if shapes, dtypes or ``offs`` do not fit.
    """
    x, weights = _autocast(x, weights)
    experts = _check(x, weights)
    check_offs(x, offs)
    if offs.shape[0] != experts:
        raise ValueError(f"offs has {offs.shape[0]} ends for {experts} experts: give one an expert")
    if not _spannable(weights, recipe, x.device):
        return _rows_by_layer(x, offs, weights, recipe, stats)
    return _Experts.apply(x, None, *weights, offs, None, None, recipe, *stats, torch.is_grad_enabled())


def _autocast(x: torch.Tensor, weights: Weights) -> tuple[torch.Tensor, Weights]:
    if not autocasts(x):
        return x, weights
    dtype = torch.get_autocast_dtype(x.device.type)
    w1, w3, w2 = (None if w is None else cast_weight(w, dtype) for w in weights)
    assert w1 is not None
    assert w2 is not None
    return x.to(dtype), (w1, w3, w2)


def _check(x: torch.Tensor, weights: Weights) -> int:
    """How many experts there are."""
    w1, w3, w2 = weights
    present = [w for w in weights if w is not None]
    fits = x.ndim == 2 and all(w.ndim == 3 and w.dtype == x.dtype for w in present)
    if fits:
        (g, f, d), both = w1.shape, 1 if w3 is not None else 2
        fits = d == x.shape[1] and f % both == 0 and tuple(w2.shape) == (g, d, f // both)
        fits = fits and (w3 is None or w3.shape == w1.shape)
    if not fits:
        raise ValueError(
            "experts take x[T, D] and w1[G, F, D], w3[G, F, D], w2[G, D, F] of one dtype, or gate and up in one "
            f"[G, 2 F, D]; got {[(tuple(t.shape), t.dtype) for t in (x, *present)]}: cast, or use autocast"
        )
    return w1.shape[0]


def _spannable(weights: Weights, recipe: Recipe, device: torch.device) -> bool:
    """Whether one Function serves: the output product is quantized, and gate and up can be one weight in it."""
    w1, w3, _ = weights
    output, grad_input = (recipe.product(name, device) for name in ("output", "grad_input"))
    if output is None:
        return False
    if w3 is None or not isinstance(w1, GatheredWeight):
        return True
    # What FSDP gathered in 8 bits can be joined where no block would hold parts of both, and not otherwise.
    return grad_input is not None and all(
        _joins(p.b, dim, w1.shape[1]) for dim, p in ((1, output), (2, grad_input))
    )


def _rows_by_layer(
    x: torch.Tensor, offs: torch.Tensor, weights: Weights, recipe: Recipe, stats: Watched
) -> torch.Tensor:
    """The plain path: one grouped product a projection."""
    w1, w3, w2 = weights
    if w3 is None:
        gate, up = grouped_linear(x, w1, offs, None, recipe, stats[0]).chunk(2, dim=-1)
    else:
        gate, up = (grouped_linear(x, w, offs, None, recipe, stats[0]) for w in (w1, w3))
    return grouped_linear(F.silu(gate) * up, w2, offs, None, recipe, stats[1])


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        scores: torch.Tensor | None,
        w1: torch.Tensor,
        w3: torch.Tensor | None,
        w2: torch.Tensor,
        offs: torch.Tensor,
        order: torch.Tensor | None,
        back: torch.Tensor | None,
        recipe: Recipe,
        stats_up: Stats,
        stats_down: Stats,
        grad_enabled: bool,
    ) -> torch.Tensor:
        output, _, grad_weight = (recipe.product(name, x.device) for name in PRODUCTS)
        assert output is not None
        choices = 1 if back is None else back.shape[1]
        needs_up = grad_enabled and any(ctx.needs_input_grad[2:4])
        in_8_bits = grad_weight is not None and needs_up and choices <= x.element_size()
        tokens = _tokens(order, choices)
        a, saved = permute_quantize(
            x,
            tokens,
            offs,
            output.a,
            grad_weight.b if grad_weight and in_8_bits else None,
            _align(grad_weight),
        )
        up, down = _gate_up(w1, w3, output.b), quantize_weight(w2, output.b)
        h = _product(a, up, offs, output, x.dtype)
        activation = swiglu_quantize_rows(h, offs, output.a)
        y = _product(activation, down, offs, output, x.dtype)
        if stats_up is not None:
            rows = _picked(x, tokens)
            observe(stats_up, "output", 0, rows, a, offs=offs)
            _observe_gate_up(stats_up, "output", w1, w3, up)
            observe(stats_up, "grad_weight", 1, rows, saved, offs=offs)
            observe(stats_down, "output", 0, swiglu(h).to(h.dtype), activation, offs=offs)
            observe(stats_down, "output", 1, w2, down)
        kept = x if needs_up and not in_8_bits else None
        codes = (None, None, None) if saved is None else (saved.data, saved.scale, saved.group_ends)
        ctx.save_for_backward(kept, *codes, h, scores, w1, w3, w2, offs, order, back)
        ctx.saved_format = None if saved is None else saved.format
        ctx.recipe, ctx.stats = recipe, (stats_up, stats_down)
        return y if back is None else combine_rows(y, back, scores)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        kept, data, scale, ends, h, scores, w1, w3, w2, offs, order, back = ctx.saved_tensors
        (g,) = grads
        needs = _Needs(ctx.needs_input_grad[0], ctx.needs_input_grad[1], any(ctx.needs_input_grad[2:4]),
                       ctx.needs_input_grad[4])  # fmt: skip
        saved = None if data is None else ScaledTensor(data, scale, ctx.saved_format, group_ends=ends)
        _, grad_input, grad_weight = (ctx.recipe.product(name, g.device) for name in PRODUCTS)
        step = _Backward(needs, grad_input, grad_weight, offs, order, back, scores, ctx.stats)
        with without_autocast(g):
            dx, dscores, dw13, dw2 = step.run(g, h, kept, saved, (w1, w3, w2))
        dw1, dw3 = dw13, None
        if dw13 is not None and w3 is not None:
            dw1, dw3 = dw13.split(w1.shape[1], dim=1)
        return dx, dscores, dw1, dw3, dw2, None, None, None, None, None, None, None


@dataclass(frozen=True)
class _Needs:
    x: bool
    scores: bool
    up: bool
    down: bool


@dataclass(frozen=True)
class _Backward:
    """Backward of the experts: what is needed, in which formats, and where the rows stand."""

    needs: _Needs
    grad_input: Product | None
    grad_weight: Product | None
    offs: torch.Tensor
    order: torch.Tensor | None
    back: torch.Tensor | None
    scores: torch.Tensor | None
    stats: Watched

    def run(
        self,
        g: torch.Tensor,
        h: torch.Tensor,
        x: torch.Tensor | None,
        columns: ScaledTensor | None,
        weights: Weights,
    ) -> tuple[torch.Tensor | None, ...]:
        """Gradients of x, the scores, gate and up [G, 2 F, D], and down; those not needed are None."""
        (w1, w3, w2), needs, first, second = weights, self.needs, self.grad_input, self.grad_weight
        tokens = _tokens(self.order, 1 if self.back is None else self.back.shape[1])
        align = _align(second)
        a, g_t = permute_quantize(
            g, tokens, self.offs, first and first.a, second.a if second and needs.down else None, align
        )
        down = None if first is None else quantize_weight(w2, first.b, transpose=True, after=g)
        da = self._rows(a, down, lambda: grouped_mm_hp(_picked(g, tokens), w2.mT, self.offs), g.dtype)
        watched = self.stats[0] is not None
        dh_rows, dh_t, act_t, d_scores, dh, act = swiglu_backward_rows(
            h, da, None if self.scores is None else _in_order(self.scores, self.order), self.offs,
            first.a if first and needs.x else None, second.a if second and needs.up else None,
            second.b if second and needs.down else None, align, keep=watched or first is None or second is None,
        )  # fmt: skip
        dx = dw13 = dw2 = up = None
        if needs.x:
            up = None if first is None else _gate_up(w1, w3, first.b, after=g)
            dx = self._rows(dh_rows, up, lambda: grouped_mm_hp(dh, _joined(w1, w3).mT, self.offs), g.dtype)
            dx = dx if self.back is None else combine_rows(dx, self.back, None)
        if needs.up:
            if second is not None and columns is None:
                assert x is not None
                _, columns = permute_quantize(x, tokens, self.offs, None, second.b, align)
                if watched:
                    observe(self.stats[0], "grad_weight", 1, _picked(x, tokens), columns, offs=self.offs)
            dw13 = self._weight(dh_t, columns, lambda: (dh, _picked(x, tokens)), w1.dtype)
        if needs.down:
            dw2 = self._weight(g_t, act_t, lambda: (_picked(g, tokens), act), w2.dtype)
        if watched:
            self._observe(
                weights, (_picked(g, tokens), a, g_t), (dh, dh_rows, dh_t), (act, act_t), (down, up)
            )
        d_scores = d_scores[self.back] if needs.scores and self.back is not None else None
        return dx, d_scores, dw13, dw2

    def _observe(
        self,
        weights: Weights,
        grad: tuple[torch.Tensor, ScaledTensor | None, ScaledTensor | None],
        hidden: tuple[torch.Tensor, ScaledTensor | None, ScaledTensor | None],
        activation: tuple[torch.Tensor, ScaledTensor | None],
        quantized: tuple[ScaledTensor | None, ScaledTensor | None],
    ) -> None:
        """What :mod:`.grouped` observes product by product, from the operands of the span."""
        (w1, w3, w2), (for_up, for_down), (down, up) = weights, self.stats, quantized
        observe(for_down, "grad_input", 0, *grad[:2], offs=self.offs)
        observe(for_down, "grad_input", 1, w2, down, transpose=True)
        observe(for_down, "grad_weight", 0, grad[0], grad[2], offs=self.offs)
        observe(for_down, "grad_weight", 1, *activation, offs=self.offs)
        observe(for_up, "grad_input", 0, *hidden[:2], offs=self.offs)
        _observe_gate_up(for_up, "grad_input", w1, w3, up)
        observe(for_up, "grad_weight", 0, hidden[0], hidden[2], offs=self.offs)

    def _rows(
        self,
        a: ScaledTensor | None,
        b: ScaledTensor | None,
        high: Callable[[], torch.Tensor],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        return high() if self.grad_input is None else _product(a, b, self.offs, self.grad_input, dtype)

    def _weight(
        self,
        a: ScaledTensor | None,
        b: ScaledTensor | None,
        high: Callable[[], tuple[torch.Tensor, torch.Tensor]],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        if self.grad_weight is None:
            left, right = high()
            return grouped_mm_hp(left.T, right.T, self.offs)
        assert a is not None
        assert b is not None
        return scaled_grouped_mm(a, b, out_dtype=dtype, fast_accum=self.grad_weight.fast_accum)


def _product(
    a: ScaledTensor | None, b: ScaledTensor | None, offs: torch.Tensor, product: Product, dtype: torch.dtype
) -> torch.Tensor:
    assert a is not None
    assert b is not None
    return scaled_grouped_mm(a, b, offs, out_dtype=dtype, fast_accum=product.fast_accum)


def _align(product: Product | None) -> int:
    return 16 if product is None else alignment(product.a, product.b)


def _tokens(order: torch.Tensor | None, choices: int) -> torch.Tensor | None:
    """The token of each row; None where rows are tokens."""
    return None if order is None else order // choices


def _picked(x: torch.Tensor | None, tokens: torch.Tensor | None) -> torch.Tensor:
    assert x is not None
    return x if tokens is None else x[tokens]


def _in_order(scores: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """Scores [T, k] as the rows stand."""
    return scores.flatten() if order is None else scores.flatten()[order]


def _joined(w1: torch.Tensor, w3: torch.Tensor | None) -> torch.Tensor:
    return w1 if w3 is None else torch.cat((w1, w3), dim=1)


def _gate_up(
    w1: torch.Tensor, w3: torch.Tensor | None, fmt: Format, after: torch.Tensor | None = None
) -> ScaledTensor:
    """[w1; w3] of each expert quantized as one matrix [2 F, D]; with ``after``, in backward, its transpose."""
    transpose = after is not None
    if w3 is None:
        return quantize_weight(w1, fmt, transpose=transpose, after=after)

    def make() -> ScaledTensor:
        dim, length = (2 if transpose else 1), w1.shape[1]
        if not _joins(fmt, dim, length):
            return quantize(_joined(w1, w3), fmt, transpose=transpose, after=after)
        # No block holds parts of both: their codes are joined, at one byte an element.
        halves = [quantize(w, fmt, transpose=transpose, after=after) for w in (w1, w3)]
        data, scale = (
            torch.cat([_bytes(t) for t in parts], dim=dim).view(parts[0].dtype)
            for parts in zip(*((half.data, half.scale) for half in halves), strict=True)
        )
        return ScaledTensor(data, scale, fmt)

    return cached((w1, w3), (fmt.key, transpose), make)


def _observe_gate_up(
    stats: Stats, product: str, w1: torch.Tensor, w3: torch.Tensor | None, quantized: ScaledTensor | None
) -> None:
    # Of weights that were gathered in 8 bits there is nothing to compare the codes with, nor to join.
    if quantized is not None and not isinstance(w1, GatheredWeight):
        observe(stats, product, 1, _joined(w1, w3), quantized, transpose=product == "grad_input")


def _joins(fmt: Format, dim: int, length: int) -> bool:
    """Whether no block or byte of weights joined along ``dim`` holds parts of two of ``length``."""
    block = fmt.block[dim - 1]
    return block != ALL and length % block == 0 and (dim == 1 or length % fmt.element.packed == 0)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """One-byte elements as uint8, which every op takes."""
    return x.view(torch.uint8) if x.element_size() == 1 else x
