"""Statistics of a product's operands, added up on the device so that watching a run does not slow it.

One buffer a layer, float64 [3 products, 2 operands, len(FIELDS)]; :mod:`octavo.training.monitor` reads it.
"""

from __future__ import annotations

import itertools

import torch

from octavo import library
from octavo.formats import Format, ScaledTensor
from octavo.quantize import dequantize, reference
from octavo.training.recipes import PRODUCTS

FIELDS = (
    "amax",
    "saturated",
    "underflowed",
    "nonzero",
    "nonfinite",
    "elements",
    "signal",
    "noise",
    "first_bad",
)
"""amax is a maximum and first_bad the turn in which a NaN or inf was first seen, 0 for never; the others are
sums: elements clipped by more than half a step, non-zero elements that became zero, elements that are not zero,
NaN and inf, all elements, and the squares of x and of its error."""

_TURNS = itertools.count(1)
"""Counts observations in the order in which they run, on the host: it needs no wait for the device, sees the
order of compiled code too, and a double holds it exactly for longer than any run."""


def new_stats(device: torch.device) -> torch.Tensor:
    """A buffer of zeros for one layer on ``device``."""
    return torch.zeros(len(PRODUCTS), 2, len(FIELDS), dtype=torch.float64, device=device)


def observe(
    stats: torch.Tensor | None,
    product: str,
    operand: int,
    x: torch.Tensor,
    quantized: ScaledTensor | None,
    transpose: bool = False,
) -> None:
    """Add ``x`` [..., M, K] and its quantized form (of ``x.mT`` with ``transpose``) to ``stats``, if given.

    An operand in the padded group layout is not comparable element by element and is not observed.
    """
    if stats is None or quantized is None or quantized.group_ends is not None:
        return
    torch.ops.octavo.observe(
        stats,
        PRODUCTS.index(product),
        operand,
        x,
        quantized.data,
        quantized.scale,
        quantized.format.key,
        transpose,
    )


def _observe(
    stats: torch.Tensor,
    product: int,
    operand: int,
    x: torch.Tensor,
    data: torch.Tensor,
    scale: torch.Tensor,
    key: str,
    transpose: bool,
) -> None:
    fmt = Format.from_key(key)
    x = (x.mT if transpose else x).float()
    decoded = dequantize(ScaledTensor(data, scale, fmt))
    finite = x.isfinite()
    x = x.where(finite, 0.0)
    # Half a step above the largest value is where rounding, were there no clamp, would leave the format.
    ulp = 2.0 ** (fmt.element.emax - fmt.element.mantissa_bits)
    scales = reference.decode_e8m0(scale) if fmt.is_mx else scale
    limit = reference.expand_blocks(scales, x.shape, fmt.block) * (fmt.element.max + ulp / 2)
    error = (x - decoded).where(finite & decoded.isfinite(), 0.0)
    bad = (~finite).sum()
    sums = (
        (x.abs() >= limit).sum(),
        ((decoded == 0) & (x != 0)).sum(),
        (x != 0).sum(),
        bad,
        torch.full((), x.numel(), device=x.device),
        x.double().square().sum(),
        error.double().square().sum(),
    )
    amax = x.abs().max() if x.numel() else x.new_zeros(())
    cell = stats[product, operand]
    cell[0] = torch.maximum(cell[0], amax.double())
    cell[1:-1] += torch.stack([s.double() for s in sums])
    cell[-1] = torch.where((bad > 0) & (cell[-1] == 0), float(next(_TURNS)), cell[-1])


library.define(
    "observe(Tensor(a!) stats, int product, int operand, Tensor x, Tensor data, Tensor scale, str format, "
    "bool transpose) -> ()",
    _observe,
    lambda *args: None,
)
