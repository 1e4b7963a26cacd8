"""Linear layers whose weights are quantized for good: inference, no gradients of weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.formats import ScaledTensor
from octavo.matmul import scaled_mm
from octavo.operators.gemm import mixed_mm
from octavo.quantize import dequantize, quantize
from octavo.serving.schemes import ACTIVATIONS, Scheme, get_scheme
from octavo.training.convert import left_alone_by_default


class QuantizedLinear(nn.Module):
    """``x[..., K] @ weight[N, K].T + bias`` with the weight in a scheme's format.

    Buffers ``weight_data`` and ``weight_scale`` hold codes and scales; their names in files are the scheme's
    (:mod:`octavo.serving.files`). With quantized activations the product is :func:`octavo.scaled_mm`; with 16-bit ones
    it is :func:`octavo.operators.gemm.mixed_mm` on a GPU, which decodes the weight inside the product, and elsewhere,
    or where the input's gradient is wanted, the weight is decoded to the input's dtype for each call.

    Args:
        scheme: how the weight is kept.
        in_features, out_features: K and N.
        bias: [N] or None.
        device: of the buffers.
    """

    weight_data: Tensor
    weight_scale: Tensor

    def __init__(
        self,
        scheme: Scheme,
        in_features: int,
        out_features: int,
        bias: Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.scheme, self.in_features, self.out_features = scheme, in_features, out_features
        with torch.device("meta"):
            like = quantize(torch.empty(out_features, in_features), scheme.weight)
        self.register_buffer("weight_data", torch.empty_like(like.data, device=device))
        self.register_buffer("weight_scale", torch.empty_like(like.scale, device=device))
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @staticmethod
    def of(linear: nn.Linear, scheme: Scheme) -> QuantizedLinear:
        """A layer with the weight of ``linear`` in ``scheme``."""
        device = linear.weight.device
        new = QuantizedLinear(scheme, linear.in_features, linear.out_features, linear.bias, device)
        if device.type != "meta":
            made = quantize(linear.weight.detach(), scheme.weight)
            new.weight_data, new.weight_scale = made.data, made.scale
        return new.train(linear.training)

    @property
    def quantized(self) -> ScaledTensor:
        """The weight [N, K] as a quantized matrix."""
        return ScaledTensor(self.weight_data, self.weight_scale, self.scheme.weight)

    def weight_in(self, dtype: torch.dtype) -> Tensor:
        """The weight [N, K] decoded to ``dtype``."""
        return dequantize(self.quantized, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N] in x's dtype."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if self.scheme.activation is None and (
            not x.is_cuda or (x.requires_grad and torch.is_grad_enabled())
        ):
            return F.linear(x, self.weight_in(x.dtype), bias)
        rows = x.reshape(-1, self.in_features)
        if self.scheme.activation is None:
            out = mixed_mm(rows, self.quantized, bias)
        else:
            out = scaled_mm(
                quantize(rows, self.scheme.activation), self.quantized, bias=bias, out_dtype=x.dtype
            )
        return out.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, scheme={self.scheme.name}"


@dataclass(frozen=True)
class LayerReport:
    """One linear layer: its bytes before and after, the SQNR of its weight in dB, or why it was left alone."""

    name: str
    shape: tuple[int, int]
    scheme: str | None
    reason: str
    bytes_before: int
    bytes_after: int
    sqnr_db: float | None


@dataclass(frozen=True)
class WeightsReport:
    """What ``quantize_weights`` did; prints as a table."""

    layers: tuple[LayerReport, ...]

    @property
    def quantized(self) -> list[str]:
        """Names of the layers that were quantized."""
        return [layer.name for layer in self.layers if layer.scheme is not None]

    @property
    def left_alone(self) -> list[str]:
        """Names of the linear layers that were not."""
        return [layer.name for layer in self.layers if layer.scheme is None]

    def __str__(self) -> str:
        rows = [("layer", "shape", "format", "SQNR dB", "MiB", "why")]
        for layer in self.layers:
            sqnr = "-" if layer.sqnr_db is None else f"{layer.sqnr_db:.1f}"
            mib = f"{layer.bytes_before / 2**20:.2f} -> {layer.bytes_after / 2**20:.2f}"
            rows.append((layer.name, str(list(layer.shape)), layer.scheme or "-", sqnr, mib, layer.reason))
        widths = [max(len(row[i]) for row in rows) for i in range(6)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows]
        before = sum(layer.bytes_before for layer in self.layers)
        after = sum(layer.bytes_after for layer in self.layers)
        total = f"{len(self.quantized)} quantized, {len(self.left_alone)} left alone, "
        return "\n".join([*lines, total + f"{before / 2**20:.1f} -> {after / 2**20:.1f} MiB"])


def quantize_weights(
    model: nn.Module,
    scheme: str | Scheme,
    *,
    activations: str | None = None,
    skip: Sequence[str] = (),
    only: Callable[[str, nn.Linear], bool] | None = None,
) -> WeightsReport:
    """Put the weights of the model's linear layers into 8 or 4 bits for inference, in place.

    Each ``nn.Linear`` becomes a :class:`QuantizedLinear`; its 16-bit weight is dropped. The output head and the
    token embedding's projection stay, as in :func:`octavo.convert`.

    Args:
        model: any module, also on the meta device (then shapes only: for loading).
        scheme: ``"mxfp8"``, ``"mxfp4"``, ``"fp8-blockwise"`` or a :class:`Scheme`.
        activations: ``"quantized"`` (each input is quantized to the weight's kind of format) or ``"16-bit"``; by
            default quantized for 8-bit weights and 16-bit for 4-bit ones.
        skip: regular expressions searched in the layers' names: those stay as they are.
        only: takes (name, layer) and says whether to quantize it, in place of the default choice.

    Returns:
        A report with bytes and SQNR of each layer.

    Raises:
        ValueError: for an unknown scheme, a bad expression, or if no layer was quantized (the model is untouched).
    """
    chosen = _with_activations(get_scheme(scheme), activations)
    patterns = [_expression(pattern) for pattern in skip]
    plan = list(_plan(model, patterns, only))
    if not any(reason is None for *_, reason in plan):
        names = ", ".join(name for name, *_ in plan[:3]) or "none"
        raise ValueError(
            f"no linear layer was left to quantize (the model's: {names}, ...): check skip and only"
        )
    layers = []
    for name, linear, reason in plan:
        layers.append(
            _replaced(model, name, linear, chosen) if reason is None else _kept(name, linear, reason)
        )
    return WeightsReport(tuple(layers))


def _with_activations(scheme: Scheme, activations: str | None) -> Scheme:
    if activations is None:
        return scheme
    if activations not in ACTIVATIONS:
        raise ValueError(f"activations is {activations!r}: choose from {', '.join(ACTIVATIONS)}")
    if activations == "16-bit":
        return replace(scheme, activation=None)
    return replace(scheme, activation=scheme.activation or scheme.weight)


def _expression(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"skip pattern {pattern!r} is no regular expression: {error}") from None


def _plan(
    model: nn.Module, patterns: list[re.Pattern[str]], only: Callable[[str, nn.Linear], bool] | None
) -> Iterator[tuple[str, nn.Linear, str | None]]:
    defaults = left_alone_by_default(model)
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        reason = None if only is not None else defaults.get(name)
        if any(pattern.search(name) for pattern in patterns):
            reason = "skipped by name"
        elif only is not None and not only(name, module):
            reason = "not chosen"
        yield name, module, reason


def _size(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _kept(name: str, linear: nn.Linear, reason: str) -> LayerReport:
    size = _size(linear.weight)
    return LayerReport(name, (linear.out_features, linear.in_features), None, reason, size, size, None)


def _replaced(model: nn.Module, name: str, linear: nn.Linear, scheme: Scheme) -> LayerReport:
    new = QuantizedLinear.of(linear, scheme)
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, new)
    sqnr = None if linear.weight.device.type == "meta" else _sqnr_db(new, linear.weight.detach())
    before, after = _size(linear.weight), _size(new.weight_data, new.weight_scale)
    shape = (linear.out_features, linear.in_features)
    return LayerReport(name, shape, scheme.name, "", before, after, sqnr)


def _sqnr_db(new: QuantizedLinear, weight: Tensor) -> float:
    exact = weight.float()
    noise = (new.weight_in(torch.float32) - exact).square().sum()
    return (10 * torch.log10(exact.square().sum() / noise)).item()
