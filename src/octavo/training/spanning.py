"""Functions that span several layers, with 16-bit edges and 8-bit insides.

:func:`mlp` runs gate, up, SwiGLU and down as one autograd Function: gate and up are one product, the
activation is quantized where it is made, and backward writes the gradient of gate and up in 8 bits alone.
``convert`` installs it on the MLPs it knows (:data:`MLPS`); :func:`install` says on which.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.modules import module as module_hooks

from octavo.formats import ALL, Format, ScaledTensor
from octavo.fused import quantize_concat, swiglu_backward_quantize, swiglu_quantize
from octavo.fused.reference import swiglu
from octavo.matmul import scaled_mm
from octavo.training.autograd import Stats, autocasts, both, flat, restore, save, without_autocast
from octavo.training.gathered import GatheredWeight
from octavo.training.modules import Linear
from octavo.training.observe import observe
from octavo.training.recipes import PRODUCTS, Product, Recipe, get_recipe
from octavo.training.weight_cache import cached, cast_weight, quantize_weight

T = TypeVar("T")
Names = tuple[str, str, str]
"""Attributes of an MLP that hold its gate, up and down projections."""

_GATE_UP_DOWN: Names = ("gate_proj", "up_proj", "down_proj")
MLPS: dict[tuple[str, str], Names] = {
    ("octavo.models.", "FeedForward"): ("w1", "w3", "w2"),
    ("torchtitan.models.", "FeedForward"): ("w1", "w3", "w2"),
    ("transformers.models.llama.", "LlamaMLP"): _GATE_UP_DOWN,
    ("transformers.models.mistral.", "MistralMLP"): _GATE_UP_DOWN,
    ("transformers.models.qwen2.", "Qwen2MLP"): _GATE_UP_DOWN,
    ("transformers.models.qwen3.", "Qwen3MLP"): _GATE_UP_DOWN,
    ("transformers.models.qwen2_moe.", "Qwen2MoeMLP"): _GATE_UP_DOWN,
    ("transformers.models.qwen3_moe.", "Qwen3MoeMLP"): _GATE_UP_DOWN,
    ("transformers.models.deepseek_v2.", "DeepseekV2MLP"): _GATE_UP_DOWN,
    ("transformers.models.deepseek_v3.", "DeepseekV3MLP"): _GATE_UP_DOWN,
}
"""SwiGLU MLPs by (beginning of the module's path, class name). The module counts, because a class that merely
shares a name may compute something else; :func:`register_mlp` adds one's own."""


_REGISTERED: dict[type, Names] = {}


def register_mlp(cls: type[nn.Module], gate: str, up: str, down: str) -> None:
    """Say that ``cls`` computes ``down(silu(gate(x)) * up(x))`` and nothing else, so that ``convert`` may span it."""
    _REGISTERED[cls] = (gate, up, down)


def mlp(
    x: torch.Tensor, w1: torch.Tensor, w3: torch.Tensor, w2: torch.Tensor, *, recipe: str | Recipe = "rowwise"
) -> torch.Tensor:
    """``(silu(x @ w1.T) * (x @ w3.T)) @ w2.T`` by a recipe whose output product is quantized.

    Args:
        x: [..., D].
        w1, w3: gate and up, [F, D] in the dtype of ``x``.
        w2: down, [D, F].

    Returns:
        [..., D], with gradients for all four.

    Raises:
        ValueError: if shapes or dtypes do not fit, or the recipe keeps the output product in high precision.
    """
    recipe = get_recipe(recipe)
    fits = w1.shape == w3.shape == w2.mT.shape and x.shape[-1] == w1.shape[1]
    if not fits or any(w.dtype != x.dtype for w in (w1, w3, w2)):
        raise ValueError(
            f"mlp takes x[..., D], w1[F, D], w3[F, D], w2[D, F] of one dtype; got "
            f"{[(tuple(t.shape), t.dtype) for t in (x, w1, w3, w2)]}"
        )
    if recipe.output is None:
        raise ValueError(
            f"recipe {recipe.name!r} keeps the output product in high precision: nothing to span"
        )
    return _MLP.apply(x, w1, w3, w2, recipe, None, None, None, torch.is_grad_enabled())


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w1: torch.Tensor,
        w3: torch.Tensor,
        w2: torch.Tensor,
        recipe: Recipe,
        stats1: Stats,
        stats3: Stats,
        stats2: Stats,
        grad_enabled: bool,
    ) -> torch.Tensor:
        output, _, grad_weight = (recipe.product(name, x.device) for name in PRODUCTS)
        assert output is not None
        rows = flat(x)
        needs_up = grad_enabled and any(ctx.needs_input_grad[1:3])
        a, saved = both(rows, output.a, grad_weight.b if grad_weight and needs_up else None)
        assert a is not None
        w13 = _gate_up(w1, w3, output.b)
        h = scaled_mm(a, w13, out_dtype=x.dtype, fast_accum=output.fast_accum)
        activation = swiglu_quantize(h, output.a)
        down = quantize_weight(w2, output.b)
        out = scaled_mm(activation, down, out_dtype=x.dtype, fast_accum=output.fast_accum)
        for stats, weight, start in ((stats1, w1, 0), (stats3, w3, w1.shape[0])):
            observe(stats, "output", 0, rows, a)
            observe(stats, "output", 1, weight, _part(w13, 0, start, w1.shape[0]))
            observe(stats, "grad_weight", 1, rows, saved, transpose=True)
        if stats2 is not None:
            observe(stats2, "output", 0, swiglu(h).to(h.dtype), activation)
            observe(stats2, "output", 1, w2, down)
        save(ctx, rows if needs_up else rows.new_empty(0), saved, h, w1, w3, w2)
        ctx.recipe, ctx.x_shape, ctx.stats = recipe, x.shape, (stats1, stats3, stats2)
        return out.view(*x.shape[:-1], w2.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, saved, h, w1, w3, w2 = restore(ctx)
        (g,) = grads
        g = flat(g)
        _, grad_input, grad_weight = (ctx.recipe.product(name, g.device) for name in PRODUCTS)
        with without_autocast(g):
            gradients = _mlp_backward(ctx, g, rows, saved, h, (w1, w3, w2), grad_input, grad_weight)
        return *gradients, None, None, None, None, None


def _mlp_backward(
    ctx: Any,
    g: torch.Tensor,
    rows: torch.Tensor | None,
    saved: ScaledTensor | None,
    h: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    grad_input: Product | None,
    grad_weight: Product | None,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of x, w1, w3 and w2; those not needed are None."""
    w1, w3, w2 = weights
    needs_x, needs_up, needs_down = (any(ctx.needs_input_grad[i:j]) for i, j in ((0, 1), (1, 3), (3, 4)))
    watched = any(stats is not None for stats in ctx.stats)
    up_weight = grad_weight if needs_up else None
    down_weight = grad_weight if needs_down else None
    a, a_t = both(g, grad_input and grad_input.a, down_weight and down_weight.a)
    down = None if grad_input is None else quantize_weight(w2, grad_input.b, transpose=True, after=g)
    da = _product(a, down, grad_input, lambda: g @ w2, g.dtype)
    dh_rows, dh_t, act_t, dh, act = swiglu_backward_quantize(
        h, da, grad_input and grad_input.a, up_weight and up_weight.a, down_weight and down_weight.b,
        keep=watched or grad_input is None or grad_weight is None,
    )  # fmt: skip
    dx = dw13 = dw2 = up = None
    if needs_x:
        up = None if grad_input is None else _gate_up(w1, w3, grad_input.b, after=g)
        dx = _product(dh_rows, up, grad_input, lambda: dh @ torch.cat((w1, w3)), g.dtype).view(ctx.x_shape)
    if needs_up:
        dw13 = _product(dh_t, saved, grad_weight, lambda: dh.T @ _present(rows), w1.dtype)
    if needs_down:
        dw2 = _product(a_t, act_t, grad_weight, lambda: g.T @ act, w2.dtype)
    if watched:
        _observe_backward(ctx.stats, weights, (g, a, a_t), (dh, dh_rows, dh_t), (act, act_t), (down, up))
    dw1, dw3 = (None, None) if dw13 is None else dw13.split(w1.shape[0])
    return dx, dw1, dw3, dw2


def _observe_backward(
    all_stats: tuple[Stats, Stats, Stats],
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    grad: tuple[torch.Tensor, ScaledTensor | None, ScaledTensor | None],
    hidden: tuple[torch.Tensor, ScaledTensor | None, ScaledTensor | None],
    activation: tuple[torch.Tensor, ScaledTensor | None],
    quantized: tuple[ScaledTensor | None, ScaledTensor | None],
) -> None:
    """What :mod:`.autograd` observes layer by layer, from the operands of the span."""
    (w1, w3, w2), f = weights, weights[0].shape[0]
    dh, dh_rows, dh_t = hidden
    down, up = quantized
    g, a, a_t = grad
    observe(all_stats[2], "grad_input", 0, g, a)
    observe(all_stats[2], "grad_input", 1, w2, down, transpose=True)
    observe(all_stats[2], "grad_weight", 0, g, a_t, transpose=True)
    observe(all_stats[2], "grad_weight", 1, activation[0], activation[1], transpose=True)
    for stats, weight, start in ((all_stats[0], w1, 0), (all_stats[1], w3, f)):
        part = dh[:, start : start + f]
        observe(stats, "grad_input", 0, part, _part(dh_rows, 1, start, f))
        observe(stats, "grad_input", 1, weight, _part(up, 1, start, f), transpose=True)
        observe(stats, "grad_weight", 0, part, _part(dh_t, 0, start, f), transpose=True)


def _gate_up(
    w1: torch.Tensor, w3: torch.Tensor, fmt: Format, after: torch.Tensor | None = None
) -> ScaledTensor:
    """[w1; w3] quantized as one matrix [2 F, D]; with ``after``, in backward, its transpose."""
    transpose = after is not None

    def make() -> ScaledTensor:
        formats = (None, fmt) if transpose else (fmt, None)
        direct, turned = quantize_concat((w1, w3), 0, *formats, after=after)
        return _present(turned if transpose else direct)

    return cached((w1, w3), (fmt.key, transpose), make)


def _part(x: ScaledTensor | None, dim: int, start: int, length: int) -> ScaledTensor | None:
    """Rows (dim 0) or columns (dim 1) of a quantized matrix, or None where a block straddles the cut."""
    if x is None:
        return None
    block, packed = x.format.block[dim], x.format.element.packed if dim else 1
    if block > 1 and (start % block or ((start + length) % block and start + length != x.shape[dim])):
        return None
    data = x.data.narrow(dim, start // packed, length // packed)
    scale = x.scale if block == ALL else x.scale.narrow(dim, start // block, -(-length // block))
    return ScaledTensor(data, scale, x.format)


def _product(
    a: ScaledTensor | None, b: ScaledTensor | None, product: Product | None, high: Any, dtype: torch.dtype
) -> torch.Tensor:
    """``a @ b.T`` in 8 bits, or ``high()`` where the recipe keeps this product in high precision."""
    if product is None or a is None or b is None:
        return high()
    return scaled_mm(a, b, out_dtype=dtype, fast_accum=product.fast_accum)


def _present(x: T | None) -> T:
    assert x is not None
    return x


def install(model: nn.Module) -> list[str]:
    """Make every MLP of :data:`MLPS` whose projections were converted run as one Function; their paths.

    The module keeps its class's name, parameters and state dict. Whatever the span would bypass (a hook on a
    projection, an adapter in its place, a bias, a sharded weight, differing recipes) makes that call run layer by
    layer.
    """
    installed = []
    for name, module in model.named_modules():
        names = _names(type(module))
        if names is None or not all(type(getattr(module, n, None)) is Linear for n in names):
            continue
        if "forward" in vars(module) or not _is_silu(module):
            continue
        module.__class__ = _spanned(type(module), names)
        installed.append(name)
    return installed


def remove(model: nn.Module) -> None:
    """Undo :func:`install`."""
    for module in model.modules():
        base = _BASES.get(type(module))
        if base is not None:
            module.__class__ = base


def spanned(module: nn.Module) -> Names | None:
    """Attributes of gate, up and down if :func:`install` made ``module`` run as one Function and nothing stops it.

    Hooks, biases and weights sharded by tensor parallelism make every call run layer by layer.
    """
    base = _BASES.get(type(module))
    names = None if base is None else _names(base)
    if names is None:
        return None
    layers = [getattr(module, name) for name in names]
    plain = all(
        type(layer) is Linear and type(layer.weight) in (nn.Parameter, torch.Tensor) and layer.bias is None
        for layer in layers
    )
    return names if plain and not any(getattr(layer, hooks) for layer in layers for hooks in _HOOKS) else None


def _names(cls: type) -> Names | None:
    for (path, name), names in MLPS.items():
        if cls.__module__.startswith(path) and cls.__name__ == name:
            return names
    return _REGISTERED.get(cls)


def _is_silu(module: nn.Module) -> bool:
    activation = getattr(module, "act_fn", None)
    return (
        activation is None or isinstance(activation, nn.SiLU) or "silu" in type(activation).__name__.lower()
    )


_SPANNED: dict[type, type] = {}
_BASES: dict[type, type] = {}


def _spanned(cls: type, names: Names) -> type:
    """A subclass of ``cls`` whose forward spans its three projections where nothing would be bypassed."""
    if cls not in _SPANNED:

        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            layers = [getattr(self, name) for name in names]
            if not _spannable(x, layers):
                return cls.forward(self, x)  # pyright: ignore[reportAttributeAccessIssue]
            recipe, stats = layers[0].recipe, [layer.stats for layer in layers]
            x, weights = _autocast(x, [layer.weight for layer in layers])
            return _MLP.apply(x, weights[0], weights[1], weights[2], recipe, *stats, torch.is_grad_enabled())

        def reduce(self: Any, protocol: object) -> tuple[Any, ...]:
            # A class made here cannot be found by its name: pickle and deepcopy make it again.
            return _blank, (cls, names), vars(self)

        members = {"forward": forward, "__reduce_ex__": reduce, "__module__": cls.__module__}
        _SPANNED[cls] = type(cls.__name__, (cls,), members)
        _BASES[_SPANNED[cls]] = cls
    return _SPANNED[cls]


def _blank(cls: type, names: Names) -> Any:
    """An instance of the spanned ``cls`` without state."""
    spanned = _spanned(cls, names)
    return object.__new__(spanned)


def _autocast(x: torch.Tensor, weights: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The operands in autocast's dtype where it is on, as each layer would cast them."""
    if not autocasts(x):
        return x, weights
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), [cast_weight(w, dtype) for w in weights]


def _spannable(x: torch.Tensor, layers: list[Any]) -> bool:
    first, casts = layers[0], autocasts(x)
    return (
        type(first) is Linear  # and no adapter around it
        and first.recipe.output is not None
        and not any(getattr(module_hooks, name) for name in _GLOBAL_HOOKS)
        and all(
            type(layer) is Linear
            and layer.recipe == first.recipe
            and layer.bias is None
            and (casts or layer.weight.dtype == x.dtype)
            and type(layer.weight) in (nn.Parameter, torch.Tensor, GatheredWeight)
            and not any(getattr(layer, name) for name in _HOOKS)
            for layer in layers
        )
    )


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in _HOOKS)
