"""Triton matrix products of quantized and of 16- and 32-bit operands: dense, rows by expert, over groups.

One source for gfx942, gfx950 and sm_90. The group ends are read on the device: a launch depends on the number of
rows and of groups alone, never on their sizes. The tile's contraction is in :mod:`.operand_kernels`, the
launches and the tables behind them in :mod:`.triton_launch`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.compile_cases import CompileCase
from octavo.matmul.operand_kernels import accumulate, decode_mx, finish, store_tile, tile_of


def _specialize_but(*names: str) -> dict[str, tuple[str, ...]]:
    """Sizes that change with the number of tokens: a new value must not compile anything anew."""
    return {"do_not_specialize": names, "do_not_specialize_on_alignment": names}


@triton.jit(**_specialize_but("M", "split_steps", "sos"))
def scaled_mm_tiles(
    a, b, a_scale, b_scale, bias, out, a_box, b_box,
    M, N, K, split_steps, sam, sak, sbn, sbk, ssam, ssak, ssbn, ssbk, sos, som,
    KIND: tl.constexpr, A_PACK: tl.constexpr, B_PACK: tl.constexpr,
    A_FORMAT: tl.constexpr, B_FORMAT: tl.constexpr,
    A_DIV: tl.constexpr, B_DIV: tl.constexpr, A_ONE: tl.constexpr, B_ONE: tl.constexpr,
    E8M0: tl.constexpr, PROMOTE: tl.constexpr, PRECISION: tl.constexpr, TRUNCATE: tl.constexpr,
    TMA: tl.constexpr, TAIL: tl.constexpr, HALVES: tl.constexpr, BAND: tl.constexpr, DIES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``out[split, M, N]``: grid (tiles, splits), each split contracting ``split_steps`` tiles."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tile_m, tile_n = tile_of(tl.program_id(0), tiles_m, tl.cdiv(N, BLOCK_N), BAND, DIES)
    split = tl.program_id(1)
    m = tile_m * BLOCK_M
    n = tile_n * BLOCK_N
    first = split * split_steps * BLOCK_K
    last = tl.minimum(first + split_steps * BLOCK_K, K)
    acc = accumulate(
        a + m.to(tl.int64) * sam, b + n.to(tl.int64) * sbn, a_scale, b_scale, a_box, b_box,
        m, n, m, n, M - m, N - n, first, last,
        sam, sak, sbn, sbk, ssam, ssak, ssbn, ssbk,
        KIND, A_PACK, B_PACK, A_FORMAT, B_FORMAT, A_DIV, B_DIV, A_ONE, B_ONE, E8M0, PROMOTE, PRECISION,
        TRUNCATE, TMA, TAIL, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    finish(
        acc, out + split.to(tl.int64) * sos + m.to(tl.int64) * som + n, bias, a_scale, b_scale,
        m, n, M - m, N - n, M - m, ssam, ssbn, som,
        KIND, A_DIV, B_DIV, A_ONE, B_ONE, HALVES, BLOCK_M, BLOCK_N,
    )  # fmt: skip


@triton.jit(**_specialize_but("M", "splits"))
def add_splits(partial, bias, out, M, N, splits, BLOCK_N: tl.constexpr):
    """``out[M, N]`` = the sum of ``partial[splits, M, N]``, in their order, and the bias."""
    m = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_N,), tl.float32)
    for split in range(splits):
        acc += tl.load(partial + (split * M + m) * N + n, mask=n < N, other=0.0)
    if bias is not None:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + m * N + n, acc.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def _group_of(offs, t, M, G, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr):
    """(group, first row, end) of row tile ``t``; the rows past the last end are group G, and nothing is G + 1."""
    g = tl.arange(0, GROUPS)
    ends = tl.load(offs + g, mask=g < G, other=M)
    starts = tl.load(offs + g - 1, mask=(g > 0) & (g <= G), other=0)
    starts = tl.where(g > G, M, starts)
    upto = tl.cumsum(tl.cdiv(ends - starts, BLOCK_M), 0)
    group = tl.sum((upto <= t).to(tl.int32), 0)
    before = tl.max(tl.where(g < group, upto, 0), 0)
    start = tl.sum(tl.where(g == group, starts, 0), 0)
    end = tl.sum(tl.where(g == group, ends, 0), 0)
    return group, start + (t - before) * BLOCK_M, end


@triton.jit(**_specialize_but("M", "G", "tiles_m"))
def grouped_rows_tiles(
    a, b, a_scale, b_scale, bias, out, offs, a_box, b_box,
    M, N, K, G, tiles_m, sam, sak, sbg, sbn, sbk, ssam, ssak, ssbg, ssbn, ssbk, som,
    KIND: tl.constexpr, A_PACK: tl.constexpr, B_PACK: tl.constexpr,
    A_FORMAT: tl.constexpr, B_FORMAT: tl.constexpr,
    A_DIV: tl.constexpr, B_DIV: tl.constexpr, A_ONE: tl.constexpr, B_ONE: tl.constexpr,
    E8M0: tl.constexpr, PROMOTE: tl.constexpr, PRECISION: tl.constexpr, TRUNCATE: tl.constexpr,
    TMA: tl.constexpr, TAIL: tl.constexpr, HALVES: tl.constexpr, BAND: tl.constexpr,
    DIES: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``out[rows of g] = a[rows of g] @ b[g].T + bias[g]``, zero past the last end.

    ``tiles_m`` is the most row tiles that G groups and a tail of M rows can have; programs beyond what they do
    have end at once.
    """
    t, tile_n = tile_of(tl.program_id(0), tiles_m, tl.cdiv(N, BLOCK_N), BAND, DIES)
    group, m, end = _group_of(offs, t, M, G, GROUPS, BLOCK_M)
    n = tile_n * BLOCK_N
    live_n = N - n
    out += m.to(tl.int64) * som + n
    if group == G:
        store_tile(out, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), end - m, live_n, som, BLOCK_M, BLOCK_N)
    if group < G:
        # Rows that the tile reads beyond its group belong to the next one and are not stored.
        if KIND != "plain":
            b_scale += group.to(tl.int64) * ssbg
        acc = accumulate(
            a + m.to(tl.int64) * sam, b + group.to(tl.int64) * sbg + n.to(tl.int64) * sbn,
            a_scale, b_scale, a_box, b_box,
            m, group * N + n, m, n, M - m, live_n, tl.full((), 0, tl.int32), K,
            sam, sak, sbn, sbk, ssam, ssak, ssbn, ssbk,
            KIND, A_PACK, B_PACK, A_FORMAT, B_FORMAT, A_DIV, B_DIV, A_ONE, B_ONE, E8M0, PROMOTE, PRECISION,
            TRUNCATE, TMA, TAIL, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        finish(
            acc, out, None if bias is None else bias + group * N, a_scale, b_scale,
            m, n, M - m, live_n, end - m, ssam, ssbn, som,
            KIND, A_DIV, B_DIV, A_ONE, B_ONE, HALVES, BLOCK_M, BLOCK_N,
        )  # fmt: skip


@triton.jit
def grouped_columns_tiles(
    a, b, a_scale, b_scale, out, offs, a_box, b_box,
    M, N, sam, sak, sbn, sbk, ssag, ssam, ssak, ssbg, ssbn, ssbk,
    KIND: tl.constexpr, A_PACK: tl.constexpr, B_PACK: tl.constexpr,
    A_FORMAT: tl.constexpr, B_FORMAT: tl.constexpr,
    A_DIV: tl.constexpr, B_DIV: tl.constexpr, A_ONE: tl.constexpr, B_ONE: tl.constexpr,
    E8M0: tl.constexpr, PROMOTE: tl.constexpr, PRECISION: tl.constexpr, TRUNCATE: tl.constexpr,
    TMA: tl.constexpr, TAIL: tl.constexpr, HALVES: tl.constexpr, BAND: tl.constexpr, DIES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``out[g, M, N] = a[M, columns of g] @ b[N, columns of g].T``; exactly zero for an empty group."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tiles_m * tiles_n
    group = tl.program_id(0) // tiles
    tile_m, tile_n = tile_of(tl.program_id(0) % tiles, tiles_m, tiles_n, BAND, DIES)
    m = tile_m * BLOCK_M
    n = tile_n * BLOCK_N
    first = tl.load(offs + group - 1, mask=group > 0, other=0)
    last = tl.load(offs + group)
    out += (group.to(tl.int64) * M + m) * N + n
    if first == last:
        store_tile(out, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), M - m, N - n, N, BLOCK_M, BLOCK_N)
    else:
        if KIND != "plain":
            # A multiple of 16 in the padded group layout: said by arithmetic, so that loads are wide.
            first = first // 16 * 16
            a_scale += group.to(tl.int64) * ssag
            b_scale += group.to(tl.int64) * ssbg
        acc = accumulate(
            a + m.to(tl.int64) * sam, b + n.to(tl.int64) * sbn, a_scale, b_scale, a_box, b_box,
            m, n, m, n, M - m, N - n, first, last,
            sam, sak, sbn, sbk, ssam, ssak, ssbn, ssbk,
            KIND, A_PACK, B_PACK, A_FORMAT, B_FORMAT, A_DIV, B_DIV, A_ONE, B_ONE, E8M0, PROMOTE, PRECISION,
            TRUNCATE, TMA, TAIL, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        finish(
            acc, out, None, a_scale, b_scale, m, n, M - m, N - n, M - m, ssam, ssbn, N,
            KIND, A_DIV, B_DIV, A_ONE, B_ONE, HALVES, BLOCK_M, BLOCK_N,
        )  # fmt: skip


@triton.jit(**_specialize_but("M"))
def decode_mx_tiles(
    data, codes, out, M, K, tiles_k,
    PACK: tl.constexpr, TRUNCATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """bfloat16 [M, K] of an MX matrix: exact but below 2^-126, where bfloat16 has fewer bits."""
    cols: tl.constexpr = BLOCK_K // PACK
    tile_m, tile_k = tl.program_id(0) // tiles_k, tl.program_id(0) % tiles_k
    i = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tile_k * cols + tl.arange(0, cols)
    p = tile_k * (BLOCK_K // 32) + tl.arange(0, BLOCK_K // 32)
    row = i.to(tl.int64)[:, None]
    live = (i < M)[:, None]
    stored = tl.load(data + row * (K // PACK) + j[None, :], mask=live & (j < K // PACK)[None, :], other=0.0)
    width = tl.cdiv(K, 32)
    scale = tl.load(codes + row * width + p[None, :], mask=live & (p < width)[None, :], other=0)
    even, odd = decode_mx(stored, scale, BLOCK_M, cols, PACK, TRUNCATE)
    if PACK == 2:
        even = tl.reshape(tl.join(even, odd), (BLOCK_M, BLOCK_K))
    k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    tl.store(out + row * K + k[None, :], even, mask=live & (k < K)[None, :])


def compile_cases(target: str) -> list[CompileCase]:
    """Every configuration of these kernels that the committed table of ``target`` can launch."""
    from octavo.matmul import triton_cases

    return triton_cases.compile_cases(target)
