"""Quantization bit for bit against the oracle: codes, ties, scales, special values, layouts, public reports."""

from __future__ import annotations

import math
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import torch

import numerics_oracle as oracle
from octavo import dequantize, quantize, quantize_both, use_kernels
from octavo.formats import (
    E2M1,
    E4M3FN,
    E4M3FNUZ,
    E5M2,
    ELEMENTS,
    MXFP4,
    MXFP8,
    Element,
    Format,
    ScaledTensor,
    ScaleLayout,
)
from octavo.quantize import reference
from octavo.testing import outlier_matrix, poisoned_allocations, sqnr, worst_row_sqnr
from quantize_helpers import (
    DTYPES,
    FLOAT_FORMATS,
    FORMATS,
    MX_FORMATS,
    assert_matches_oracle,
    assert_same,
    canonical,
    codes,
    raw,
)

BYTE_ELEMENTS = [e for e in ELEMENTS.values() if e.packed == 1]
FLOAT_MAX = float(np.finfo(np.float32).max)


@pytest.fixture(autouse=True)
def _reference() -> object:
    with use_kernels(quantize="reference", quantize_both="reference"):
        yield


def _with_unit_scale(values: np.ndarray, element: Element) -> torch.Tensor:
    """[1, n] float32 that a tensorwise scale of exactly 1 maps to ``values``: the largest element is among them."""
    return torch.tensor(np.concatenate([values, [element.max]]), dtype=torch.float32)[None]


# ---- every code, every tie ---------------------------------------------------------------------------------


@pytest.mark.parametrize("element", BYTE_ELEMENTS, ids=lambda e: e.name)
def test_all_256_codes_survive_decode_and_encode(element: Element) -> None:
    every = torch.arange(256, dtype=torch.uint8)
    data = every.view(element.dtype)[None]
    values = reference.dequantize(data, torch.ones(1, 1), Format(element, "tensorwise"), torch.float32)
    np.testing.assert_array_equal(values[0].numpy(), oracle.decode_table(element.name))
    finite = values[0].isfinite()
    back = quantize(_with_unit_scale(values[0][finite].numpy(), element), Format(element, "tensorwise"))
    assert back.scale.item() == 1.0
    assert raw(back.data)[0, :-1].tolist() == every[finite].tolist()


