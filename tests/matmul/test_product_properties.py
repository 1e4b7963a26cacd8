"""Properties of products over shapes, strides, dtypes and formats, and the ops seen by torch.library."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo import quantize, quantize_grouped, scaled_grouped_mm, scaled_mm
from octavo.formats import E4M3FN, E5M2, MXFP4, MXFP8, Format
from octavo.matmul import grouped_mm
from octavo.quantize import alignment
from octavo.testing import outlier_matrix, poisoned_allocations
from product_helpers import decode64
from quantize_helpers import DTYPES, FORMATS, raw

formats = st.sampled_from(FORMATS)
extents = st.one_of(st.sampled_from([0, 1, 3, 16, 17, 127, 129]), st.integers(0, 140))
OUTPUTS = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])


def _values(
    rows: int, columns: int, fmt: Format, dtype: torch.dtype, strided: bool, seed: int
) -> torch.Tensor:
    columns = columns // 2 * 2 if fmt.element.packed > 1 else columns
    x = torch.randn(rows, columns * 2 if strided else columns, generator=torch.Generator().manual_seed(seed))
    return (x[:, ::2] if strided else x).to(dtype)


@given(extents, extents, extents, formats, formats, st.sampled_from(DTYPES), st.booleans(), st.booleans())
def test_product_is_within_the_float32_bound(
    m: int, n: int, k: int, a: Format, b: Format, dtype: torch.dtype, strided: bool, biased: bool
) -> None:
    k = k // 2 * 2 if max(a.element.packed, b.element.packed) > 1 else k
    left = quantize(_values(m, k, a, dtype, strided, m), a)
    right = quantize(_values(n, k, b, dtype, not strided, n), b)
    bias = torch.linspace(-3, 5, n) if biased else None
    with poisoned_allocations():
        out = scaled_mm(left, right, bias=bias, out_dtype=torch.float32)
    exact = decode64(left) @ decode64(right).T
    bound = decode64(left).abs() @ decode64(right).abs().T * (k + 3)
    if bias is not None:
        exact, bound = exact + bias.double(), bound + exact.abs() + bias.double().abs()
    assert out.shape == (m, n)
    assert ((out.double() - exact).abs() <= bound * 2.0**-23).all()


@given(extents, extents, st.integers(0, 70), formats, OUTPUTS)
def test_swapping_the_operands_transposes_the_product(
    m: int, n: int, k: int, fmt: Format, dtype: torch.dtype
) -> None:
    left = quantize(_values(m, k, fmt, torch.float32, False, 1), fmt)
    right = quantize(_values(n, k, fmt, torch.float32, False, 2), fmt)
    one = scaled_mm(left, right, out_dtype=torch.float32)
    other = scaled_mm(right, left, out_dtype=torch.float32).T
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert scaled_mm(left, right, out_dtype=dtype).dtype == dtype


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 70), formats, st.integers(-12, 12))
def test_a_power_of_two_in_an_operand_is_one_in_the_product(
    m: int, n: int, k: int, fmt: Format, power: int
) -> None:
    x, w = _values(m, k, fmt, torch.float32, False, 3), _values(n, k, fmt, torch.float32, False, 4)
    right = quantize(w, fmt)
    one = scaled_mm(quantize(x, fmt), right, out_dtype=torch.float32)
    other = scaled_mm(quantize(x * 2.0**power, fmt), right, out_dtype=torch.float32)
    assert torch.equal(one * 2.0**power, other)


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=5),
    st.integers(0, 5),
    st.integers(1, 40),
    st.integers(1, 24),
)
def test_grouped_forms_equal_the_loop(sizes: list[int], tail: int, k: int, n: int) -> None:
    offs = torch.tensor(sizes).cumsum(0).to(torch.int32)
    generator = torch.Generator().manual_seed(k)
    x = torch.randn(sum(sizes) + tail, k, generator=generator)
    g = torch.randn(sum(sizes) + tail, n, generator=generator)
    w = torch.randn(len(sizes), n, k, generator=generator)
    fmt = Format(E4M3FN, "rowwise")
    with poisoned_allocations():
        out = scaled_grouped_mm(
            quantize_grouped(x, offs, fmt), quantize(w, fmt), offs, out_dtype=torch.float32
        )
        parts = [quantize_grouped(y, offs, fmt, transpose=True) for y in (g, x)]
        over = scaled_grouped_mm(*parts, out_dtype=torch.float32)
    start = 0
    for group, size in enumerate(sizes):
        rows = slice(start, start + size)
        start += size
        forward = scaled_mm(quantize(x[rows], fmt), quantize(w[group], fmt), out_dtype=torch.float32)
        torch.testing.assert_close(out[rows], forward, rtol=1e-4, atol=1e-4)
        grad = scaled_mm(
            quantize(g[rows], fmt, transpose=True),
            quantize(x[rows], fmt, transpose=True),
            out_dtype=torch.float32,
        )
        torch.testing.assert_close(over[group], grad, rtol=1e-4, atol=1e-4)
    assert out[start:].eq(0).all()


# ---- torch.library -----------------------------------------------------------------------------------------

# test_schema compares inputs by arithmetic that torch lacks for FP8; the test of untouched operands stands in.
OPCHECKS = ("test_faketensor", "test_aot_dispatch_dynamic")
PAIRS = [
    (Format(E4M3FN, "rowwise"), Format(E5M2, "tensorwise")),
    (Format(E4M3FN, "1x128"), Format(E4M3FN, "128x128")),
    (MXFP8, MXFP4),
]


def _opcheck(op: Any, *args: object) -> None:
    torch.library.opcheck(op.default, args, test_utils=OPCHECKS)


@pytest.mark.parametrize(("a", "b"), PAIRS, ids=str)
def test_opcheck_scaled_mm(a: Format, b: Format) -> None:
    left, right = quantize(outlier_matrix((6, 130)), a), quantize(outlier_matrix((4, 130)), b)
    operands = (left.data, left.scale, a.key, right.data, right.scale, b.key)
    _opcheck(torch.ops.octavo.scaled_mm, *operands, None, torch.bfloat16, False)
    if a.granularity == "rowwise":
        _opcheck(torch.ops.octavo.scaled_mm, *operands, torch.ones(4), torch.float32, True)


@pytest.mark.parametrize(("a", "b"), [PAIRS[0], (MXFP8, MXFP8)], ids=str)
def test_opcheck_scaled_grouped_mm(a: Format, b: Format) -> None:
    offs, op = torch.tensor([3, 3, 7], dtype=torch.int32), torch.ops.octavo.scaled_grouped_mm
    left, right = quantize(outlier_matrix((8, 66)), a), quantize(outlier_matrix((3, 4, 66)), b)
    _opcheck(
        op, left.data, left.scale, a.key, right.data, right.scale, b.key, offs, None, torch.bfloat16, False
    )
    x, align = outlier_matrix((8, 20)), alignment(a, b)
    p, q = (quantize_grouped(x, offs, f, transpose=True, align=align) for f in (a, b))
    _opcheck(op, p.data, p.scale, a.key, q.data, q.scale, b.key, p.group_ends, None, torch.float32, False)


def test_opcheck_grouped_mm() -> None:
    offs, op = torch.tensor([3, 3, 7], dtype=torch.int32), torch.ops.octavo.grouped_mm
    _opcheck(op, torch.ones(8, 6), torch.ones(3, 4, 6), offs, torch.ones(3, 4))
    _opcheck(op, torch.ones(6, 8), torch.ones(8, 4).t(), offs, None)


def test_operands_are_not_touched_and_not_returned() -> None:
    offs = torch.tensor([3, 3, 7], dtype=torch.int32)
    x, w = quantize(outlier_matrix((8, 66)), MXFP8), quantize(outlier_matrix((3, 4, 66)), MXFP8)
    first = quantize(outlier_matrix((4, 66)), MXFP8)
    tensors = [t for q in (x, w, first) for t in (q.data, q.scale)] + [offs]
    before = [raw(t).clone() for t in tensors]
    outs = [scaled_mm(x, first), scaled_grouped_mm(x, w, offs)]
    assert all(torch.equal(raw(t), b) for t, b in zip(tensors, before, strict=True))
    storages = {t.untyped_storage().data_ptr() for t in tensors}
    assert not storages & {out.untyped_storage().data_ptr() for out in outs}


def test_new_token_counts_do_not_compile_again() -> None:
    graphs = 0

    def backend(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> object:
        nonlocal graphs
        graphs += 1
        return graph.forward

    fmt, weight = Format(E4M3FN, "rowwise"), torch.randn(16, 64)

    def product(x: torch.Tensor) -> torch.Tensor:
        return scaled_mm(quantize(x, fmt), quantize(weight, fmt))

    torch._dynamo.reset()
    compiled = torch.compile(product, backend=backend, fullgraph=True)
    for rows in (4, 6, 20, 34, 130):
        x = torch.randn(rows, 64)
        assert torch.equal(raw(compiled(x)), raw(product(x)))
    assert graphs <= 2


def test_grouped_products_trace_without_reading_the_group_ends() -> None:
    def product(x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        over = [quantize_grouped(x, offs, MXFP8, transpose=True) for _ in range(2)]
        rows = scaled_grouped_mm(quantize_grouped(x, offs, MXFP8), quantize(w, MXFP8), offs)
        return rows + grouped_mm(x, w, offs).to(rows.dtype), scaled_grouped_mm(*over)

    torch._dynamo.reset()
    compiled = torch.compile(product, backend="aot_eager", fullgraph=True)
    w = torch.randn(3, 16, 64)
    for ends in ([3, 3, 8], [0, 0, 0], [1, 7, 8]):
        x, offs = torch.randn(8, 64), torch.tensor(ends, dtype=torch.int32)
        for got, expected in zip(compiled(x, w, offs), product(x, w, offs), strict=True):
            assert torch.equal(raw(got), raw(expected))
