"""The measures and inputs that other tests rely on."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from octavo.formats import ELEMENTS
from octavo.testing import outlier_matrix, poisoned_allocations, sqnr, worst_row_sqnr


def test_sqnr_is_the_ratio_of_powers_in_decibels() -> None:
    x = torch.tensor([[3.0, 4.0], [10.0, 0.0]])
    assert sqnr(x * 0.99, x) == pytest.approx(40)
    assert sqnr(x + torch.tensor([[0.0, 0.0], [1.0, 0.0]]), x) == pytest.approx(10 * math.log10(125))
    assert sqnr(x, x) == math.inf
    assert sqnr(torch.ones(3), torch.zeros(3)) == -math.inf
    assert sqnr(torch.zeros(0, 3), torch.zeros(0, 3)) == math.inf


def test_worst_row_finds_what_the_whole_hides() -> None:
    x = torch.cat([torch.full((1, 8), 1000.0), torch.ones(1, 8)])
    y = x.clone()
    y[1] = 0
    assert sqnr(y, x) > 59
    assert worst_row_sqnr(y, x) == pytest.approx(0)
    assert worst_row_sqnr(x, x) == math.inf
    assert worst_row_sqnr(torch.zeros(0, 3), torch.zeros(0, 3)) == math.inf


def test_nan_fails_every_floor() -> None:
    x = torch.ones(3, 4)
    y = x.clone()
    y[2, 1] = math.nan
    assert not sqnr(y, x) >= -1000
    assert not worst_row_sqnr(y, x) >= -1000


def test_shapes_must_be_equal() -> None:
    for measure in (sqnr, worst_row_sqnr):
        with pytest.raises(ValueError, match=r"got \(3,\) and \(2, 3\)"):
            measure(torch.ones(3), torch.ones(2, 3))


def test_outliers_are_a_thousandth_of_rows_and_columns() -> None:
    x = outlier_matrix((3000, 2000))
    rows, columns = x.square().mean(1).sqrt(), x.square().mean(0).sqrt()
    assert (rows > 50).sum() == 3
    assert (columns > 25).sum() == 2
    ordinary = x[rows < 50][:, columns < 25]
    assert ordinary.std().item() == pytest.approx(1, abs=0.01)
    assert x[rows > 50][:, columns < 25].std().item() == pytest.approx(100, rel=0.05)
    assert x[rows < 50][:, columns > 25].std().item() == pytest.approx(30, rel=0.05)


def test_outliers_are_seeded_and_small_shapes_have_one() -> None:
    assert torch.equal(outlier_matrix((2, 8, 8)), outlier_matrix((2, 8, 8)))
    assert not torch.equal(outlier_matrix((8, 8)), outlier_matrix((8, 8), seed=1))
    assert (outlier_matrix((8, 64)).abs().amax(1) > 60).sum() >= 1
    assert outlier_matrix((0, 4), dtype=torch.bfloat16).dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"rows and columns; got shape \(4,\)"):
        outlier_matrix((4,))


def test_poison_fills_every_kind_of_allocation() -> None:
    with poisoned_allocations():
        base = torch.zeros(2, 3)
        made = [
            torch.empty(2, 3),
            torch.empty_like(base),
            base.new_empty(2, 3),
            torch.empty_strided((2, 3), (1, 2)),
        ]
        assert all(t.isnan().all() for t in [*made, base.new_empty_strided((2, 3), (3, 1))])
        assert torch.empty(4, dtype=torch.int32).eq(-1).all()
        assert torch.empty(4, dtype=torch.bool).all()
        assert torch.empty(4, device="meta").device.type == "meta"
        for dtype in {e.dtype for e in ELEMENTS.values() if e.packed == 1} | {torch.float8_e8m0fnu}:
            assert torch.empty(4, dtype=dtype).float().isnan().all()
        assert torch.empty(4, dtype=torch.float4_e2m1fn_x2).view(torch.uint8).eq(0xFF).all()


def test_poison_does_not_break_the_device_context_for_the_rest_of_the_process() -> None:
    script = """
import torch
from octavo.testing import poisoned_allocations
with poisoned_allocations():
    with torch.device("meta"):
        assert torch.zeros(1).device.type == torch.empty(1).device.type == "meta"
    assert torch.empty(1).isnan()
with torch.device("meta"):
    assert torch.nn.Linear(2, 2).weight.device.type == "meta"
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_poison_ends_with_the_block_even_after_an_error() -> None:
    before = (torch.empty, torch.Tensor.new_empty)
    with pytest.raises(RuntimeError, match="boom"), poisoned_allocations():
        raise RuntimeError("boom")
    assert (torch.empty, torch.Tensor.new_empty) == before
    assert "new_empty" not in vars(torch.Tensor)