def test_all_16_codes_of_e2m1_survive_decode_and_encode() -> None:
    every = torch.arange(16, dtype=torch.uint8)
    packed = (every[0::2] | every[1::2] << 4).view(torch.float4_e2m1fn_x2)[None]
    one = torch.tensor([[127]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    values = dequantize(ScaledTensor(packed, one, MXFP4))
    np.testing.assert_array_equal(values[0].numpy(), oracle.decode_table("e2m1"))
    back = quantize(values, MXFP4)
    assert raw(back.scale).item() == 127
    assert codes(back)[0].tolist() == every.tolist()


def _around_ties(element: Element) -> np.ndarray:
    table = oracle.magnitudes(element.name)
    middle = ((table[:-1] + table[1:]) / 2).astype(np.float32)
    points = np.concatenate([middle, np.nextafter(middle, 0), np.nextafter(middle, np.float32(np.inf))])
    extra = np.array([0.0, table[1] / 2, table[1] / 4, 1e-30, 1.4e-45, 1.1754944e-38], np.float32)
    points = np.concatenate([points, extra])
    return np.concatenate([points, -points])


@pytest.mark.parametrize("element", BYTE_ELEMENTS, ids=lambda e: e.name)
def test_every_tie_and_its_neighbours(element: Element) -> None:
    x = _with_unit_scale(_around_ties(element), element)
    q = assert_matches_oracle(x, Format(element, "tensorwise"))
    assert q.scale.item() == 1.0
    kind = ml_dtypes.finfo(
        {
            "e4m3fn": ml_dtypes.float8_e4m3fn,
            "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
            "e5m2": ml_dtypes.float8_e5m2,
            "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
        }[element.name]
    ).dtype
    np.testing.assert_array_equal(raw(q.data).numpy(), x.numpy().astype(kind).view(np.uint8))


@pytest.mark.parametrize("fmt", MX_FORMATS, ids=str)
def test_every_tie_and_its_neighbours_in_mx_blocks(fmt: Format) -> None:
    values = _around_ties(fmt.element)
    values = np.concatenate([values, np.zeros(-len(values) % 31, np.float32)]).reshape(-1, 31)
    full = np.full((len(values), 1), fmt.element.max, np.float32)
    for power in (0, -40, 60):
        x = torch.tensor(np.hstack([values, full]) * np.float32(2.0**power))
        assert_matches_oracle(x, fmt)


@pytest.mark.parametrize("element", ELEMENTS.values(), ids=lambda e: e.name)
def test_cast_of_every_bfloat16(element: Element) -> None:
    """All 65,536 values, saturation and every NaN among them, by the cast alone."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()[None]
    data = reference.cast(every, element)
    fmt = MXFP4 if element.packed > 1 else Format(element, "tensorwise")
    got = codes(ScaledTensor(data, torch.ones(1, 1), fmt))
    with np.errstate(invalid="ignore"):  # signalling NaN
        values = every.numpy().astype(np.float64)
    np.testing.assert_array_equal(got, oracle.encode(values, element.name))


@pytest.mark.parametrize("element", [e for e in BYTE_ELEMENTS if "fnuz" in e.name], ids=lambda e: e.name)
def test_fnuz_has_no_negative_zero(element: Element) -> None:
    """0x80 is NaN there, so nothing that rounds to zero may become it."""
    tiny = element.min_subnormal
    x = _with_unit_scale(np.array([-0.0, -tiny / 2, -tiny / 4, -1e-30, -tiny]), element)
    assert raw(quantize(x, Format(element, "tensorwise")).data)[0, :5].tolist() == [0, 0, 0, 0, 0x81]


@pytest.mark.parametrize("element", [E4M3FN, E5M2], ids=lambda e: e.name)
def test_ocp_keeps_negative_zero(element: Element) -> None:
    x = _with_unit_scale(np.array([-0.0, -element.min_subnormal / 4, 0.0]), element)
    assert raw(quantize(x, Format(element, "tensorwise")).data)[0, :3].tolist() == [0x80, 0x80, 0]


# ---- scales ------------------------------------------------------------------------------------------------


def _boundary_amax(element: Element) -> np.ndarray:
    """Magnitudes where scales change: powers of two, MAX and 'even' boundaries times powers, each +-1 ulp."""
    powers = np.ldexp(1.0, np.arange(-149, 128))
    steps = 2.0 ** -(element.mantissa_bits + 1)
    points = np.concatenate([powers * f for f in (1.0, element.max / 2**element.emax, 2 - steps, 1.5, 1.1)])
    with np.errstate(over="ignore"):
        points = points.astype(np.float32)
    points = np.concatenate(
        [points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(np.inf))]
    )
    rest = np.array([0.0, 1e-12, 9.99e-13, 1.01e-12, FLOAT_MAX, 1e-40], np.float32)
    return np.unique(np.concatenate([points[np.isfinite(points)], rest]))


@pytest.mark.parametrize("fmt", [f for f in FLOAT_FORMATS if f.granularity == "rowwise"], ids=str)
def test_float32_scales_on_boundaries(fmt: Format) -> None:
    amax = _boundary_amax(fmt.element)
    x = torch.tensor(np.stack([amax, -amax / 3, amax / 64, np.zeros_like(amax)], axis=1))
    q = assert_matches_oracle(x, fmt)
    if fmt.rounding == "power_of_two":
        assert (np.frexp(q.scale.numpy())[0] == 0.5).all()
        # Encode is rounded down, so nothing is clipped.
        top = q.scale.numpy()[:, 0].astype(np.float64) * fmt.element.max
        assert (top >= amax.astype(np.float64) * (1 - 2**-24)).all()


def test_float32_scale_is_a_true_division() -> None:
    amax = torch.rand(20000, generator=torch.Generator().manual_seed(0)) * 10 + 0.01
    for element in BYTE_ELEMENTS:
        encode = (np.float64(element.max) / amax.numpy().astype(np.float64)).astype(np.float32)
        decode = (1.0 / encode.astype(np.float64)).astype(np.float32)
        q = quantize(amax[:, None], Format(element, "rowwise"))
        np.testing.assert_array_equal(q.scale[:, 0].numpy(), decode)


@pytest.mark.parametrize("fmt", MX_FORMATS, ids=str)
def test_mx_scales_on_boundaries(fmt: Format) -> None:
    amax = _boundary_amax(fmt.element)
    rest = np.linspace(-0.97, 0.9, 31, dtype=np.float32)
    x = torch.tensor(np.hstack([amax[:, None], amax[:, None] * rest]))
    q = assert_matches_oracle(x, fmt)
    values = dequantize(q, torch.float32)
    assert not values.isnan().any()
    if fmt.rounding == "rceil":
        top = np.ldexp(fmt.element.max, raw(q.scale).numpy()[:, 0].astype(int) - 127)
        # Only where the quotient is subnormal can the division lose the bits that ask for the next power.
        assert (top >= amax * np.where(amax < 2.0**-110, 1 - 2.0**-16, 1)).all()


def test_every_e8m0_code_decodes() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    got = reference.decode_e8m0(every).double().numpy()
    expected = np.ldexp(1.0, np.arange(256) - 127)
    expected[255] = np.nan
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("element", [E4M3FN, E5M2, E2M1], ids=lambda e: e.name)
def test_every_reachable_e8m0_code_round_trips(element: Element) -> None:
    """Blocks whose amax is 2^emax times a scale: the data is that power, the code is the scale's own."""
    code = np.arange(255 - element.emax)
    x = torch.tensor(np.ldexp(1.0, code - 127 + element.emax).astype(np.float32))[:, None].repeat(1, 32)
    q = quantize(x, Format(element, "1x32", "floor"))
    np.testing.assert_array_equal(raw(q.scale).numpy()[:, 0], code)
    torch.testing.assert_close(dequantize(q), x, rtol=0, atol=0)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_zero_blocks(fmt: Format) -> None:
    q = assert_matches_oracle(torch.zeros(3, 256), fmt)
    assert dequantize(q).eq(0).all()
    assert raw(q.data).eq(0).all()
    assert canonical(q.scale).eq(0).all() if fmt.is_mx else q.scale.gt(0).all()


# ---- NaN, inf, subnormals ----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, -math.inf], ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_a_block_with_nan_or_inf_decodes_to_nan_throughout_and_no_other_does(
    fmt: Format, value: float
) -> None:
    x = torch.randn(260, 260, generator=torch.Generator().manual_seed(1))
    x[129, 200] = value
    q = assert_matches_oracle(x, fmt)
    height, width = (extent or 260 for extent in fmt.block)
    dead = torch.zeros_like(x, dtype=torch.bool)
    top, left = 129 // height * height, 200 // width * width
    dead[top : top + height, left : left + width] = True
    assert torch.equal(dequantize(q).isnan(), dead)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_subnormal_and_largest_inputs(fmt: Format, dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    tiny = info.smallest_normal
    x = torch.tensor([tiny, tiny / 2, -tiny / 8, tiny / 64, 0.0, -0.0], dtype=dtype).repeat(2, 11)
    assert_matches_oracle(x, fmt)
    big = torch.tensor([info.max, -info.max / 2, 1.0, -tiny, 0.0, 3.0], dtype=dtype).repeat(2, 11)
    q = assert_matches_oracle(big, fmt)
    assert not dequantize(q).isnan().any()


# ---- random matrices, dtypes, layouts ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_outlier_matrix_with_partial_blocks(fmt: Format, dtype: torch.dtype) -> None:
    assert_matches_oracle(outlier_matrix((150, 162), dtype=dtype), fmt)


@pytest.mark.parametrize(
    "shape", [(0, 0), (0, 64), (3, 0), (1, 2), (1, 130), (130, 2), (2, 0, 64), (0, 3, 64)], ids=str
)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_small_and_empty_shapes(fmt: Format, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    q = assert_matches_oracle(x, fmt) if len(shape) == 2 else quantize(x, fmt)
    assert q.shape == shape
    assert tuple(q.scale.shape) == fmt.scale_shape(shape)
    assert dequantize(q).shape == shape
    if shape[-2] % fmt.element.packed == 0:
        t = quantize(x, fmt, transpose=True)
        assert t.shape == x.mT.shape
        assert tuple(t.scale.shape) == fmt.scale_shape(x.mT.shape)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_leading_dimensions_keep_scales_of_their_own(fmt: Format) -> None:
    x = outlier_matrix((3, 2, 140, 66)) * torch.tensor([1.0, 100.0, 1e-3])[:, None, None, None]
    q, t = quantize(x, fmt), quantize(x, fmt, transpose=True)
    for i in range(3):
        for j in range(2):
            assert_same(ScaledTensor(q.data[i, j], q.scale[i, j], fmt), quantize(x[i, j], fmt))
            assert_same(ScaledTensor(t.data[i, j], t.scale[i, j], fmt), quantize(x[i, j].T.contiguous(), fmt))


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_results_use_no_uninitialised_memory(fmt: Format) -> None:
    x = outlier_matrix((130, 70))
    plain, plain_t = quantize(x, fmt), quantize(x, fmt, transpose=True)
    with poisoned_allocations():
        one, two = quantize_both(x, fmt)
    assert_same(one, plain)
    assert_same(two, plain_t)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_results_do_not_depend_on_the_default_dtype(dtype: torch.dtype) -> None:
    x = outlier_matrix((130, 70))
    expected = [(fmt, quantize(x, fmt), dequantize(quantize(x, fmt))) for fmt in FORMATS]
    torch.set_default_dtype(dtype)
    try:
        for fmt, q, values in expected:
            assert_same(quantize(x, fmt), q)
            got = dequantize(q)
            assert got.dtype == torch.float32
            assert torch.equal(raw(got), raw(values))
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_results_do_not_depend_on_autocast(fmt: Format) -> None:
    x = outlier_matrix((66, 70))
    q = quantize(x, fmt)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(quantize(x, fmt), q)
        values = dequantize(q)
    assert torch.equal(raw(values), raw(dequantize(q)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_dequantize_rounds_once(fmt: Format, dtype: torch.dtype) -> None:
    x = outlier_matrix((40, 130))
    q = quantize(x, fmt)
    scale = raw(q.scale).numpy() if fmt.is_mx else q.scale.numpy()
    exact = oracle.decode(codes(q), scale, fmt.element.name, fmt.granularity)
    # The product of an element (4 bits) and a float32 scale takes 28 bits: one rounding to float32, one more.
    expected = torch.from_numpy(exact.astype(np.float32)).to(dtype)
    assert torch.equal(raw(dequantize(q, dtype)), raw(expected))


# ---- errors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [quantize, quantize_both], ids=lambda f: f.__name__)
def test_errors_say_what_was_got_and_what_is_needed(call: Callable[..., object]) -> None:
    fmt = Format(E4M3FN, "rowwise")
    with pytest.raises(
        TypeError, match=r"takes float32, bfloat16 or float16 and got torch.float64: cast it first"
    ):
        call(torch.zeros(2, 2, dtype=torch.float64), fmt)
    with pytest.raises(TypeError, match=r"got torch.int32"):
        call(torch.zeros(2, 2, dtype=torch.int32), fmt)
    with pytest.raises(ValueError, match=r"takes \[..., M, K\] and got shape \(4,\): add a dimension"):
        call(torch.zeros(4), fmt)
    with pytest.raises(ValueError, match=r"got shape \(\)"):
        call(torch.zeros(()), fmt)


def test_dequantize_refuses_layouts_it_cannot_read() -> None:
    q = quantize(torch.ones(128, 128), MXFP8)
    swizzled = ScaledTensor(q.data, q.scale.flatten(), MXFP8, ScaleLayout.SWIZZLED_32_4_4)
    with pytest.raises(
        ValueError, match="swizzled_32_4_4 scales or padded groups: dequantize its plain form"
    ):
        dequantize(swizzled)


def test_dequantize_reads_m_major_scales() -> None:
    q = quantize(outlier_matrix((130, 300)), Format(E4M3FN, "1x128"))
    major = ScaledTensor(q.data, q.scale.T.contiguous().T, q.format, ScaleLayout.M_MAJOR)
    assert torch.equal(dequantize(major), dequantize(q))


# ---- against torchao ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounding", ["exact", "power_of_two"])
@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise", "columnwise"])
@pytest.mark.parametrize("element", [E4M3FN, E5M2, E4M3FNUZ], ids=lambda e: e.name)
def test_equal_to_torchao(element: Element, granularity: str, rounding: str) -> None:
    pytest.importorskip("torchao", reason="compares with torchao's dense casts where torchao is installed")
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

    for dtype in (torch.float32, torch.bfloat16):
        x = outlier_matrix((96, 260), dtype=dtype)
        x[5] = 0.0
        x[:, 7] = 0.0
        whole = granularity == "tensorwise"
        encode = tensor_to_scale(
            x,
            element.dtype,
            scaling_granularity=ScalingGranularity.TENSORWISE if whole else ScalingGranularity.AXISWISE,
            axiswise_dim={"tensorwise": None, "rowwise": -1, "columnwise": 0}[granularity],
            round_scales_to_power_of_2=rounding == "power_of_two",
        )
        q = quantize(x, Format(element, granularity, rounding))
        assert torch.equal(raw(q.data), raw(to_fp8_saturated(x.float() * encode, element.dtype)))
        assert torch.equal(q.scale.flatten(), encode.reciprocal().flatten())


# ---- on a GPU ----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_reference_on_a_gpu_equals_the_reference_on_the_cpu(fmt: Format) -> None:
    x = outlier_matrix((130, 162), dtype=torch.bfloat16)
    x[3, 5], x[80, 100] = math.nan, math.inf
    for transpose in (False, True):
        on_gpu = quantize(x.cuda(), fmt, transpose=transpose)
        assert_same(on_gpu, quantize(x, fmt, transpose=transpose))


def test_rowwise_keeps_25_db_on_outliers_and_tensorwise_loses_rows() -> None:
    x = outlier_matrix((512, 512))
    row, one = (dequantize(quantize(x, Format(E4M3FN, g))) for g in ("rowwise", "tensorwise"))
    assert sqnr(row, x) > 25
    assert worst_row_sqnr(row, x) > worst_row_sqnr(one, x)
