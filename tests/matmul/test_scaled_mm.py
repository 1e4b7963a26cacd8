"""The dense product: against float64, against the reference kernel by kernel, and at the edges."""

from __future__ import annotations

import math

import pytest
import torch

from octavo import dispatch, quantize, quantize_grouped, scaled_mm, use_kernels
from octavo.formats import (
    E4M3FN,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    MXFP4,
    MXFP8,
    MXFP8_E5M2,
    Format,
    ScaledTensor,
    ScaleLayout,
)
from octavo.hardware import native_format
from octavo.testing import outlier_matrix, poisoned_allocations, sqnr
from product_helpers import DEVICES, decode64, serving, to

OPERANDS = [
    Format(E4M3FN, "tensorwise"),
    Format(E4M3FN, "rowwise", "power_of_two"),
    Format(E5M2, "rowwise"),
    Format(E4M3FNUZ, "rowwise"),
    Format(E5M2FNUZ, "tensorwise", "power_of_two"),
    Format(E4M3FN, "columnwise"),
    Format(E4M3FN, "1x128"),
    Format(E5M2, "128x1"),
    Format(E4M3FN, "128x128"),
    MXFP8,
    MXFP8_E5M2,
    MXFP4,
]
ROW = Format(E4M3FN, "rowwise")
EXTENTS = [0, 1, 3, 17, 130]


def _operands(
    a: Format, b: Format, m: int, n: int, k: int, seed: int = 0
) -> tuple[ScaledTensor, ScaledTensor]:
    x, w = outlier_matrix((m, k), seed=seed), outlier_matrix((n, k), seed=seed + 1)
    return quantize(x, a), quantize(w, b)


def _exact(a: ScaledTensor, b: ScaledTensor) -> torch.Tensor:
    return decode64(a) @ decode64(b).T


def _assert_float32_product(out: torch.Tensor, a: ScaledTensor, b: ScaledTensor) -> None:
    """Within the bound of K float32 products and sums in any order, element by element."""
    bound = decode64(a).abs() @ decode64(b).abs().T * (a.shape[1] + 3) * 2.0**-24
    assert ((out.double() - _exact(a, b)).abs() <= bound).all()


# ---- the reference -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("b", OPERANDS, ids=str)
@pytest.mark.parametrize("a", OPERANDS, ids=str)
def test_reference_is_the_product_of_the_decoded_operands(a: Format, b: Format) -> None:
    with use_kernels(scaled_mm="reference"):
        left, right = _operands(a, b, 33, 18, 276)
        out = scaled_mm(left, right, out_dtype=torch.float32)
        assert out.shape == (33, 18)
        _assert_float32_product(out, left, right)
        assert sqnr(out, _exact(left, right)) > 110
        for dtype in (torch.bfloat16, torch.float16):
            rounded = scaled_mm(left, right, out_dtype=dtype)
            assert rounded.dtype == dtype
            assert torch.equal(rounded, out.to(dtype))


@pytest.mark.parametrize("k", EXTENTS)
@pytest.mark.parametrize("n", EXTENTS)
@pytest.mark.parametrize("m", EXTENTS)
def test_any_extents(m: int, n: int, k: int) -> None:
    for a, b in ((ROW, ROW), (Format(E4M3FN, "1x128"), Format(E4M3FN, "128x128")), (MXFP8, MXFP8)):
        left, right = _operands(a, b, m, n, k)
        bias = torch.arange(n, dtype=torch.float32)
        with poisoned_allocations():
            out = scaled_mm(left, right, out_dtype=torch.float32)
            biased = scaled_mm(left, right, bias=bias, out_dtype=torch.float32)
        assert out.shape == biased.shape == (m, n)
        _assert_float32_product(out, left, right)
        assert torch.equal(biased, out + bias)


B27_FORMATS = [ROW, Format(E4M3FN, "tensorwise"), Format(E4M3FN, "1x128"), MXFP8, MXFP4]


