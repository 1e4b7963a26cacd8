"""Statistics of a product's operands, added up on the device so that watching a run does not slow it.

One buffer a layer, float64 [3 products, 2 operands, len(FIELDS)]; :mod:`octavo.training.monitor` reads it.
"""

from __future__ import annotations

import itertools

import torch

from octavo import library
from octavo.formats import ALL, Format, ScaledTensor
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
    *,
    offs: torch.Tensor | None = None,
) -> None:
    """Add ``x`` [..., M, K] and its quantized form (of ``x.mT`` with ``transpose``) to ``stats``, if given.

    With ``offs``, int32 ends of groups of the rows of ``x`` [M, K], rows past the last are left out, and
    ``quantized`` may be the transpose of ``x`` in padded groups.
    """
    if stats is None or quantized is None:
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
        offs,
        quantized.group_ends,
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
    offs: torch.Tensor | None,
    group_ends: torch.Tensor | None,
) -> None:
    fmt = Format.from_key(key)
    x = (x.mT if transpose else x).float()
    if group_ends is None:
        decoded = dequantize(ScaledTensor(data, scale, fmt))
        scales = reference.expand_blocks(_decoded(scale, fmt), x.shape, fmt.block)
    else:
        assert offs is not None
        decoded, scales = _from_groups(data, scale, fmt, offs, group_ends, x.shape[0])
    # What lies past the last group is no operand's: memory as it was.
    live = None if offs is None else (torch.arange(x.shape[0], device=x.device) < offs[-1])[:, None]
    finite = x.isfinite()
    bad = (~finite if live is None else ~finite & live).sum()
    counted = finite if live is None else finite & live
    x = x.where(counted, 0.0)
    # Half a step above the largest value is where rounding, were there no clamp, would leave the format.
    ulp = 2.0 ** (fmt.element.emax - fmt.element.mantissa_bits)
    limit = scales * (fmt.element.max + ulp / 2)
    error = (x - decoded).where(counted & decoded.isfinite(), 0.0)
    columns = torch.full((), x.numel(), device=x.device) if live is None else live.sum() * x.shape[1]
    sums = (
        ((x.abs() >= limit) & (True if live is None else live)).sum(),
        ((decoded == 0) & (x != 0)).sum(),
        (x != 0).sum(),
        bad,
        columns,
        x.double().square().sum(),
        error.double().square().sum(),
    )
    amax = x.abs().max() if x.numel() else x.new_zeros(())
    cell = stats[product, operand]
    cell[0] = torch.maximum(cell[0], amax.double())
    cell[1:-1] += torch.stack([s.double() for s in sums])
    cell[-1] = torch.where((bad > 0) & (cell[-1] == 0), float(next(_TURNS)), cell[-1])


def _decoded(scale: torch.Tensor, fmt: Format) -> torch.Tensor:
    return reference.decode_e8m0(scale) if fmt.is_mx else scale


def _from_groups(
    data: torch.Tensor,
    scale: torch.Tensor,
    fmt: Format,
    offs: torch.Tensor,
    ends: torch.Tensor,
    rows: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales, [M, K], of rows whose transpose lies in padded groups with these ends."""
    row = torch.arange(rows, device=data.device)
    group = torch.searchsorted(offs, row, right=True).clamp(max=offs.shape[0] - 1)
    starts, padded = (torch.cat((t.new_zeros(1), t[:-1])) for t in (offs, ends))
    place = row - starts[group] + padded[group]
    if fmt.block[1] != ALL:
        place = place.clamp(max=data.shape[1] * fmt.element.packed - 1)
        values = dequantize(ScaledTensor(data, scale, fmt))
        spread = reference.expand_blocks(_decoded(scale, fmt), values.shape, fmt.block).expand_as(values)
        return values[:, place].T, spread[:, place].T
    scales = scale[group].squeeze(-1)
    return data.float()[:, place.clamp(max=data.shape[1] - 1)].T * scales, scales


library.define(
    "observe(Tensor(a!) stats, int product, int operand, Tensor x, Tensor data, Tensor scale, str format, "
    "bool transpose, Tensor? offs, Tensor? group_ends) -> ()",
    _observe,
    lambda *args: None,
)
