"""Properties of quantization over shapes, strides, dtypes and formats, and the ops seen by torch.library."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import numerics_oracle as oracle
from octavo import dequantize, quantize, quantize_both, quantize_grouped, use_kernels
from octavo.formats import E4M3FN, E5M2FNUZ, MXFP4, MXFP8, Format
from octavo.quantize import reference
from octavo.testing import poisoned_allocations
from quantize_helpers import DTYPES, FORMATS, assert_matches_oracle, assert_same, raw


@pytest.fixture(autouse=True, scope="module")
def _reference() -> object:
    with use_kernels(quantize="reference", quantize_both="reference", quantize_grouped="reference"):
        yield


formats = st.sampled_from(FORMATS)
sizes = st.one_of(st.sampled_from([0, 1, 2, 3, 17, 31, 32, 33, 127, 128, 129]), st.integers(0, 200))
exponents = st.integers(-20, 20)


@st.composite
def matrices(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = DTYPES) -> torch.Tensor:
    """A matrix of any size, dtype and strides, over many orders of magnitude, at times with special values."""
    rows, cols = draw(sizes), draw(sizes)
    dtype = draw(st.sampled_from(dtypes))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    step_r, step_c = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    spread = draw(st.sampled_from([0.0, 1.0, 4.0]))
    values = rng.standard_normal((rows * step_r, cols * step_c)) * np.exp(
        spread * rng.standard_normal((rows * step_r, cols * step_c))
    )
    if draw(st.booleans()) and values.size:
        values.flat[rng.integers(values.size, size=3)] = draw(
            st.sampled_from([0.0, -0.0, 1e-40, 3e38, math.nan, math.inf, -math.inf])
        )
    x = torch.tensor(values, dtype=torch.float32).to(dtype)[::step_r, ::step_c]
    return x.T.contiguous().T if draw(st.booleans()) else x


def _fit(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Without the odd row and column that a packed format refuses."""
    packed = fmt.element.packed
    return x[: x.shape[0] // packed * packed, : x.shape[1] // packed * packed]


@given(matrices(), formats)
def test_codes_and_scales_are_those_of_the_contract(x: torch.Tensor, fmt: Format) -> None:
    assert_matches_oracle(_fit(x, fmt), fmt)


@given(matrices(), formats)
def test_transpose_is_the_transpose(x: torch.Tensor, fmt: Format) -> None:
    x = _fit(x, fmt)
    assert_same(quantize(x, fmt, transpose=True), quantize(x.T.contiguous(), fmt))


@given(matrices(), formats, formats)
def test_both_are_two_calls(x: torch.Tensor, fmt: Format, transposed: Format) -> None:
    x = _fit(_fit(x, fmt), transposed)
    before = raw(x).clone()
    with poisoned_allocations():
        one, two = quantize_both(x, fmt, transposed)
    assert_same(one, quantize(x, fmt))
    assert_same(two, quantize(x, transposed, transpose=True))
    assert torch.equal(raw(x), before)


@given(matrices(), formats)
def test_error_is_at_most_half_a_step(x: torch.Tensor, fmt: Format) -> None:
    """Half an ulp of the element relative to it, or half its subnormal step, in units of the scale.

    A scale rounded to float32 adds 2^-22 relative; MX rounding may clip, down to MAX / 2^(emax + 1) of amax.
    """
    assume(bool(x.isfinite().all()) and (not x.numel() or float(x.float().abs().max()) < 1e37))
    x = _fit(x, fmt)
    q = quantize(x, fmt)
    error = (dequantize(q).double() - x.double()).abs().numpy()
    scale = reference.decode_e8m0(q.scale) if fmt.is_mx else q.scale
    unit = oracle.spread(scale.numpy().astype(np.float64), tuple(x.shape), fmt.granularity)
    magnitude = x.double().abs().numpy()
    clip = np.maximum(magnitude - unit * fmt.element.max, 0.0)
    if fmt.rounding in ("exact", "power_of_two", "rceil"):
        assert (clip <= magnitude * 2.0**-20 + 2.0**-140).all()
    half_ulp = magnitude * 2.0 ** -(fmt.element.mantissa_bits + 1)
    bound = np.maximum(half_ulp, unit * fmt.element.min_subnormal / 2) + clip
    assert (error <= bound * (1 + 2.0**-20) + magnitude * 2.0**-22 + 2.0**-140).all()


@given(matrices((torch.float32,)), formats, exponents)
def test_powers_of_two_scale_the_scale_alone(x: torch.Tensor, fmt: Format, exponent: int) -> None:
    x = _fit(x, fmt)
    magnitude = x.abs()[x.isfinite() & (x != 0)]
    assume(not magnitude.numel() or (float(magnitude.min()) > 1e-20 and float(magnitude.max()) < 1e20))
    amax = reference.block_amax(x, fmt.block)
    assume(fmt.is_mx or bool((amax > 1e-5).logical_or(amax.isnan()).all()))
    assume(not fmt.is_mx or bool((amax > 0).logical_or(amax.isnan()).all()))
    one, other = quantize(x, fmt), quantize(x * 2.0**exponent, fmt)
    assert torch.equal(raw(one.data), raw(other.data))
    a, b = one.scale.float(), other.scale.float()
    torch.testing.assert_close(b, a * 2.0**exponent, rtol=0, atol=0, equal_nan=True)


@given(matrices(), st.sampled_from([f for f in FORMATS if f.rounding != "exact"]))
def test_quantizing_the_decoded_values_changes_nothing(x: torch.Tensor, fmt: Format) -> None:
    """With powers of two as scales, decoded values are representable: a second pass must keep them."""
    assume(bool(x.isfinite().all()) and (not x.numel() or float(x.float().abs().max()) < 1e37))
    once = dequantize(quantize(_fit(x, fmt), fmt))
    assume(not once.numel() or float(once[once != 0].abs().min() if once.any() else 1) > 1e-30)
    twice = dequantize(quantize(once, fmt))
    if fmt.rounding in ("power_of_two", "rceil"):
        assert torch.equal(once, twice)
    else:
        assert (twice.abs() <= once.abs()).all()


@given(st.integers(0, 8), st.integers(0, 70), st.integers(0, 2**32 - 1))
def test_packing_is_invertible(rows: int, columns: int, seed: int) -> None:
    data = torch.randint(
        0, 256, (rows, columns), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8
    )
    packed = data.view(torch.float4_e2m1fn_x2)
    assert torch.equal(raw(reference.pack_e2m1(reference.unpack_e2m1(packed))), data)


@given(
    st.lists(st.integers(0, 70), min_size=1, max_size=6),
    st.integers(0, 9),
    st.integers(1, 40),
    st.sampled_from([f for f in FORMATS if f.granularity in ("tensorwise", "rowwise", "1x128", "1x32")]),
)
def test_groups_are_quantized_alone(group_sizes: list[int], tail: int, columns: int, fmt: Format) -> None:
    tail += (sum(group_sizes) + tail) % fmt.element.packed
    x = torch.randn(sum(group_sizes) + tail, columns, generator=torch.Generator().manual_seed(columns))
    x[sum(group_sizes) :] = math.nan
    offs = torch.tensor(group_sizes).cumsum(0).to(torch.int32)
    with poisoned_allocations():
        q = quantize_grouped(x, offs, fmt, transpose=True)
    assert q.group_ends is not None
    start = 0
    for to, size in zip([0, *q.group_ends.tolist()], group_sizes, strict=False):
        padded = torch.zeros(-(-size // fmt.element.packed) * fmt.element.packed, columns)
        padded[:size] = x[start : start + size]
        alone = quantize(padded, fmt, transpose=True)
        first = to // fmt.element.packed
        got = raw(q.data)[:, first : first + alone.data.shape[1]]
        assert torch.equal(got, raw(alone.data))
        start += size


# ---- torch.library -----------------------------------------------------------------------------------------

OPCHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
OP_FORMATS = [
    Format(E4M3FN, "tensorwise"),
    Format(E5M2FNUZ, "1x128"),
    Format(E4M3FN, "128x128"),
    MXFP8,
    MXFP4,
]


def _inputs() -> list[torch.Tensor]:
    x = torch.randn(34, 132, generator=torch.Generator().manual_seed(0))
    return [x[:, ::2], x.bfloat16().t()]


def _opcheck(op: Any, *args: object) -> None:
    torch.library.opcheck(op.default, args, test_utils=OPCHECKS)


@pytest.mark.parametrize("fmt", OP_FORMATS, ids=str)
def test_opcheck_quantize(fmt: Format) -> None:
    op, (strided, transposed) = torch.ops.octavo.quantize, _inputs()
    _opcheck(op, strided, fmt.key, True)
    _opcheck(op, transposed, fmt.key, False)
    if fmt is OP_FORMATS[0]:
        _opcheck(op, torch.zeros(0, 4), fmt.key, False)
        _opcheck(op, torch.ones(2, 3, 4), fmt.key, True)


def test_opcheck_quantize_both() -> None:
    for x, fmt in zip(_inputs(), OP_FORMATS[1:3], strict=True):
        _opcheck(torch.ops.octavo.quantize_both, x, fmt.key, MXFP8.key)


@pytest.mark.parametrize("fmt", [*OP_FORMATS[:2], MXFP4], ids=str)
def test_opcheck_quantize_groups(fmt: Format) -> None:
    offs, op = torch.tensor([5, 5, 30], dtype=torch.int32), torch.ops.octavo.quantize_groups
    _opcheck(op, _inputs()[0], offs, fmt.key, True, 128)
    if fmt.granularity == "tensorwise":
        _opcheck(op, _inputs()[1], offs, fmt.key, False, 1)


def test_meta_tensors_keep_shapes_and_dtypes() -> None:
    x = torch.empty(3, 40, 66, device="meta", dtype=torch.bfloat16)
    for fmt in FORMATS:
        real = quantize(torch.zeros(3, 40, 66), fmt)
        meta = quantize(x, fmt)
        assert (meta.data.shape, meta.data.dtype) == (real.data.shape, real.data.dtype)
        assert (meta.scale.shape, meta.scale.dtype) == (real.scale.shape, real.scale.dtype)
        assert meta.device.type == "meta"


@pytest.mark.parametrize("fmt", [FORMATS[2], MXFP8, MXFP4], ids=str)
def test_new_sizes_do_not_compile_again(fmt: Format) -> None:
    graphs = 0

    def backend(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> object:
        nonlocal graphs
        graphs += 1
        return graph.forward

    torch._dynamo.reset()

    @torch.compile(backend=backend, fullgraph=True, dynamic=True)
    def values(x: torch.Tensor) -> torch.Tensor:
        return dequantize(quantize(x, fmt))

    for rows in (4, 6, 20, 34, 130):
        x = torch.randn(rows, 64)
        assert torch.equal(raw(values(x)), raw(dequantize(quantize(x, fmt))))
    assert graphs <= 2


def test_quantized_data_carries_no_gradient() -> None:
    """Gradients belong to the Functions above: an FP8 tensor that asks for one would keep the graph alive."""
    weight = torch.nn.Parameter(torch.randn(32, 32))
    q, t = quantize_both(weight, MXFP8)
    for tensor in (q.data, q.scale, t.data, t.scale, quantize(weight, MXFP8).data):
        assert not tensor.requires_grad
