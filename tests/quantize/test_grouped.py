"""Quantization over groups of rows: each group as if it were alone, whatever lies beside or after it."""

from __future__ import annotations

import math

import pytest
import torch

from octavo import quantize, quantize_grouped, use_kernels
from octavo.formats import ALL, E4M3FN, E4M3FNUZ, MXFP4, MXFP8, Format, ScaledTensor
from octavo.quantize import alignment
from octavo.quantize.grouped import capacity, padded_ends
from octavo.testing import outlier_matrix, poisoned_allocations
from quantize_helpers import DTYPES, FORMATS, MX_FORMATS, assert_same, canonical, raw

SIZES = [[44, 20, 0, 64, 1], [0, 0, 0], [0, 7], [7, 0], [128, 256], [1], [0, 5, 0, 9, 0], [33] * 3]
BY_ROW = [f for f in FORMATS if f.block[0] == 1]
"""Formats whose blocks lie within a row."""
ACROSS_ROWS = [f for f in FORMATS if f.block[0] != 1]
ALONG_ROWS = [f for f in FORMATS if f.granularity in ("tensorwise", "rowwise", "1x128", "1x32", "128x128")]
"""Formats whose blocks in the transpose span columns, so that groups have to be kept apart."""


@pytest.fixture(autouse=True)
def _reference() -> object:
    with use_kernels(quantize="reference", quantize_grouped="reference"):
        yield


def _offs(sizes: list[int]) -> torch.Tensor:
    return torch.tensor(sizes, dtype=torch.int32).cumsum(0).to(torch.int32)


