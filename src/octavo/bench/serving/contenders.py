"""What is served beside what: stock operators on 16-bit weights, Octavo, and decoding quantized weights first."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo import operators, serving
from octavo.formats import ScaledTensor
from octavo.quantize import dequantize, quantize
from octavo.serving import QuantizedLinear, Scheme

STOCK, OCTAVO, DECODED, REFERENCE = "stock", "octavo", "decoded first", "reference"
FORMATS = ("bf16", *serving.SCHEMES)


@dataclass(frozen=True)
class Contender:
    """A model and what is switched on while it generates.

    Args:
        name: ``"stock"``, ``"octavo"`` or ``"decoded first"``.
        format: of the linear layers' weights.
        model: may be another contender's.
        context: entered while graphs are captured and while it generates.
    """

    name: str
    format: str
    model: nn.Module
    context: Callable[[], contextlib.AbstractContextManager[object]]


def stock(model: nn.Module) -> Contender:
    """The model as it is."""
    return Contender(STOCK, "bf16", model, contextlib.nullcontext)


def octavo(model: nn.Module, form: str, *, activations: str | None, force: bool) -> Contender:
    """Octavo's operators on ``model``, which is changed: weights to ``form``, norms through PyTorch's operator.

    Args:
        form: one of ``FORMATS``.
        activations: as for :func:`octavo.quantize_weights`.
        force: also calls of operators that were not measured faster.
    """
    if form != "bf16":
        serving.quantize_weights(model, form, activations=activations)
    if next(model.parameters()).device.type == "cuda":
        operators.fuse_rms_norms(model)
    return Contender(OCTAVO, form, model, lambda: operators.enabled(force=force))


def decoded_first(of: Contender) -> Contender:
    """The same quantized weights on PyTorch's operators: each layer decodes its weight to 16 bits, then multiplies."""

    return Contender(DECODED, of.format, of.model, lambda: _replaced_products(of.model, _decode_and_multiply))


def reference(of: Contender) -> Contender:
    """The same quantized weights and inputs, decoded and multiplied in float32: what ``of`` should compute."""
    return Contender(
        REFERENCE, of.format, of.model, lambda: _replaced_products(of.model, _reference, compiled=False)
    )


Product = Callable[[Tensor, Tensor, Tensor, Scheme, Tensor | None], Tensor]


@contextlib.contextmanager
def _replaced_products(model: nn.Module, product: Product, compiled: bool = True) -> Iterator[None]:
    """While it lasts, quantized layers of ``model`` compute ``product``, compiled on a GPU."""
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    if compiled and layers and layers[0].weight_data.device.type == "cuda":
        product = torch.compile(product, dynamic=False)

    def forward_of(layer: QuantizedLinear) -> Callable[..., Tensor]:
        return lambda x: product(x, layer.weight_data, layer.weight_scale, layer.scheme, layer.bias)

    try:
        for layer in layers:
            layer.forward = forward_of(layer)
        # Each shape of weight and each number of rows is compiled apart.
        with torch._dynamo.config.patch(recompile_limit=256):
            yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def _decode_and_multiply(
    x: Tensor, data: Tensor, scale: Tensor, scheme: Scheme, bias: Tensor | None
) -> Tensor:
    weight = dequantize(ScaledTensor(data, scale, scheme.weight), x.dtype)
    return F.linear(x, weight, None if bias is None else bias.to(x.dtype))


def _reference(x: Tensor, data: Tensor, scale: Tensor, scheme: Scheme, bias: Tensor | None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    seen = rows.float() if scheme.activation is None else dequantize(quantize(rows, scheme.activation))
    weight = dequantize(ScaledTensor(data, scale, scheme.weight))
    out = F.linear(seen, weight, None if bias is None else bias.float())
    return out.to(x.dtype).view(*x.shape[:-1], -1)
