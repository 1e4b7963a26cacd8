"""Functions that span several layers, with 16-bit edges and 8-bit insides.

:func:`mlp` runs gate, up, SwiGLU and down as one autograd Function: gate and up are one product, the
activation is quantized where it is made, and backward writes the gradient of gate and up in 8 bits alone.
``convert`` installs it on the MLPs it knows (:data:`MLPS`); :func:`install` says on which.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from octavo.formats import ScaledTensor
from octavo.fused import quantize_concat, swiglu_backward_quantize, swiglu_quantize
from octavo.matmul import scaled_mm
from octavo.training.autograd import both, restore, save
from octavo.training.modules import Linear
from octavo.training.recipes import PRODUCTS, Product, Recipe, get_recipe
from octavo.training.weight_cache import quantize_weight

MLPS: dict[str, tuple[str, str, str]] = {
    "FeedForward": ("w1", "w3", "w2"),
    "LlamaMLP": ("gate_proj", "up_proj", "down_proj"),
    "MistralMLP": ("gate_proj", "up_proj", "down_proj"),
    "Qwen2MLP": ("gate_proj", "up_proj", "down_proj"),
    "Qwen3MLP": ("gate_proj", "up_proj", "down_proj"),
}
"""Class name of a SwiGLU MLP and its gate, up and down projections: this project's and TorchTitan's
``FeedForward``, and transformers' of Llama, Mistral and Qwen."""


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
    return _MLP.apply(x, w1, w3, w2, recipe)


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, w1: torch.Tensor, w3: torch.Tensor, w2: torch.Tensor, recipe: Recipe
    ) -> torch.Tensor:
        output, _, grad_weight = (recipe.product(name, x.device) for name in PRODUCTS)
        assert output is not None
        rows = x.reshape(-1, x.shape[-1])
        needs_up = any(ctx.needs_input_grad[1:3])
        a, saved = both(rows, output.a, grad_weight.b if grad_weight and needs_up else None)
        w13, _ = quantize_concat((w1, w3), 0, output.b)
        assert a is not None
        assert w13 is not None
        h = scaled_mm(a, w13, out_dtype=x.dtype, fast_accum=output.fast_accum)
        activation = swiglu_quantize(h, output.a)
        down = quantize_weight(w2, output.b)
        out = scaled_mm(activation, down, out_dtype=x.dtype, fast_accum=output.fast_accum)
        save(ctx, rows if needs_up else rows.new_empty(0), saved, h, w1, w3, w2)
        ctx.recipe, ctx.x_shape = recipe, x.shape
        return out.view(*x.shape[:-1], w2.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, saved, h, w1, w3, w2 = restore(ctx)
        (g,) = grads
        g = g.reshape(-1, g.shape[-1])
        _, grad_input, grad_weight = (ctx.recipe.product(name, g.device) for name in PRODUCTS)
        with torch.autocast(g.device.type, enabled=False):
            return _mlp_backward(ctx, g, rows, saved, h, (w1, w3, w2), grad_input, grad_weight)


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
    w1, w3, w2 = weights
    needs_x, needs_up, needs_down = (any(ctx.needs_input_grad[i:j]) for i, j in ((0, 1), (1, 3), (3, 4)))
    up_weight = grad_weight if needs_up else None
    down_weight = grad_weight if needs_down else None
    a, a_t = both(g, grad_input and grad_input.a, down_weight and down_weight.a)
    down = None if grad_input is None else quantize_weight(w2, grad_input.b, transpose=True)
    da = _product(a, down, grad_input, lambda: g @ w2, g.dtype)
    dh_rows, dh_t, act_t, dh, act = swiglu_backward_quantize(
        h, da, grad_input and grad_input.a, up_weight and up_weight.a, down_weight and down_weight.b,
        keep=grad_input is None or grad_weight is None,
    )  # fmt: skip
    dx = dw13 = dw2 = None
    if needs_x:
        _, up = quantize_concat((w1, w3), 0, None, grad_input and grad_input.b)
        dx = _product(dh_rows, up, grad_input, lambda: dh @ torch.cat((w1, w3)), g.dtype).view(ctx.x_shape)
    if needs_up:
        dw13 = _product(dh_t, saved, grad_weight, lambda: dh.T @ _present(rows), w1.dtype)
    if needs_down:
        dw2 = _product(a_t, act_t, grad_weight, lambda: g.T @ act, w2.dtype)
    dw1, dw3 = (None, None) if dw13 is None else dw13.split(w1.shape[0])
    return dx, dw1, dw3, dw2, None


def _product(
    a: ScaledTensor | None, b: ScaledTensor | None, product: Product | None, high: Any, dtype: torch.dtype
) -> torch.Tensor:
    """``a @ b.T`` in 8 bits, or ``high()`` where the recipe keeps this product in high precision."""
    if product is None or a is None or b is None:
        return high()
    return scaled_mm(a, b, out_dtype=dtype, fast_accum=product.fast_accum)


def _present(x: torch.Tensor | None) -> torch.Tensor:
    assert x is not None
    return x


def install(model: nn.Module) -> list[str]:
    """Make every MLP of :data:`MLPS` whose projections were converted run as one Function; their paths.

    The module keeps its class's name, parameters and state dict. Whatever the span would bypass (a hook or a
    monitor on a projection, a bias, a sharded weight, another recipe) makes that call run layer by layer.
    """
    installed = []
    for name, module in model.named_modules():
        names = MLPS.get(type(module).__name__)
        if names is None or not all(type(getattr(module, n, None)) is Linear for n in names):
            continue
        if "forward" in vars(module) or not _is_silu(module):
            continue
        module.__class__ = _spanned(type(module), names)
        installed.append(name)
    return installed


def _is_silu(module: nn.Module) -> bool:
    activation = getattr(module, "act_fn", None)
    return (
        activation is None or isinstance(activation, nn.SiLU) or "silu" in type(activation).__name__.lower()
    )


_SPANNED: dict[type, type] = {}


def _spanned(cls: type, names: tuple[str, str, str]) -> type:
    """A subclass of ``cls`` whose forward spans its three projections where nothing would be bypassed."""
    if cls not in _SPANNED:

        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            layers = [getattr(self, name) for name in names]
            if not _spannable(x, layers):
                return cls.forward(self, x)  # pyright: ignore[reportAttributeAccessIssue]
            return mlp(x, *(layer.weight for layer in layers), recipe=layers[0].recipe)

        def reduce(self: Any, protocol: object) -> tuple[Any, ...]:
            # A class made here cannot be found by its name: pickle and deepcopy make it again.
            return _blank, (cls, names), vars(self)

        members = {"forward": forward, "__reduce_ex__": reduce, "__module__": cls.__module__}
        _SPANNED[cls] = type(cls.__name__, (cls,), members)
    return _SPANNED[cls]


def _blank(cls: type, names: tuple[str, str, str]) -> Any:
    """An instance of the spanned ``cls`` without state."""
    spanned = _spanned(cls, names)
    return object.__new__(spanned)


def _spannable(x: torch.Tensor, layers: list[Any]) -> bool:
    first = layers[0]
    return (
        not torch.is_autocast_enabled(x.device.type)
        and first.recipe.output is not None
        and all(
            type(layer) is Linear
            and layer.recipe == first.recipe
            and layer.bias is None
            and layer.stats is None
            and layer.weight.dtype == x.dtype
            and type(layer.weight) in (nn.Parameter, torch.Tensor)
            and not (layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks)
            for layer in layers
        )
    )
