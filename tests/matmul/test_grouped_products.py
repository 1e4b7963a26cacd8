"""Grouped products, scaled and plain: against one product a group, at the edges, and under public reports."""

from __future__ import annotations

import math

import pytest
import torch

from octavo import dispatch, quantize, quantize_grouped, scaled_grouped_mm, scaled_mm, use_kernels
from octavo.formats import E4M3FN, E4M3FNUZ, E5M2, MXFP4, MXFP8, Format, ScaledTensor
from octavo.hardware import native_format
from octavo.matmul import grouped_mm
from octavo.quantize import alignment
from octavo.testing import outlier_matrix, poisoned_allocations, sqnr
from product_helpers import DEVICES, serving, to

ROW, ONE = Format(E4M3FN, "rowwise"), Format(E4M3FN, "tensorwise")
BLOCK, SQUARE = Format(E4M3FN, "1x128"), Format(E4M3FN, "128x128")
SIZES = [[44, 20, 0, 64, 1], [5, 0, 9, 0], [0, 0, 0, 0], [17], [1, 1, 1], [0, 33]]
ROWS_PAIRS = [
    (ROW, ROW),
    (ONE, ONE),
    (Format(E5M2, "rowwise", "power_of_two"), Format(E4M3FN, "rowwise", "power_of_two")),
    (Format(E4M3FNUZ, "rowwise"), Format(E4M3FNUZ, "tensorwise")),
    (BLOCK, SQUARE),
    (MXFP8, MXFP8),
    (MXFP4, MXFP4),
]
OVER_PAIRS = [
    (ROW, ROW),
    (ONE, ONE),
    (Format(E5M2, "tensorwise"), ONE),
    (ROW, ONE),
    (BLOCK, BLOCK),
    (MXFP8, MXFP8),
    (MXFP4, MXFP8),
]


def _offs(sizes: list[int]) -> torch.Tensor:
    return torch.tensor(sizes, dtype=torch.int32).cumsum(0).to(torch.int32)


def _bounds(sizes: list[int]) -> list[tuple[int, int]]:
    ends = _offs(sizes).tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _by_rows(
    sizes: list[int], a: Format, b: Format, n: int = 48, k: int = 66, tail: int = 3
) -> tuple[ScaledTensor, ScaledTensor, torch.Tensor]:
    x, w = outlier_matrix((sum(sizes) + tail, k)), outlier_matrix((len(sizes), n, k), seed=1)
    return quantize_grouped(x, _offs(sizes), a), quantize(w, b), _offs(sizes)


def _over_groups(
    sizes: list[int], a: Format, b: Format, n: int = 48, k: int = 32, tail: int = 3
) -> tuple[ScaledTensor, ScaledTensor, torch.Tensor, torch.Tensor]:
    tail += (sum(sizes) + tail) % max(a.element.packed, b.element.packed)
    g, x = outlier_matrix((sum(sizes) + tail, n), seed=2), outlier_matrix((sum(sizes) + tail, k), seed=3)
    align = alignment(a, b)
    left, right = (
        quantize_grouped(y, _offs(sizes), f, transpose=True, align=align) for y, f in ((g, a), (x, b))
    )
    return left, right, g, x


def _rows_of(x: ScaledTensor, start: int, end: int) -> ScaledTensor:
    scale = x.scale if x.scale.shape[0] == 1 else x.scale[start:end]
    return ScaledTensor(x.data[start:end], scale, x.format)


def _expert(x: ScaledTensor, index: int) -> ScaledTensor:
    return ScaledTensor(x.data[index], x.scale[index], x.format)


# ---- rows by expert ----------------------------------------------------------------------------------------


