"""What the fused producers compute: the pointwise formula in float32, one rounding to the input's dtype, then
quantization by its own reference. A fused kernel rounds at the same place, so that it equals this bit for bit
up to the last bits of exp and of the norm's sum.
"""

from __future__ import annotations

import torch

from octavo.formats import Format
from octavo.quantize import reference as quantization

Pair = tuple[torch.Tensor | None, torch.Tensor | None]
NONE: Pair = (None, None)


def quantize_optional(x: torch.Tensor, fmt: Format | None, transpose: bool = False) -> Pair:
    """(data, scale), or two Nones without a format."""
    return NONE if fmt is None else quantization.quantize(x, fmt, transpose)


def quantize_concat(
    xs: list[torch.Tensor], dim: int, fmt: Format | None, transposed_fmt: Format | None
) -> tuple[torch.Tensor | None, ...]:
    """(data, scale, transposed data, transposed scale) of the concatenation of ``xs`` along ``dim``."""
    x = torch.cat(xs, dim)
    return *quantize_optional(x, fmt), *quantize_optional(x, transposed_fmt, transpose=True)


def swiglu(h: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of h = [gate | up], [M, 2 F] -> [M, F] in float32."""
    gate, up = h.float().chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def swiglu_quantize(h: torch.Tensor, fmt: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """(data, scale) of ``swiglu(h)`` rounded to the dtype of ``h``."""
    return quantization.quantize(swiglu(h).to(h.dtype), fmt)


def swiglu_backward(h: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Gradient of h = [gate | up] for ``grad`` [M, F] of its SwiGLU, [M, 2 F] in float32.

    With s = sigmoid(gate): d gate = grad * up * s * (1 + gate * (1 - s)), d up = grad * gate * s.
    """
    gate, up = h.float().chunk(2, dim=-1)
    grad, s = grad.float(), torch.sigmoid(gate)
    return torch.cat((grad * up * (s * (1 + gate * (1 - s))), grad * (gate * s)), dim=-1)


def swiglu_backward_quantize(
    h: torch.Tensor,
    grad: torch.Tensor,
    fmt: Format | None,
    transposed_fmt: Format | None,
    activation_fmt: Format | None,
    keep: bool,
) -> tuple[torch.Tensor | None, ...]:
    """Quantized gradient of ``h`` in both directions and the transposed activation, from one formula.

    Returns (data, scale) of the gradient, of its transpose, and of the transpose of the activation, then with
    ``keep`` the gradient [M, 2 F] and the activation [M, F] themselves; None where not asked for.
    """
    dh, a = swiglu_backward(h, grad).to(h.dtype), swiglu(h).to(h.dtype)
    return (
        *quantize_optional(dh, fmt),
        *quantize_optional(dh, transposed_fmt, transpose=True),
        *quantize_optional(a, activation_fmt, transpose=True),
        *((dh, a) if keep else NONE),
    )
