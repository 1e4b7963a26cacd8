"""The expert MLP's own kernels on ragged and empty groups, executed as gfx942 and gfx950 code, by their launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gcn_helpers import both_targets

pytest.importorskip("triton", reason="compiling kernels needs Triton")

from octavo.check.gcn.torch_launch import executing
from octavo.formats import E4M3FN, Format
from octavo.fused import experts_launch, experts_reference
from octavo.matmul import zero_launch
from octavo.testing import poisoned_allocations, sqnr

pytestmark = pytest.mark.amd

OFFS = torch.tensor([5, 5, 21, 22, 22, 34], dtype=torch.int32)
"""Experts of 5, 0, 16, 1, 0 and 12 rows; three rows past the last belong to none."""
ROWS, TOKENS, CHOICES = 37, 12, 3
WIDTHS = [40, 520]
"""Less and more than a tile's columns."""


def on(target: str, call: Callable[[], Any], launches: int) -> Any:
    """``call`` executed for ``target`` on memory that held NaN; it must launch so many kernels."""
    with executing(target) as reports, poisoned_allocations():
        found = call()
    assert len(reports) == launches
    return found


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + shape[-1])).to(dtype)


@both_targets
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_swiglu_backward_over_rows(dtype: torch.dtype, width: int, target: str) -> None:
    h, grad = normal(ROWS, 2 * width, dtype=dtype) * 2, normal(ROWS, width, dtype=dtype)
    for scores in (torch.rand(ROWS, generator=torch.Generator().manual_seed(1)), None):
        arguments = (h, grad, scores, OFFS, None, None, None, 16, True)
        found = on(target, lambda a=arguments: experts_launch.swiglu_backward_rows(*a), 1)
        wanted = experts_reference.swiglu_backward_rows(*arguments)
        assert (found[6] is None) == (scores is None)
        for a, b in zip(found[6:], wanted[6:], strict=True):
            if b is not None:
                # The hardware's exp differs in its last bits.
                assert a.dtype == b.dtype
                assert sqnr(a, b) > (100 if a.dtype == torch.float32 else 60)


@both_targets
@pytest.mark.parametrize("granularity", ["rowwise", "1x128"])
def test_swiglu_backward_and_its_codes(granularity: str, target: str) -> None:
    """Codes of ragged and empty groups, in both layouts, are those of the values that the kernel kept."""
    fmt = Format(E4M3FN, granularity, "power_of_two").with_family("fnuz" if target == "gfx942" else "ocp")
    h, grad = normal(ROWS, 80), normal(ROWS, 40)
    align = max(16, fmt.block[1])
    grouped_launches = 2 if granularity == "rowwise" else 1
    found = on(
        target,
        lambda: experts_launch.swiglu_backward_rows(h, grad, None, OFFS, fmt, fmt, fmt, align, True),
        2 + 2 * grouped_launches,
    )
    dh, act = found[7:]
    wanted = (
        *experts_reference._rows(dh, OFFS, fmt),
        *experts_reference._columns(dh, OFFS, fmt, align),
        *experts_reference._columns(act, OFFS, fmt, align),
    )
    for a, b in zip(found[:6], wanted, strict=True):
        assert b is not None
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@both_targets
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_combining(dtype: torch.dtype, width: int, target: str) -> None:
    back = torch.randperm(TOKENS * CHOICES, generator=torch.Generator().manual_seed(2)).view(TOKENS, CHOICES)
    y = normal(ROWS, width, dtype=dtype)
    for scores in (torch.rand(TOKENS, CHOICES, generator=torch.Generator().manual_seed(3)), None):
        for values in (y, torch.cat((y, y), 1)[:, :width]):
            found = on(target, lambda v=values, s=scores: experts_launch.combine_rows(v, back, s), 1)
            wanted = experts_reference.combine_rows(values, back, scores)
            assert found.dtype == dtype
            assert sqnr(found, wanted) > (100 if dtype == torch.float32 else 55)


@both_targets
def test_a_wrong_row_is_seen(target: str) -> None:
    """Guards the floor: one choice of one token from the next row fails it."""
    back = torch.randperm(TOKENS * CHOICES, generator=torch.Generator().manual_seed(2)).view(TOKENS, CHOICES)
    y, wrong = normal(ROWS, 40), back.clone()
    wrong[3, 1] = (wrong[3, 1] + 1) % ROWS
    found = on(target, lambda: experts_launch.combine_rows(y, wrong, None), 1)
    assert sqnr(found, experts_reference.combine_rows(y, back, None)) < 30


@both_targets
@pytest.mark.parametrize("ends", [[5, 5, 21, 34], [0, 0, 0, 0], [37, 37, 37, 37]], ids=str)
def test_zeros_where_no_group_is(ends: list[int], target: str) -> None:
    offs = torch.tensor(ends, dtype=torch.int32)
    rows, groups = (torch.full(s, torch.nan, dtype=torch.bfloat16) for s in ((37, 520), (4, 8, 24)))
    on(target, lambda: zero_launch.zero_tail(rows, offs), 1)
    on(target, lambda: zero_launch.zero_empty_groups(groups, offs), 1)
    assert not rows[ends[-1] :].any()
    assert rows[: ends[-1]].isnan().all()
    for group, (start, end) in enumerate(zip([0, *ends], ends)):
        assert not groups[group].any() if start == end else groups[group].isnan().all()
