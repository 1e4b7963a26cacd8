"""The MXFP8 product in FlyDSL: compiled for gfx950 without a GPU and executed on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="octavo check needs Triton")
from flydsl_helpers import cases, findings, needs_flydsl

import octavo
from octavo import dispatch
from octavo.check.gcn.torch_launch import executing
from octavo.formats import E4M3FN, E5M2, MXFP4, Format, ScaledTensor, ScaleLayout
from octavo.matmul import reference

pytest.importorskip("ml_dtypes", reason="octavo check's executor needs ml_dtypes")
pytestmark = [pytest.mark.amd, needs_flydsl]

ELEMENTS = {"e4m3fn": E4M3FN, "e5m2": E5M2}


def operand(rows: int, columns: int, element: str = "e4m3fn", seed: int = 0) -> ScaledTensor:
    """Blocks whose scales lie up to 2^12 apart, so that a scale of another row or block shows."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.exp2(torch.randint(-6, 7, (rows, columns // 32), generator=generator).float())
    x = torch.randn(rows, columns, generator=generator) * scale.repeat_interleave(32, 1)
    return octavo.quantize(x, Format(ELEMENTS[element], "1x32", "rceil"))


def multiply(a: ScaledTensor, b: ScaledTensor) -> torch.Tensor:
    with octavo.use_kernels(scaled_mm="flydsl"), executing("gfx950") as reports:
        got = dispatch.run("scaled_mm", a, b, None, torch.bfloat16, False)
    assert [r.instructions["v_mfma_scale_f32_32x32x64_f8f6f4"] > 0 for r in reports] == [True]
    return got


def check(a: ScaledTensor, b: ScaledTensor) -> None:
    """One rounding to bfloat16 of a float32 sum apart."""
    left, right = (octavo.dequantize(x, torch.float32).double() for x in (a, b))
    exact, size = left @ right.t(), left.abs() @ right.abs().t()
    error = (multiply(a, b).double() - exact).abs()
    assert (error <= 2.0**-8 * exact.abs() + 2.0**-20 * size).all()


@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 8, 32), (5, 24, 64), (128, 128, 128), (129, 136, 256), (67, 264, 160)]
)
def test_sizes_inside_at_and_past_the_tile(m: int, n: int, k: int) -> None:
    check(operand(m, k), operand(n, k, seed=1))


@pytest.mark.parametrize("k", [128, 96])
@pytest.mark.parametrize("pair", [("e4m3fn", "e5m2"), ("e5m2", "e4m3fn"), ("e5m2", "e5m2")], ids="x".join)
def test_elements(pair: tuple[str, str], k: int) -> None:
    check(operand(33, k, pair[0]), operand(40, k, pair[1], seed=1))


@pytest.mark.parametrize("k", [256, 160])
def test_a_block_of_nan_spoils_its_row_alone(k: int) -> None:
    a, b = operand(70, k), operand(72, k, seed=1)
    codes = a.scale.view(torch.uint8).clone()
    codes[37, k // 32 - 1] = 255
    a = replace(a, scale=codes.view(a.scale.dtype))
    got, expected = multiply(a, b), reference.scaled_mm(a, b, None, torch.bfloat16, False)
    assert got[37].isnan().all()
    assert torch.equal(got.isnan(), expected.isnan())


def test_the_gate_names_what_does_not_fit() -> None:
    from octavo.flydsl.gates import why_not_scaled_mm as why

    a, tail = operand(8, 64), (None, torch.bfloat16, False)
    with executing("gfx950"):
        assert why(a, a, *tail) is None
        assert "not e2m1" in (why(a, octavo.quantize(torch.ones(8, 64), MXFP4), *tail) or "")
        assert "plain scales" in (why(a, replace(a, layout=ScaleLayout.SWIZZLED_32_4_4), *tail) or "")
        assert "no bias" in (why(a, a, torch.ones(8), torch.bfloat16, False) or "")
        assert "bfloat16" in (why(a, a, None, torch.float32, False) or "")
        assert "multiple of 8" in (why(a, operand(7, 64), *tail) or "")
        names = [v.kernel for v in dispatch.explain("scaled_mm", a, a, *tail)]
    assert names == ["torch", "triton", "flydsl", "reference"]
    assert "not for cpu" in (why(a, a, *tail) or "")


def test_what_check_asks_of_each_configuration() -> None:
    found = {case.name: findings(case) for case in cases("mx_kernels")}
    assert len(found) == 8
    assert not any(found.values()), found


def _run_edited(old: str, new: str) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The product of a changed code object, what it should be, and the number of races found."""
    import ml_dtypes
    import numpy as np

    from octavo.check import store
    from octavo.check.gcn import launch
    from octavo.flydsl.mx_kernels import mx_case

    a, b = operand(40, 256), operand(48, 256, seed=1)
    kernel = store.compile_case(mx_case("e4m3fn", "e4m3fn", True), "gfx950")
    assert old in kernel.asm
    asm = kernel.asm.replace(old, new)
    c = np.full((40, 48), np.nan, ml_dtypes.bfloat16)
    arrays = [x.view(torch.uint8).numpy() for x in (a.data, b.data, a.scale, b.scale)]
    report = launch(replace(kernel, asm=asm), (1, 1), [*arrays, c, 40, 48, 256])
    exact = octavo.dequantize(a, torch.float32) @ octavo.dequantize(b, torch.float32).t()
    return torch.from_numpy(c.astype(np.float32)), exact, len(report.races)


def test_sabotage_is_caught() -> None:
    """The other scale byte gives other numbers, and without barriers there are races."""
    got, exact, races = _run_edited("s_endpgm", "s_endpgm")
    assert races == 0
    torch.testing.assert_close(got, exact, rtol=2.0**-7, atol=1e-2)
    got, exact, races = _run_edited(" op_sel_hi:[1,1,0]", " op_sel_hi:[0,0,0]")
    assert races == 0
    assert not torch.allclose(got, exact, rtol=0.1, atol=1.0)
    *_, races = _run_edited("\ts_barrier\n", "")
    assert races > 0