@pytest.mark.case("B21")
@pytest.mark.parametrize(("a", "b"), ROWS_PAIRS, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_B21_rows_by_expert_equal_one_product_an_expert(sizes: list[int], a: Format, b: Format) -> None:
    left, right, offs = _by_rows(sizes, a, b)
    bias = torch.randn(len(sizes), 48, generator=torch.Generator().manual_seed(4))
    for extra in (None, bias):
        with poisoned_allocations():
            out = scaled_grouped_mm(left, right, offs, bias=extra, out_dtype=torch.float32)
        assert out.shape == (left.shape[0], 48)
        for group, (start, end) in enumerate(_bounds(sizes)):
            row_bias = None if extra is None else extra[group]
            alone = scaled_mm(
                _rows_of(left, start, end), _expert(right, group), bias=row_bias, out_dtype=torch.float32
            )
            assert sqnr(out[start:end], alone) > 110
        assert out[sum(sizes) :].eq(0).all()
        rounded = None if extra is None else extra.bfloat16()
        assert sqnr(scaled_grouped_mm(left, right, offs, bias=rounded), out) > 45


@pytest.mark.case("B20")
@pytest.mark.parametrize(("a", "b"), ROWS_PAIRS, ids=str)
def test_B20_rows_past_the_last_offset_are_zero_whatever_they_hold(a: Format, b: Format) -> None:
    x, w = outlier_matrix((12, 16)), outlier_matrix((2, 24, 16), seed=1)
    offs = torch.tensor([3, 8], dtype=torch.int32)
    results = []
    for tail in (0.0, math.nan, math.inf):
        x[8:] = tail
        results.append(scaled_grouped_mm(quantize_grouped(x, offs, a), quantize(w, b), offs))
        assert results[-1][8:].eq(0).all()
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.case("B19")
@pytest.mark.parametrize(("a", "b"), [(ROW, ROW), (BLOCK, SQUARE), (MXFP8, MXFP8)], ids=str)
def test_B19_no_expert_gets_any_token(a: Format, b: Format) -> None:
    offs = torch.zeros(4, dtype=torch.int32)
    x, w = torch.zeros(0, 256), torch.randn(4, 224, 256)
    with poisoned_allocations():
        out = scaled_grouped_mm(quantize_grouped(x, offs, a), quantize(w, b), offs)
        assert (out.shape, out.dtype) == ((0, 224), torch.bfloat16)
        over_a, over_b = a if a.block[0] == 1 else BLOCK, b if b.block[0] == 1 else BLOCK
        align = alignment(over_a, over_b)
        left = quantize_grouped(torch.zeros(0, 224), offs, over_a, transpose=True, align=align)
        right = quantize_grouped(x, offs, over_b, transpose=True, align=align)
        grad = scaled_grouped_mm(left, right)
    assert grad.shape == (4, 224, 256)
    assert grad.eq(0).all()


@pytest.mark.case("B22")
@pytest.mark.parametrize("rows", [1, 8, 16, 32, 64, 128])
def test_B22_small_groups_of_blockwise_experts(rows: int) -> None:
    sizes = [rows, max(rows // 2, 1), rows, 1]
    left, right, offs = _by_rows(sizes, BLOCK, SQUARE, n=256, k=512, tail=0)
    out = scaled_grouped_mm(left, right, offs, out_dtype=torch.float32)
    for group, (start, end) in enumerate(_bounds(sizes)):
        alone = scaled_mm(_rows_of(left, start, end), _expert(right, group), out_dtype=torch.float32)
        assert sqnr(out[start:end], alone) > 110


# ---- over groups -------------------------------------------------------------------------------------------


@pytest.mark.case("B18")
@pytest.mark.parametrize(("a", "b"), OVER_PAIRS, ids=str)
@pytest.mark.parametrize("sizes", [*SIZES, [162, 0, 257, 46, 0, 83]], ids=str)
def test_B18_over_groups_equals_one_product_a_group_and_empty_groups_are_zero(
    sizes: list[int], a: Format, b: Format
) -> None:
    left, right, g, x = _over_groups(sizes, a, b)
    with poisoned_allocations():
        out = scaled_grouped_mm(left, right, out_dtype=torch.float32)
    assert out.shape == (len(sizes), 48, 32)
    align = alignment(a, b)
    for group, (start, end) in enumerate(_bounds(sizes)):
        if start == end:
            assert out[group].eq(0).all()
            continue
        padded = [torch.zeros(-(-(end - start) // align) * align, y.shape[1]) for y in (g, x)]
        for target, source in zip(padded, (g, x), strict=True):
            target[: end - start] = source[start:end]
        alone = scaled_mm(
            quantize(padded[0], a, transpose=True),
            quantize(padded[1], b, transpose=True),
            out_dtype=torch.float32,
        )
        assert sqnr(out[group], alone) > 110
    assert torch.equal(scaled_grouped_mm(left, right), out.bfloat16())
    assert torch.equal(scaled_grouped_mm(left, right, left.group_ends), out.bfloat16())


@pytest.mark.case("B20")
@pytest.mark.parametrize(("a", "b"), OVER_PAIRS[:-1], ids=str)
def test_B20_the_tail_does_not_reach_the_sums_over_groups(a: Format, b: Format) -> None:
    sizes, offs = [3, 5], _offs([3, 5])
    g, x = outlier_matrix((12, 24)), outlier_matrix((12, 16), seed=1)
    results = []
    for tail in (0.0, math.nan):
        g[8:], x[8:] = tail, tail
        align = alignment(a, b)
        parts = [quantize_grouped(y, offs, f, transpose=True, align=align) for y, f in ((g, a), (x, b))]
        results.append(scaled_grouped_mm(*parts))
    assert results[0].isfinite().all()
    assert torch.equal(results[0], results[1])
    assert len(sizes) == results[0].shape[0]


def test_no_groups_at_all() -> None:
    """A rank that holds no experts gets empty results, not an error."""
    offs = torch.zeros(0, dtype=torch.int32)
    x = torch.ones(4, 32)
    out = scaled_grouped_mm(quantize(x, ROW), quantize(torch.ones(0, 16, 32), ROW), offs)
    assert out.shape == (4, 16)
    assert out.eq(0).all()
    assert grouped_mm(x, torch.ones(0, 16, 32), offs).eq(0).all()
    assert grouped_mm(torch.ones(8, 4), torch.ones(6, 4), offs).shape == (0, 8, 6)


def test_autocast_does_not_change_grouped_products() -> None:
    left, right, offs = _by_rows([5, 0, 9], ROW, ROW)
    over = _over_groups([5, 0, 9], ROW, ROW)[:2]
    expected = scaled_grouped_mm(left, right, offs, out_dtype=torch.float32)
    expected_over = scaled_grouped_mm(*over, out_dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(scaled_grouped_mm(left, right, offs, out_dtype=torch.float32), expected)
        assert torch.equal(scaled_grouped_mm(*over, out_dtype=torch.float32), expected_over)


@pytest.mark.case("B10")
@pytest.mark.parametrize("fmt", [ROW, BLOCK, MXFP8, MXFP4], ids=str)
def test_B10_deterministic_mode(fmt: Format) -> None:
    left, right, offs = _by_rows([44, 20, 0, 64, 1], fmt, fmt)
    expected = scaled_grouped_mm(left, right, offs)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(scaled_grouped_mm(left, right, offs), expected)
        over = _over_groups([44, 20, 0, 63, 1], fmt, fmt)[:2]
        assert torch.equal(scaled_grouped_mm(*over), scaled_grouped_mm(*over))
    finally:
        torch.use_deterministic_algorithms(False)


# ---- every kernel against the reference --------------------------------------------------------------------

KERNELS = [k.name for k in dispatch.kernels("scaled_grouped_mm") if k.name != "reference"]
PLAIN_KERNELS = [k.name for k in dispatch.kernels("grouped_mm") if k.name != "reference"]
GROUPS = [[44, 20, 0, 64, 1], [128, 256, 0, 16], [0, 0, 33], [1], [0, 0]]


@pytest.mark.parametrize("form", ["rows", "over"])
@pytest.mark.parametrize(
    "pair", range(len(OVER_PAIRS)), ids=lambda i: f"{OVER_PAIRS[i][0]}-{OVER_PAIRS[i][1]}"
)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("device", DEVICES)
def test_every_scaled_kernel_is_within_50_db_of_the_reference(
    device: str, kernel: str, pair: int, form: str
) -> None:
    a, b = (native_format(f, device) for f in (ROWS_PAIRS[pair] if form == "rows" else OVER_PAIRS[pair]))
    served, reason = 0, None
    for sizes in GROUPS:
        for n, k in ((256, 512), (48, 66), (16, 16)):
            if form == "rows":
                left, right, offs = _by_rows(sizes, a, b, n, k)
            else:
                left, right = _over_groups(sizes, a, b, n, k)[:2]
                assert left.group_ends is not None
                offs = left.group_ends
            left, right, offs = to(left, device), to(right, device), offs.to(device)
            reason = serving("scaled_grouped_mm", kernel, left, right, offs, None, torch.bfloat16, False)
            if reason:
                continue
            served += 1
            with use_kernels(scaled_grouped_mm="reference"):
                expected = scaled_grouped_mm(left, right, offs)
            with use_kernels(scaled_grouped_mm=kernel):
                got = scaled_grouped_mm(left, right, offs)
            assert sqnr(got, expected) >= 50, (sizes, n, k)
            assert got[expected == 0].eq(0).all(), (sizes, n, k)
    if not served:
        pytest.skip(f"{kernel} serves none of these on {device}: {reason}")


@pytest.mark.parametrize("form", ["rows", "over"])
@pytest.mark.parametrize("kernel", PLAIN_KERNELS)
@pytest.mark.parametrize("device", DEVICES)
def test_every_plain_kernel_is_within_50_db_of_the_reference(device: str, kernel: str, form: str) -> None:
    """Group sizes are any numbers: what a kernel cannot take, its ``why_not`` has to say."""
    served, reason = 0, None
    for sizes in GROUPS:
        for n, k in ((256, 512), (48, 64), (24, 66)):
            rows = -(-(sum(sizes) + 3) // 8) * 8
            x = outlier_matrix((rows, k), dtype=torch.bfloat16, device=device)
            w = outlier_matrix((len(sizes), n, k), seed=1, dtype=torch.bfloat16, device=device)
            g = outlier_matrix((rows, n), seed=2, dtype=torch.bfloat16, device=device)
            a, b = (x, w) if form == "rows" else (g.t(), x.t())
            offs = _offs(sizes).to(device)
            reason = serving("grouped_mm", kernel, a, b, offs, None)
            if reason:
                continue
            served += 1
            with use_kernels(grouped_mm="reference"):
                expected = grouped_mm(a.float(), b.float(), offs)
            with use_kernels(grouped_mm=kernel):
                got = grouped_mm(a, b, offs)
            assert sqnr(got, expected) >= 50, (sizes, n, k)
    if not served:
        pytest.skip(f"{kernel} serves none of these on {device}: {reason}")


# ---- plain products ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_grouped_mm_equals_one_product_a_group(sizes: list[int], dtype: torch.dtype) -> None:
    rows = sum(sizes) + 3
    x, w = outlier_matrix((rows, 20), dtype=dtype), outlier_matrix((len(sizes), 12, 20), seed=1, dtype=dtype)
    bias = torch.randn(len(sizes), 12, generator=torch.Generator().manual_seed(6), dtype=torch.float64).to(
        dtype
    )
    g = outlier_matrix((rows, 12), seed=2, dtype=dtype)
    x[sum(sizes) :], g[sum(sizes) :] = math.nan, math.nan
    floor = {torch.bfloat16: 45, torch.float32: 110, torch.float64: 250}[dtype]
    for extra in (None, bias):
        out = grouped_mm(x, w, _offs(sizes), bias=extra)
        assert out.dtype == dtype
        assert out[sum(sizes) :].eq(0).all()
        for group, (start, end) in enumerate(_bounds(sizes)):
            alone = x[start:end].double() @ w[group].double().T
            assert sqnr(out[start:end], alone if extra is None else alone + extra[group].double()) > floor
    over = grouped_mm(g.t(), x.t(), _offs(sizes))
    for group, (start, end) in enumerate(_bounds(sizes)):
        assert sqnr(over[group], g[start:end].double().T @ x[start:end].double()) > floor


def test_no_bias_is_dropped() -> None:
    """A bias has no meaning in a sum over groups: it is refused there, never ignored."""
    offs = _offs([3, 5])
    with pytest.raises(ValueError, match="bias"):
        grouped_mm(torch.ones(6, 8), torch.ones(4, 8), offs, bias=torch.ones(2, 6))


@pytest.mark.parametrize("shape", [(12,), (2,), (2, 1), (1, 12), (3, 12)], ids=str)
def test_a_bias_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    x, w, offs = torch.ones(8, 20), torch.ones(2, 12, 20), _offs([3, 5])
    with pytest.raises(ValueError, match="bias"):
        grouped_mm(x, w, offs, bias=torch.ones(shape))
    with pytest.raises(ValueError, match=r"bias must be \(2, 12\)"):
        scaled_grouped_mm(
            quantize(x, ROW), quantize(w, ROW), offs, bias=torch.ones(shape), out_dtype=torch.float32
        )


# ---- errors ------------------------------------------------------------------------------------------------


def test_errors_say_what_was_got_and_what_is_needed() -> None:
    x, w, offs = quantize(torch.ones(8, 32), ROW), quantize(torch.ones(2, 12, 32), ROW), _offs([3, 5])
    with pytest.raises(
        ValueError, match=r"b\[G, N, K\] and offs\[G\], the cumulative group ends; got .* offs None"
    ):
        scaled_grouped_mm(x, w)
    with pytest.raises(
        ValueError, match=r"both operands must come from\s+quantize_grouped\(..., transpose=True\)"
    ):
        scaled_grouped_mm(x, x, offs)
    with pytest.raises(ValueError, match=r"got a \(8, 32\), b \(2, 12, 32\), offs \(3,\)"):
        scaled_grouped_mm(x, w, _offs([3, 5, 0]))
    with pytest.raises(ValueError, match=r"got a \(8, 64\), b \(2, 12, 32\)"):
        scaled_grouped_mm(quantize(torch.ones(8, 64), ROW), w, offs)
    with pytest.raises(ValueError, match=r"int32 \[G\] on cpu; got torch\.int64"):
        scaled_grouped_mm(x, w, offs.long())
    with pytest.raises(ValueError, match=r"a\[M, K\], b\[G, N, K\] or a\[N, M\], b\[K, M\] of one dtype"):
        grouped_mm(torch.ones(8, 32), torch.ones(2, 12, 32, dtype=torch.bfloat16), offs)
    with pytest.raises(ValueError, match=r"got a \(8, 32\) torch\.float32, b \(3, 12, 32\)"):
        grouped_mm(torch.ones(8, 32), torch.ones(3, 12, 32), offs)


@pytest.mark.parametrize("shape", [(1, 2, 12, 32), (32,)], ids=str)
def test_weights_of_other_ranks_are_refused(shape: tuple[int, ...]) -> None:
    x = quantize(torch.ones(8, 32), ROW)
    w = ScaledTensor(torch.ones(shape).to(torch.float8_e4m3fn), torch.ones(*shape[:-1], 1), ROW)
    with pytest.raises(ValueError, match=r"b\[G, N, K\]"):
        scaled_grouped_mm(x, w, torch.tensor([8], dtype=torch.int32))


@pytest.mark.parametrize("ends", [[5, 3], [3, 9], [-1, 4]], ids=str)
def test_group_ends_that_do_not_fit_are_refused_on_the_cpu(ends: list[int]) -> None:
    """As quantize_grouped does: rows would be counted twice, or the last ones left out, without a word."""
    x, w, offs = torch.ones(8, 32), torch.ones(2, 12, 32), torch.tensor(ends, dtype=torch.int32)
    with pytest.raises(ValueError, match="offs must not decrease"):
        scaled_grouped_mm(quantize(x, ROW), quantize(w, ROW), offs)
    with pytest.raises(ValueError, match="offs must not decrease"):
        grouped_mm(x, w, offs)


def test_padded_groups_are_refused_as_rows_by_expert() -> None:
    offs = _offs([5, 4])
    padded = quantize_grouped(torch.ones(9, 32), offs, ROW, transpose=True)
    w = quantize(torch.ones(2, 12, padded.shape[1]), ROW)
    with pytest.raises(ValueError, match="group"):
        scaled_grouped_mm(padded, w, offs)


def test_ends_of_unpadded_groups_are_refused_over_groups() -> None:
    """The offsets of the rows are not the ends of the padded layout; on the CPU the difference can be seen."""
    left, right, _, _ = _over_groups([5, 9], MXFP8, MXFP8)
    with pytest.raises(ValueError, match=r"offs|group_ends"):
        scaled_grouped_mm(left, right, _offs([5, 9]))