def _rows(
    sizes: list[int], tail: int = 5, columns: int = 66, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    return outlier_matrix((sum(sizes) + tail, columns), dtype=dtype)


def _bounds(ends: torch.Tensor) -> list[tuple[int, int]]:
    return list(zip([0, *ends.tolist()[:-1]], ends.tolist(), strict=True))


def _part(x: ScaledTensor, group: int, start: int, end: int) -> ScaledTensor:
    """Columns [start, end) of the padded layout as a tensor of its own."""
    packed, width = x.format.element.packed, x.format.block[1]
    data = x.data[:, start // packed : end // packed]
    scale = x.scale[group] if width == ALL else x.scale[:, start // width : -(-end // width)]
    return ScaledTensor(data, scale, x.format)


# ---- layout ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("align", [1, 3, 16, 32, 128])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_capacity_holds_every_padded_layout(sizes: list[int], align: int) -> None:
    ends = padded_ends(_offs(sizes), align).tolist()
    expected, total = [], 0
    for size in sizes:
        total += math.ceil(size / align) * align
        expected.append(total)
    assert ends == expected
    columns = capacity(sum(sizes), len(sizes), align)
    assert columns % align == 0
    assert ends[-1] <= columns < sum(sizes) + len(sizes) * (align - 1) + align
    assert padded_ends(_offs(sizes), align).dtype == torch.int32


def test_alignment_is_the_largest_block_and_at_least_16() -> None:
    assert alignment(Format(E4M3FN, "rowwise")) == 16
    assert alignment(MXFP8, Format(E4M3FN, "rowwise")) == 32
    assert alignment(MXFP8, Format(E4M3FN, "1x128")) == 128


# ---- rows --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f.granularity == "tensorwise"], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_tensorwise_means_one_scale_a_group(sizes: list[int], fmt: Format) -> None:
    x = _rows(sizes)
    q = quantize_grouped(x, _offs(sizes), fmt)
    assert q.format == Format(fmt.element, "rowwise", fmt.rounding)
    assert q.scale.shape == (x.shape[0], 1)
    for start, end in _bounds(_offs(sizes)):
        if start < end:
            alone = quantize(x[start:end], fmt)
            assert torch.equal(raw(q.data[start:end]), raw(alone.data))
            assert q.scale[start:end].eq(alone.scale).all()
    assert raw(q.data[sum(sizes) :]).eq(0).all()
    assert q.scale[sum(sizes) :].eq(1).all()


@pytest.mark.parametrize("fmt", BY_ROW, ids=str)
def test_formats_by_row_need_no_groups(fmt: Format) -> None:
    x = _rows([44, 20, 0, 64, 1])
    assert_same(quantize_grouped(x, _offs([44, 20, 0, 64, 1]), fmt), quantize(x, fmt))


@pytest.mark.parametrize("fmt", ACROSS_ROWS, ids=str)
def test_no_scale_is_shared_by_two_groups(fmt: Format) -> None:
    """A format whose blocks span rows keeps groups apart or is refused: never a scale over two groups."""
    x, offs = _rows([44, 20, 64], tail=0), _offs([44, 20, 64])
    other = x.clone()
    other[44:64] *= 1000
    try:
        one, two = quantize_grouped(x, offs, fmt), quantize_grouped(other, offs, fmt)
    except ValueError as error:
        assert fmt.granularity in str(error)  # noqa: PT017 - a refusal in words is one of two right answers
        return
    assert torch.equal(raw(one.data[:44]), raw(two.data[:44]))
    assert torch.equal(raw(one.data[64:]), raw(two.data[64:]))


# ---- the padded layout -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ALONG_ROWS, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_each_group_as_if_it_were_alone(sizes: list[int], fmt: Format) -> None:
    x = _rows(sizes)
    align = alignment(fmt)
    q = quantize_grouped(x, _offs(sizes), fmt, transpose=True)
    assert q.shape == (x.shape[1], capacity(x.shape[0], len(sizes), align))
    assert q.group_ends is not None
    padded = _bounds(q.group_ends)
    for group, ((start, end), (to, until)) in enumerate(zip(_bounds(_offs(sizes)), padded, strict=True)):
        spread = torch.zeros(until - to, x.shape[1])
        spread[: end - start] = x[start:end]
        assert_same(_part(q, group, to, until), quantize(spread, fmt, transpose=True))
    used = padded[-1][1]
    assert raw(q.data)[:, used // fmt.element.packed :].eq(0).all()


@pytest.mark.parametrize("granularity", ["columnwise", "128x1"])
def test_blocks_of_one_column_of_the_transpose_are_served_or_refused(granularity: str) -> None:
    """They lie within a row of ``x``, so no group is in their way."""
    x, sizes, fmt = _rows([20, 0, 33], columns=130), [20, 0, 33], Format(E4M3FN, granularity)
    try:
        q = quantize_grouped(x, _offs(sizes), fmt, transpose=True)
    except ValueError as error:
        assert granularity in str(error)  # noqa: PT017 - a refusal in words is one of two right answers
        return
    assert q.group_ends is not None
    for (start, end), (to, _) in zip(_bounds(_offs(sizes)), _bounds(q.group_ends), strict=True):
        alone = quantize(x[start:end], fmt, transpose=True)
        assert torch.equal(raw(q.data[:, to : to + end - start]), raw(alone.data))


@pytest.mark.parametrize("align", [16, 48, 128])
def test_alignment_can_be_chosen(align: int) -> None:
    sizes, fmt = [5, 0, 17], Format(E4M3FN, "rowwise")
    x = _rows(sizes)
    q = quantize_grouped(x, _offs(sizes), fmt, transpose=True, align=align)
    assert q.group_ends is not None
    assert q.group_ends.tolist() == padded_ends(_offs(sizes), align).tolist()
    assert q.shape[1] % align == 0
    assert torch.equal(raw(q.data[:, :5]), raw(quantize(x[:5], fmt, transpose=True).data))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", [Format(E4M3FN, "rowwise"), Format(E4M3FN, "1x128"), MXFP8, MXFP4], ids=str)
def test_dtypes_and_strides(fmt: Format, dtype: torch.dtype) -> None:
    sizes = [44, 20, 0, 64, 1]
    wide = _rows(sizes, columns=200, dtype=dtype)
    x = wide[:, 3:135:2]
    before = raw(wide).clone()
    for transpose in (False, True):
        q = quantize_grouped(x, _offs(sizes), fmt, transpose=transpose)
        assert_same(q, quantize_grouped(x.contiguous(), _offs(sizes), fmt, transpose=transpose))
        assert q.data.is_contiguous()
    turned = x.contiguous().t().contiguous().t()
    assert_same(quantize_grouped(turned, _offs(sizes), fmt, transpose=True), q)
    assert torch.equal(raw(wide), before)


# ---- what lies beside must not show ------------------------------------------------------------------------


@pytest.mark.case("B20")
@pytest.mark.parametrize("fmt", ALONG_ROWS, ids=str)
def test_B20_the_tail_never_leaks(fmt: Format) -> None:
    sizes = [3, 5]
    x = _rows(sizes, tail=4, columns=16)
    results = []
    for tail in (0.0, 7.0, math.nan, math.inf):
        x[8:] = tail
        results.append(quantize_grouped(x, _offs(sizes), fmt, transpose=True))
    for other in results[1:]:
        assert_same(other, results[0])
    assert not results[0].scale.float().isnan().any()
    if fmt.granularity == "tensorwise":
        assert quantize_grouped(x, _offs(sizes), fmt).scale.isfinite().all()


@pytest.mark.case("B21")
@pytest.mark.parametrize("fmt", ALONG_ROWS, ids=str)
def test_B21_changing_one_group_leaves_the_others(fmt: Format) -> None:
    sizes = [44, 20, 0, 64, 1]
    x, offs = _rows(sizes, tail=0, columns=64), _offs(sizes)
    other = x.clone()
    other[44:64] = math.nan
    one, two = (quantize_grouped(y, offs, fmt, transpose=True) for y in (x, other))
    assert one.group_ends is not None
    for group, (to, until) in enumerate(_bounds(one.group_ends)):
        if group != 1:
            assert_same(_part(two, group, to, until), _part(one, group, to, until))
    assert _part(two, 1, *_bounds(one.group_ends)[1]).scale.float().isnan().all()


@pytest.mark.parametrize("fmt", ALONG_ROWS, ids=str)
def test_results_use_no_uninitialised_memory(fmt: Format) -> None:
    sizes = [5, 0, 9, 0]
    x = _rows(sizes)
    for transpose in (False, True):
        if not transpose and fmt.granularity == "128x128":
            continue
        plain = quantize_grouped(x, _offs(sizes), fmt, transpose=transpose)
        with poisoned_allocations():
            assert_same(quantize_grouped(x, _offs(sizes), fmt, transpose=transpose), plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("fmt", [Format(E4M3FN, "tensorwise"), Format(E4M3FNUZ, "rowwise"), MXFP4], ids=str)
def test_results_do_not_depend_on_the_default_dtype(fmt: Format, dtype: torch.dtype) -> None:
    """Models are often built under ``torch.set_default_dtype(torch.bfloat16)``."""
    sizes = [5, 0, 9]
    x = _rows(sizes)
    expected = [quantize_grouped(x, _offs(sizes), fmt, transpose=t) for t in (False, True)]
    torch.set_default_dtype(dtype)
    try:
        for transpose, q in zip((False, True), expected, strict=True):
            assert_same(quantize_grouped(x, _offs(sizes), fmt, transpose=transpose), q)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("fmt", MX_FORMATS[:1] + ALONG_ROWS[:4], ids=str)
def test_no_rows_at_all(fmt: Format) -> None:
    q = quantize_grouped(torch.zeros(0, 6), _offs([0, 0]), fmt, transpose=True)
    assert q.group_ends is not None
    assert q.group_ends.tolist() == [0, 0]
    assert raw(q.data).eq(0).all()
    assert not canonical(q.scale).eq(255).any() if fmt.is_mx else q.scale.isfinite().all()


def test_no_groups_at_all() -> None:
    """A rank that holds no experts: nothing to do, and no error."""
    x, offs = torch.ones(4, 32), torch.zeros(0, dtype=torch.int32)
    for fmt in (Format(E4M3FN, "rowwise"), Format(E4M3FN, "tensorwise"), MXFP8):
        q = quantize_grouped(x, offs, fmt, transpose=True)
        assert q.group_ends is not None
        assert q.group_ends.shape == (0,)
        assert q.data.shape[0] == 32
        assert quantize_grouped(x, offs, fmt).shape == (4, 32)


# ---- errors ------------------------------------------------------------------------------------------------


def test_errors_say_what_was_got_and_what_is_needed() -> None:
    x, fmt, offs = torch.ones(8, 32), Format(E4M3FN, "rowwise"), _offs([3, 5])
    with pytest.raises(ValueError, match=r"grouped rows are a matrix \[M, K\]; got shape \(2, 4, 32\)"):
        quantize_grouped(x.view(2, 4, 32), offs, fmt)
    with pytest.raises(
        ValueError, match=r"offs must be cumulative group ends, int32 .* got torch.int64 \(2,\)"
    ):
        quantize_grouped(x, offs.long(), fmt)
    with pytest.raises(ValueError, match=r"got torch.int32 \(1, 2\)"):
        quantize_grouped(x, offs[None], fmt)
    with pytest.raises(
        ValueError,
        match=r"align=48 must be a positive multiple of 16 and of the 32-wide blocks of e4m3fn:1x32:rceil",
    ):
        quantize_grouped(x, offs, MXFP8, transpose=True, align=48)
    with pytest.raises(TypeError, match=r"got torch\.float64"):
        quantize_grouped(x.double(), offs, fmt)


@pytest.mark.parametrize("align", [0, -16])
@pytest.mark.parametrize("fmt", [Format(E4M3FN, "rowwise"), MXFP8], ids=str)
def test_an_alignment_that_is_no_size_is_refused(fmt: Format, align: int) -> None:
    with pytest.raises(ValueError, match=f"align={align}"):
        quantize_grouped(torch.ones(8, 32), _offs([3, 5]), fmt, transpose=True, align=align)


@pytest.mark.parametrize("ends", [[5, 3], [3, 9], [-1, 4]], ids=str)
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("fmt", [Format(E4M3FN, "rowwise"), Format(E4M3FN, "tensorwise")], ids=str)
def test_group_ends_that_do_not_fit_are_refused_on_the_cpu(
    fmt: Format, transpose: bool, ends: list[int]
) -> None:
    offs = torch.tensor(ends, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"offs must not decrease nor pass the 8 rows; got \["):
        quantize_grouped(torch.ones(8, 32), offs, fmt, transpose=transpose)