@pytest.mark.case("B27")
@pytest.mark.parametrize(
    ("fmt", "mode"),
    [*((fmt, "eager") for fmt in B27_FORMATS), *((fmt, "compiled") for fmt in B27_FORMATS[:2])],
    ids=str,
)
def test_B27_an_empty_contraction_gives_zeros(fmt: Format, mode: str) -> None:
    def product(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return scaled_mm(quantize(x, fmt), quantize(w, fmt), bias=bias)

    if mode == "compiled":
        torch._dynamo.reset()
        product = torch.compile(product, backend="aot_eager", fullgraph=True)
    for m, n, k in ((16, 16, 0), (0, 16, 32), (16, 0, 32), (0, 0, 0)):
        with poisoned_allocations():
            out = product(torch.ones(m, k), torch.ones(n, k), None)
        assert (out.shape, out.dtype) == ((m, n), torch.bfloat16)
        assert out.eq(0).all()
    bias = torch.arange(16, dtype=torch.bfloat16)
    assert torch.equal(product(torch.ones(3, 0), torch.ones(16, 0), bias), bias.expand(3, 16))


def test_bias_is_added_before_the_one_rounding() -> None:
    left, right = _operands(ROW, ROW, 40, 24, 64)
    bias = torch.randn(24, generator=torch.Generator().manual_seed(9)).to(torch.bfloat16)
    exact = scaled_mm(left, right, out_dtype=torch.float32)
    with use_kernels(scaled_mm="reference"):
        out = scaled_mm(left, right, bias=bias)
    assert torch.equal(out, (exact + bias.float()).to(torch.bfloat16))


def test_nan_and_inf_stay_in_their_rows() -> None:
    x, w = torch.ones(4, 64), torch.ones(5, 64)
    x[1, 3], w[2, 7] = math.nan, math.inf
    for fmt in (ROW, MXFP8, Format(E4M3FN, "1x128")):
        out = scaled_mm(quantize(x, fmt), quantize(w, fmt))
        dead = torch.zeros(4, 5, dtype=torch.bool)
        dead[1], dead[:, 2] = True, True
        assert torch.equal(out.isnan(), dead)
        assert out[~dead].eq(64).all()


# ---- state around the call must not show -------------------------------------------------------------------


@pytest.mark.parametrize("fmt", [ROW, MXFP8], ids=str)
def test_autocast_does_not_change_the_product(fmt: Format) -> None:
    """The op's operands are 8 bits already: autocast has nothing to cast, in the reference neither."""
    left, right = _operands(fmt, fmt, 33, 18, 276)
    expected = scaled_mm(left, right, out_dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = scaled_mm(left, right, out_dtype=torch.float32)
    assert got.dtype == torch.float32
    assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_the_default_dtype_does_not_change_the_product(dtype: torch.dtype) -> None:
    left, right = _operands(MXFP4, ROW, 33, 18, 276)
    expected = scaled_mm(left, right, out_dtype=torch.float32)
    torch.set_default_dtype(dtype)
    try:
        assert torch.equal(scaled_mm(left, right, out_dtype=torch.float32), expected)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("device", DEVICES)
def test_the_float32_precision_setting_does_not_change_the_reference(device: str) -> None:
    """Trainers set ``torch.set_float32_matmul_precision("high")``: TF32 would be 11 bits where 24 are meant."""
    left, right = (to(x, device) for x in _operands(ROW, ROW, 257, 130, 1024))
    with use_kernels(scaled_mm="reference"):
        expected = scaled_mm(left, right, out_dtype=torch.float32)
        before = torch.get_float32_matmul_precision()
        for setting in ("high", "medium"):
            torch.set_float32_matmul_precision(setting)
            try:
                got = scaled_mm(left, right, out_dtype=torch.float32)
            finally:
                torch.set_float32_matmul_precision(before)
            assert sqnr(got, expected) > 110


@pytest.mark.case("B10")
@pytest.mark.parametrize("fmt", [ROW, Format(E5M2FNUZ, "1x128"), MXFP8, MXFP4], ids=str)
def test_B10_deterministic_mode(fmt: Format) -> None:
    left, right = _operands(fmt, fmt, 33, 18, 276)
    expected = scaled_mm(left, right)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(scaled_mm(left, right), expected)
        assert torch.equal(scaled_mm(left, right), expected)
    finally:
        torch.use_deterministic_algorithms(False)


# ---- every kernel against the reference --------------------------------------------------------------------

KERNELS = [k.name for k in dispatch.kernels("scaled_mm") if k.name != "reference"]
PAIRS = [
    (Format(E4M3FN, "tensorwise"), Format(E4M3FN, "tensorwise")),
    (Format(E5M2, "tensorwise"), Format(E4M3FN, "tensorwise")),
    (Format(E4M3FN, "tensorwise"), Format(E5M2, "tensorwise")),
    (Format(E4M3FN, "rowwise"), Format(E4M3FN, "rowwise")),
    (Format(E4M3FN, "rowwise", "power_of_two"), Format(E4M3FN, "tensorwise", "power_of_two")),
    (Format(E5M2, "rowwise"), Format(E4M3FN, "rowwise")),
    (Format(E4M3FN, "rowwise"), Format(E5M2, "rowwise")),
    (Format(E4M3FN, "1x128"), Format(E4M3FN, "128x128")),
    (Format(E4M3FN, "1x128"), Format(E4M3FN, "1x128")),
    (Format(E4M3FN, "128x128"), Format(E4M3FN, "1x128")),
    (MXFP8, MXFP8),
    (MXFP8_E5M2, MXFP8),
    (MXFP4, MXFP4),
]
SHAPES = [
    (1, 1, 1),
    (17, 3, 130),
    (1, 64, 48),
    (255, 257, 512),
    (256, 128, 384),
    (33, 16, 4096),
    (128, 250, 17),
]


@pytest.mark.parametrize(("a", "b"), PAIRS, ids=lambda f: str(f))
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("device", DEVICES)
def test_every_kernel_is_within_50_db_of_the_reference(
    device: str, kernel: str, a: Format, b: Format
) -> None:
    a, b = native_format(a, device), native_format(b, device)
    served = 0
    for dtype in (torch.bfloat16, torch.float32):
        for m, n, k in SHAPES:
            if (a.element.packed > 1 or b.element.packed > 1) and k % 2:
                continue
            left, right = (to(x, device) for x in _operands(a, b, m, n, k))
            bias = torch.randn(n, generator=torch.Generator().manual_seed(5)).to(device, dtype)
            for extra in (None, bias):
                reason = serving("scaled_mm", kernel, left, right, extra, dtype, False)
                if reason:
                    continue
                served += 1
                with use_kernels(scaled_mm="reference"):
                    expected = scaled_mm(left, right, bias=extra, out_dtype=dtype)
                with use_kernels(scaled_mm=kernel):
                    got = scaled_mm(left, right, bias=extra, out_dtype=dtype)
                assert (got.shape, got.dtype) == (expected.shape, dtype)
                assert sqnr(got, expected) >= 50, (m, n, k, dtype, extra is None)
    if not served:
        pytest.skip(f"{kernel} serves none of these on {device}: {reason}")


@pytest.mark.case("B46")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("m", [1, 255, 257])
def test_B46_scales_exactly_as_long_as_the_rows(m: int, device: str) -> None:
    a, b = native_format(ROW, device), native_format(ROW, device)
    left, right = (to(x, device) for x in _operands(a, b, m, 48, 256))
    out = scaled_mm(left, right)
    assert left.scale.untyped_storage().nbytes() == 4 * m
    assert sqnr(out, _exact(left, right)) > 50


# ---- errors ------------------------------------------------------------------------------------------------


def test_errors_say_what_was_got_and_what_is_needed() -> None:
    a, b = _operands(ROW, ROW, 4, 6, 32)
    with pytest.raises(
        ValueError, match=r"a\[M, K\] by b\[N, K\] transposed; got a \(4, 32\) and b \(6, 16\)"
    ):
        scaled_mm(a, quantize(torch.ones(6, 16), ROW))
    with pytest.raises(ValueError, match=r"got a \(2, 4, 32\) and b \(6, 32\): both must be matrices"):
        scaled_mm(quantize(torch.ones(2, 4, 32), ROW), b)
    with pytest.raises(
        ValueError, match=r"out_dtype must be bfloat16, float16 or float32; got torch\.float64"
    ):
        scaled_mm(a, b, out_dtype=torch.float64)
    with pytest.raises(
        ValueError, match=r"bias must be \(6,\) in torch\.bfloat16 on cpu; got \(4,\) in torch\.bfloat16"
    ):
        scaled_mm(a, b, bias=torch.zeros(4, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"got \(6,\) in torch\.float32 on cpu: cast, move or reshape it"):
        scaled_mm(a, b, bias=torch.zeros(6))
    with pytest.raises(ValueError, match=r"operands lie on cpu and meta: move one of them"):
        scaled_mm(a, quantize(torch.ones(6, 32, device="meta"), ROW))


def test_a_bias_on_another_device_is_refused() -> None:
    a, b = _operands(ROW, ROW, 4, 6, 32)
    with pytest.raises(ValueError, match="bias"):
        scaled_mm(a, b, bias=torch.zeros(6, dtype=torch.bfloat16, device="meta"))


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_scales_that_do_not_belong_to_the_data_are_refused(rows: int) -> None:
    """One scale for four rows would broadcast into a wrong product without a word."""
    a, b = _operands(ROW, ROW, 4, 6, 32)
    wrong = ScaledTensor(a.data, a.scale[:1].expand(rows, 1).contiguous(), a.format)
    with pytest.raises(ValueError, match="scale"):
        scaled_mm(wrong, b)


def test_a_scale_layout_that_is_not_read_is_refused() -> None:
    a, b = _operands(MXFP8, MXFP8, 128, 6, 128)
    swizzled = ScaledTensor(a.data, a.scale.flatten(), MXFP8, ScaleLayout.SWIZZLED_32_4_4)
    with pytest.raises((ValueError, NotImplementedError), match="swizzled_32_4_4"):
        scaled_mm(swizzled, b)


def test_padded_groups_are_refused() -> None:
    offs = torch.tensor([5, 9], dtype=torch.int32)
    for fmt in (ROW, Format(E4M3FN, "tensorwise"), MXFP8):
        x = quantize_grouped(torch.ones(9, 32), offs, fmt, transpose=True)
        with pytest.raises(ValueError, match="group"):
            scaled_mm(x, x)
