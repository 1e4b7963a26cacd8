"""The dense product in FlyDSL: compiled for gfx950 without a GPU and executed on the CPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="octavo check needs Triton")
from flydsl_helpers import cases, findings, needs_flydsl

import octavo
from octavo import dispatch, hardware
from octavo.check.gcn.torch_launch import executing

pytest.importorskip("ml_dtypes", reason="octavo check's executor needs ml_dtypes")
pytestmark = [pytest.mark.amd, needs_flydsl]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def check(a: torch.Tensor, b: torch.Tensor) -> None:
    """Exact for sums that float32 holds; else one rounding to bfloat16 of a float32 sum apart."""
    with octavo.use_kernels(mm="flydsl"), executing("gfx950") as reports:
        got = dispatch.run("mm", a, b)
    assert [r.instructions["v_mfma_f32_32x32x16_bf16"] > 0 for r in reports] == [True]
    exact = a.double() @ b.double().t()
    bound = 2.0**-8 * exact.abs() + 2.0**-22 * (a.double().abs() @ b.double().abs().t())
    assert ((got.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 8, 8), (5, 24, 72), (128, 128, 64), (129, 136, 128), (67, 264, 200)]
)
def test_sizes_inside_at_and_past_the_tile(m: int, n: int, k: int) -> None:
    check(normal(m, k), normal(n, k, seed=1))


def test_each_element_stands_in_its_place() -> None:
    """Whole numbers that tell row and column apart: every product is exact."""
    m, n, k = 140, 152, 8
    a, b = torch.zeros(m, k), torch.zeros(n, k)
    a[:, 0], a[:, 1], b[:, 0], b[:, 1] = torch.arange(m), 1, 1, torch.arange(n) / 256
    with octavo.use_kernels(mm="flydsl"), executing("gfx950"):
        got = dispatch.run("mm", a.bfloat16(), b.bfloat16())
    assert torch.equal(got, (a @ b.t()).bfloat16())


def test_views_and_rows_at_odd_addresses() -> None:
    check(normal(9, 80)[:, 8:72], normal(72, 64)[1:65:2])
    check(normal(9, 65)[:, 1:], normal(64, 8, seed=1).t())


def test_what_is_past_the_end_is_not_read_into_the_sum() -> None:
    """A row of NaN after the last one, and NaN behind the end of each row."""
    a, b = normal(6, 80), normal(17, 80, seed=1)
    a[5], b[16], a[:, 72:], b[:, 72:] = (float("nan"),) * 4
    check(a[:5, :72], b[:16, :72])


def test_the_gate_names_what_does_not_fit() -> None:
    from octavo.flydsl.gates import why_not_mm

    x = normal(8, 16)
    with executing("gfx950"):
        assert why_not_mm(x, x) is None
        assert "multiple of 8" in (why_not_mm(x, normal(7, 16)) or "")
        assert "bfloat16" in (why_not_mm(x.half(), x) or "")
        assert "empty" in (why_not_mm(x[:0], x) or "")
        assert "[M, K]" in (why_not_mm(x, normal(8, 8)) or "")
    assert "not for cpu" in (why_not_mm(x, x) or "")
    assert hardware.why_no_flydsl() is None


def test_what_check_asks_of_it() -> None:
    assert [findings(case) for case in cases("mm_kernels")] == [[]]
