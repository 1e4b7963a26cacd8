"""Quantization over ragged groups of rows: no scale is shared by two groups.

Products that contract over the rows (weight gradients of experts) need each group to start at a multiple of
the scale block. The padded group layout gives group g the columns ``[ends[g-1], ends[g])`` of the transposed
data, where ``ends`` are cumulative sizes rounded up to ``align`` one by one; the capacity
``M + G * (align - 1)`` is a bound that needs no look at the sizes.
"""

from __future__ import annotations

import torch

from octavo.formats import ALL, Format
from octavo.quantize import reference


def capacity(rows: int, groups: int, align: int) -> int:
    """Columns of the padded layout of ``rows`` rows in ``groups`` groups, a multiple of ``align``."""
    return (rows + groups * (align - 1) + align - 1) // align * align


def padded_ends(offs: torch.Tensor, align: int) -> torch.Tensor:
    """int32 [G] cumulative padded ends, computed on the device of ``offs``."""
    sizes = torch.diff(offs, prepend=offs.new_zeros(1))
    return ((sizes + align - 1) // align * align).cumsum(0).to(torch.int32)


def group_bounds(offs: torch.Tensor) -> list[tuple[int, int]]:
    """(start, end) of each group, read from the device."""
    ends = offs.tolist()
    return list(zip([0, *ends], ends))


def quantize_rows(x: torch.Tensor, offs: torch.Tensor, fmt: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """(data [M, K], scale) with one scale a group spread over its rows as [M, 1].

    Rows past the last end are zero with scale 1. For tensorwise formats alone: every other format's blocks
    lie within one row.
    """
    data = torch.zeros(x.shape, dtype=fmt.element.dtype, device=x.device)
    scale = torch.ones((x.shape[0], 1), dtype=torch.float32, device=x.device)
    for start, end in group_bounds(offs):
        if start < end:
            data[start:end], scale[start:end] = reference.quantize(x[start:end], fmt)
    return data, scale


def quantize_transposed(
    x: torch.Tensor, offs: torch.Tensor, fmt: Format, align: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(data [K, capacity], scale) of the transpose of ``x`` [M, K] in the padded group layout.

    The scale is [G, K, 1] (rowwise), [G, 1, 1] (tensorwise) or [K, capacity / block]; padding holds zeros.
    """
    columns = capacity(x.shape[0], offs.shape[0], align)
    spread = x.new_zeros((columns, x.shape[1]))
    padded = group_bounds(padded_ends(offs, align))
    groups = list(zip(group_bounds(offs), padded, strict=True))
    for (start, end), (to, _) in groups:
        spread[to : to + end - start] = x[start:end]
    if fmt.block[1] != ALL:
        return reference.quantize(spread, fmt, transpose=True)
    data = torch.zeros((x.shape[1], columns), dtype=fmt.element.dtype, device=x.device)
    groups_shape = (offs.shape[0], *fmt.scale_shape(data.shape))
    scale = torch.ones(groups_shape, dtype=torch.float32, device=x.device)
    for group, (to, until) in enumerate(padded):
        data[:, to:until], scale[group] = reference.quantize(spread[to:until], fmt, transpose=True)
    return data, scale


def quantize_groups(
    x: torch.Tensor, offs: torch.Tensor, fmt: Format, transpose: bool, align: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference of ``octavo::quantize_groups``; reads the group ends on the host."""
    return quantize_transposed(x, offs, fmt, align) if transpose else quantize_rows(x, offs, fmt)
