"""The fused producers' Triton kernels, run in Triton's interpreter, against the reference.

Joining matrices is exact. SwiGLU may differ in the last bit of exp, so a few codes may, too.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from octavo import dispatch, hardware
from octavo.formats import E2M1, E4M3FN, E5M2, Format, ScaledTensor
from octavo.fused import quantize_concat, swiglu_backward_quantize, swiglu_quantize
from octavo.quantize import dequantize, launch_tables, quantize
from octavo.testing import sqnr
from quantize_helpers import assert_same, raw

interpreted = pytest.mark.skipif(not hardware.interpreted(), reason="runs in the interpreter's own process")
ONE, ROW = Format(E5M2, "tensorwise"), Format(E4M3FN, "rowwise", "power_of_two")
B1, B128 = Format(E4M3FN, "1x128"), Format(E4M3FN, "128x128")
MX8, MX4 = Format(E4M3FN, "1x32", "rceil"), Format(E2M1, "1x32", "rceil")
FORMATS = [ONE, ROW, B1, B128, MX8, MX4]


@pytest.mark.skipif(hardware.interpreted(), reason="is this very process")
def test_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    pytest.importorskip("ml_dtypes")
    command = [sys.executable, "-m", "pytest", "-x", "-W", "ignore::RuntimeWarning", __file__]
    run = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert " passed" in run.stdout or "100%" in run.stdout


@pytest.fixture(autouse=True)
def _right_conversions() -> None:
    if hardware.interpreted():
        from octavo.check import interpreter

        interpreter.install()


def _both_kernels(op: str, call):
    with dispatch.use_kernels(**{op: "triton"}):
        found = call()
    with dispatch.use_kernels(**{op: "reference"}):
        return found, call()


@interpreted
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("sizes", [(128, 256, 40), (6, 20, 2)], ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_concatenation_is_exact(fmt: Format, sizes: tuple[int, ...], dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(n, 70) if dim == 0 else (70, n) for n in sizes]
    xs = [torch.randn(s, generator=generator).bfloat16() * 3**n for n, s in enumerate(shapes)]
    for direct, turned in ((fmt, None), (None, fmt), (fmt, fmt), (ROW, fmt), (fmt, ONE)):
        found, wanted = _both_kernels(
            "quantize_concat", lambda d=direct, t=turned: quantize_concat(xs, dim, d, t)
        )
        for a, b in zip(found, wanted, strict=True):
            if b is None:
                assert a is None
            else:
                assert_same(a, b)


def _close(found: ScaledTensor | None, wanted: ScaledTensor | None) -> None:
    if found is None or wanted is None:
        assert found is wanted is None
        return
    assert found.data.shape == wanted.data.shape
    assert found.scale.shape == wanted.scale.shape
    assert (raw(found.data) != raw(wanted.data)).float().mean() < 0.005
    assert sqnr(dequantize(wanted), dequantize(found)) > 50


def _inputs(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    h = torch.randn(rows, 2 * columns, generator=generator) * 2
    return h.bfloat16(), torch.randn(rows, columns, generator=generator).bfloat16()


@interpreted
@pytest.mark.parametrize("shape", [(33, 70), (130, 256), (3, 0), (0, 4)], ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_swiglu(fmt: Format, shape: tuple[int, int]) -> None:
    h, _ = _inputs(*shape)
    found, wanted = _both_kernels("swiglu_quantize", lambda: swiglu_quantize(h, fmt))
    if h.numel():
        _close(found, wanted)
    else:
        assert found.data.shape == wanted.data.shape


@interpreted
@pytest.mark.parametrize("shape", [(66, 256), (34, 70)], ids=str)
@pytest.mark.parametrize(
    "formats",
    [(f, f, f) for f in FORMATS] + [(ROW, None, ONE), (None, None, None), (B1, ROW, MX8), (None, ONE, ROW)],
    ids=str,
)
@pytest.mark.parametrize("keep", [False, True])
def test_swiglu_backward(formats: tuple[Format | None, ...], shape: tuple[int, int], keep: bool) -> None:
    h, grad = _inputs(*shape)
    found, wanted = _both_kernels(
        "swiglu_backward_quantize", lambda: swiglu_backward_quantize(h, grad, *formats, keep=keep)
    )
    for a, b in zip(found[:3], wanted[:3], strict=True):
        _close(a, b)
    for a, b in zip(found[3:], wanted[3:], strict=True):
        assert a.shape == b.shape
        if keep:
            assert sqnr(b.float(), a.float()) > 50


@interpreted
@pytest.mark.parametrize("apart", [0, 1, 2, 3])
@pytest.mark.parametrize("shape", [(34, 128), (20, 33)], ids=str)
@pytest.mark.parametrize(
    "formats", [(ONE, ONE, ONE), (ROW, ROW, ROW), (B1, B1, B1), (ONE, None, ROW)], ids=str
)
def test_swiglu_backward_is_exact_on_its_own_values(
    formats: tuple[Format, ...], shape: tuple[int, int], apart: int
) -> None:
    """However the launches are cut, what is quantized is the gradient that ``keep`` returns, bit for bit."""
    h, grad = _inputs(*shape)
    config = {"block_m": 64, "block_k": 64, "warps": 4, "group": 1, "owned": 4, "apart": apart}
    buckets = {f"tiles/{g}": config for g in ("tensorwise", "rowwise", "1x128")}
    with (
        launch_tables.override({"swiglu_backward": buckets}),
        dispatch.use_kernels(swiglu_backward_quantize="triton"),
    ):
        *found, dh, act = swiglu_backward_quantize(h, grad, *formats, keep=True)
    with dispatch.use_kernels(quantize="reference"):
        for got, fmt, value, transpose in zip(
            found, formats, (dh, dh, act), (False, True, True), strict=True
        ):
            if fmt is None:
                assert got is None
            else:
                assert_same(got, quantize(value, fmt, transpose=transpose))


@interpreted
@pytest.mark.parametrize("fmt", [ONE, B128], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_concatenation_read_twice_by_one_launch_is_exact(fmt: Format, dim: int) -> None:
    xs = [torch.randn(128, 128, generator=torch.Generator().manual_seed(n)).bfloat16() for n in range(2)]
    config = {
        "block_m": 128,
        "block_k": 128,
        "warps": 4,
        "group": 1,
        "reverse": 1,
        "evict": 1,
        "owned": 4,
        "apart": 2,
    }
    with launch_tables.override({"tiles": {f"both/{fmt.granularity}": config}}):
        found, wanted = _both_kernels("quantize_concat", lambda: quantize_concat(xs, dim, fmt, fmt))
    for a, b in zip(found, wanted, strict=True):
        assert_same(a, b)


def test_cpu_tensors_get_a_reason_without_the_interpreter() -> None:
    if hardware.interpreted():
        pytest.skip("the interpreter serves CPU tensors")
    verdict = dispatch.explain("swiglu_quantize", torch.zeros(2, 4), ROW)[0]
    assert verdict.kernel == "triton"
    assert verdict.reason
