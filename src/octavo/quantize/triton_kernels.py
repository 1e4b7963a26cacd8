"""Triton quantization kernels for matrices: one source for gfx942, gfx950 and sm_90.

Legend: ``x`` is [B, M, K] with strides (sb, sm, sk), ``sk`` the small one. ``direct`` data has the layout of x,
``turned`` data is its transpose [B, K, M]. A block of RB x CB elements *of x* shares a scale in either; 0 means
the whole dimension, whose amax comes from an earlier pass. Rows are indexed by i, columns by j.

Offsets are int64: experts' weights pass 2^31 elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.quantize.numerics_kernels import (
    encode_and_scale,
    is_packed,
    magnitude_bits,
    pack_pairs,
    to_codes,
)


@triton.jit
def quantize_rows(
    x, data, scale, column_amax,
    M, K, sb, sm, sk, programs,
    ELEMENT: tl.constexpr, ROUNDING: tl.constexpr, CAST: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_K: tl.constexpr, WHOLE: tl.constexpr, COLUMN_AMAX: tl.constexpr,
):  # fmt: skip
    """Rowwise in one read: a program holds ROWS whole rows (or, unless WHOLE, reads long rows twice).

    ``programs`` of a batch entry stride over its rows together, so that what was read last is what a
    following pass can still find in the cache. With COLUMN_AMAX it also leaves the amax of every column.
    """
    pid = tl.program_id(0)
    batch = (pid // programs).to(tl.int64)
    first = pid % programs
    j = tl.arange(0, BLOCK_K)
    x += batch * sb
    data += batch * M * K
    scale += batch * M
    held = tl.zeros((BLOCK_K,), tl.int32)
    for tile in range(first, tl.cdiv(M, ROWS), programs):
        i = tile * ROWS + tl.arange(0, ROWS)
        source = x + i.to(tl.int64)[:, None] * sm
        target = data + i.to(tl.int64)[:, None] * K
        if WHOLE:
            mask = (i < M)[:, None] & (j < K)[None, :]
            value = tl.load(source + j.to(tl.int64)[None, :] * sk, mask=mask, other=0.0)
            bits = magnitude_bits(value)
            if COLUMN_AMAX:
                held = tl.maximum(held, tl.max(bits, 0))
            encode, decode = encode_and_scale(tl.max(bits, 1), ELEMENT, ROUNDING)
            codes = to_codes(value.to(tl.float32) * encode[:, None], ELEMENT, CAST)
            tl.store(target + j[None, :], codes, mask=mask)
        else:
            amax = tl.zeros((ROWS, BLOCK_K), tl.int32)
            for k in range(0, K, BLOCK_K):
                mask = (i < M)[:, None] & (k + j < K)[None, :]
                value = tl.load(source + (k + j).to(tl.int64)[None, :] * sk, mask=mask, other=0.0)
                amax = tl.maximum(amax, magnitude_bits(value))
            encode, decode = encode_and_scale(tl.max(amax, 1), ELEMENT, ROUNDING)
            for k in range(0, K, BLOCK_K):
                mask = (i < M)[:, None] & (k + j < K)[None, :]
                value = tl.load(source + (k + j).to(tl.int64)[None, :] * sk, mask=mask, other=0.0)
                codes = to_codes(value.to(tl.float32) * encode[:, None], ELEMENT, CAST)
                tl.store(target + (k + j)[None, :], codes, mask=mask)
        tl.store(scale + i, decode, mask=i < M)
    if COLUMN_AMAX:
        tl.atomic_max(column_amax + batch * K + j, held, mask=j < K, sem="relaxed")


@triton.jit
def amax_tiles(
    x, one_amax, row_amax, column_amax,
    M, K, sb, sm, sk, tiles_m, tiles_k, steps,
    ONE: tl.constexpr, ROW: tl.constexpr, COLUMN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Amax bits of the whole matrix (one partial a program), of its rows and of its columns, in one read.

    A program walks ``steps`` tiles down. ``row_amax`` and ``column_amax`` start at zero and take atomic
    maxima, which are exact in any order.
    """
    pid = tl.program_id(0)
    tile_k = pid % tiles_k
    tile_m = (pid // tiles_k) % tiles_m
    batch = (pid // (tiles_k * tiles_m)).to(tl.int64)
    j = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    source = x + batch * sb + j.to(tl.int64)[None, :] * sk
    held = tl.zeros((BLOCK_M, BLOCK_K), tl.int32)
    for step in range(steps):
        i = (tile_m * steps + step) * BLOCK_M + tl.arange(0, BLOCK_M)
        mask = (i < M)[:, None] & (j < K)[None, :]
        bits = magnitude_bits(tl.load(source + i.to(tl.int64)[:, None] * sm, mask=mask, other=0.0))
        held = tl.maximum(held, bits)
        if ROW:
            tl.atomic_max(row_amax + batch * M + i, tl.max(bits, 1), mask=i < M, sem="relaxed")
    if COLUMN or ONE:
        columns = tl.max(held, 0)
        if COLUMN:
            tl.atomic_max(column_amax + batch * K + j, columns, mask=j < K, sem="relaxed")
        if ONE:
            tl.store(one_amax + pid, tl.max(columns, 0))


@triton.constexpr_function
def spans_tile(block_m, block_k, rb, cb):
    """Whether one multiplier a row, a column or a tile serves the blocks, so that it broadcasts in 2-D."""
    return rb in (0, 1, block_m) and cb in (0, 1, block_k)


@triton.jit
def tile_amax(
    bits, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr
):  # fmt: skip
    """Amax bits [BLOCK_M / RB, BLOCK_K / CB] of the blocks of a tile."""
    if RB == 1 and CB == BLOCK_K:
        return tl.max(bits, 1)[:, None]
    elif CB == 1 and RB == BLOCK_M:
        return tl.max(bits, 0)[None, :]
    else:
        blocks = tl.reshape(bits, (BLOCK_M // RB, RB, BLOCK_K // CB, CB))
        return tl.max(tl.max(blocks, 3), 1)


@triton.jit
def tile_codes(
    value, encode,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr,
    ELEMENT: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    """Codes [BLOCK_M, BLOCK_K] of a tile, given one multiplier a block."""
    if spans_tile(BLOCK_M, BLOCK_K, RB, CB):
        return to_codes(value * encode, ELEMENT, CAST)
    else:
        blocks = tl.reshape(value, (BLOCK_M // RB, RB, BLOCK_K // CB, CB))
        codes = to_codes(blocks * encode[:, None, :, None], ELEMENT, CAST)
        return tl.reshape(codes, (BLOCK_M, BLOCK_K))


@triton.jit
def _whole_amax(
    one_amax, row_amax, column_amax, batch, i, j, M, K, partials,
    RB: tl.constexpr, CB: tl.constexpr, PARTIALS: tl.constexpr,
):  # fmt: skip
    # What an earlier pass found of whole dimensions, ready to broadcast against a tile.
    if RB == 0 and CB == 0:
        p = tl.arange(0, PARTIALS)
        found = tl.load(one_amax + batch * partials + p, mask=p < partials, other=0)
        return tl.full((1, 1), 0, tl.int32) + tl.max(found, 0)
    elif CB == 0:
        return tl.load(row_amax + batch * M + i, mask=i < M, other=0)[:, None]
    else:
        return tl.load(column_amax + batch * K + j, mask=j < K, other=0)[None, :]


@triton.jit
def store_scales(
    scale, decode, tile_m, tile_k, M, K,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Store the scales [M blocks, K blocks] of a tile, transposed if TURNED; whole dimensions store once."""
    if RB == 0:
        rows = 1
        i = tile_m + tl.arange(0, 1)
    else:
        rows = tl.cdiv(M, RB)
        i = tile_m * (BLOCK_M // RB) + tl.arange(0, BLOCK_M // RB)
    if CB == 0:
        columns = 1
        j = tile_k + tl.arange(0, 1)
    else:
        columns = tl.cdiv(K, CB)
        j = tile_k * (BLOCK_K // CB) + tl.arange(0, BLOCK_K // CB)
    mask = (i < rows)[:, None] & (j < columns)[None, :]
    i, j = i.to(tl.int64)[:, None], j.to(tl.int64)[None, :]
    offset = j * rows + i if TURNED else i * columns + j
    tl.store(scale + offset, decode, mask=mask)


@triton.jit
def _store_matrix(
    data, codes, tile_m, tile_k, M, K,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, ELEMENT: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    if is_packed(ELEMENT):
        codes = pack_pairs(codes, BLOCK_M, BLOCK_K)
        j = tile_k * (BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)
        columns = K // 2
    else:
        j = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
        columns = K
    i = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    mask = (i < M)[:, None] & (j < columns)[None, :]
    target = data + i.to(tl.int64)[:, None] * columns + j[None, :]
    tl.store(target, codes, mask=mask, eviction_policy=EVICT)


@triton.jit
def store_codes(
    data, codes, tile_m, tile_k, M, K,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, ELEMENT: tl.constexpr, TURNED: tl.constexpr,
    EVICT: tl.constexpr,
):  # fmt: skip
    """Store codes [BLOCK_M, BLOCK_K] of a tile, transposed if TURNED, two to a byte for packed elements."""
    if TURNED:
        _store_matrix(data, tl.trans(codes), tile_k, tile_m, K, M, BLOCK_K, BLOCK_M, ELEMENT, EVICT)
    else:
        _store_matrix(data, codes, tile_m, tile_k, M, K, BLOCK_M, BLOCK_K, ELEMENT, EVICT)


@triton.jit
def quantize_tiles(
    x, direct, direct_scale, turned, turned_scale, one_amax, row_amax, column_amax,
    M, K, sb, sm, sk, tiles_m, tiles_k, partials,
    DIRECT: tl.constexpr, D_ELEMENT: tl.constexpr, D_ROUNDING: tl.constexpr, D_CAST: tl.constexpr,
    D_RB: tl.constexpr, D_CB: tl.constexpr,
    TURNED: tl.constexpr, T_ELEMENT: tl.constexpr, T_ROUNDING: tl.constexpr, T_CAST: tl.constexpr,
    T_RB: tl.constexpr, T_CB: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, REVERSE: tl.constexpr,
    PARTIALS: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """Read a tile once and write its codes and scales as they lie, transposed, or both.

    Tiles go down GROUP at a time, so that neighbours in a transposed row are written together. REVERSE
    starts at the end, where the amax pass before has left x in the cache; EVICT is the cache policy of what no
    later pass needs.
    """
    pid = tl.program_id(0)
    if REVERSE:
        pid = tl.num_programs(0) - 1 - pid
    tiles = tiles_m * tiles_k
    batch = (pid // tiles).to(tl.int64)
    rest = pid % tiles
    band = rest // (GROUP * tiles_k)
    height = tl.minimum(tiles_m - band * GROUP, GROUP)
    within = rest - band * GROUP * tiles_k
    tile_m = band * GROUP + within % height
    tile_k = within // height

    i = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (i < M)[:, None] & (j < K)[None, :]
    source = x + batch * sb + i.to(tl.int64)[:, None] * sm + j.to(tl.int64)[None, :] * sk
    loaded = tl.load(source, mask=mask, other=0.0, eviction_policy=EVICT)
    same: tl.constexpr = D_RB == T_RB and D_CB == T_CB and D_ELEMENT == T_ELEMENT and D_ROUNDING == T_ROUNDING
    if DIRECT:
        if D_RB == 0 or D_CB == 0:
            amax = _whole_amax(
                one_amax, row_amax, column_amax, batch, i, j, M, K, partials, D_RB, D_CB, PARTIALS
            )  # fmt: skip
        else:
            amax = tile_amax(magnitude_bits(loaded), BLOCK_M, BLOCK_K, D_RB, D_CB)
        encode, decode = encode_and_scale(amax, D_ELEMENT, D_ROUNDING)
        codes = tile_codes(loaded.to(tl.float32), encode, BLOCK_M, BLOCK_K, D_RB, D_CB, D_ELEMENT, D_CAST)
        scales = _scales_of(M, K, D_RB, D_CB)
        packed: tl.constexpr = 2 if is_packed(D_ELEMENT) else 1
        store_codes(
            direct + batch * M * K // packed, codes, tile_m, tile_k, M, K,
            BLOCK_M, BLOCK_K, D_ELEMENT, False, EVICT,
        )  # fmt: skip
        store_scales(
            direct_scale + batch * scales, decode, tile_m, tile_k, M, K, BLOCK_M, BLOCK_K, D_RB, D_CB, False
        )  # fmt: skip
    if TURNED:
        scales_t = _scales_of(M, K, T_RB, T_CB)
        packed_t: tl.constexpr = 2 if is_packed(T_ELEMENT) else 1
        turned += batch * M * K // packed_t
        turned_scale += batch * scales_t
        if DIRECT and same:
            store_codes(turned, codes, tile_m, tile_k, M, K, BLOCK_M, BLOCK_K, T_ELEMENT, True, EVICT)
            store_scales(
                turned_scale, decode, tile_m, tile_k, M, K, BLOCK_M, BLOCK_K, T_RB, T_CB, True
            )  # fmt: skip
        elif spans_tile(BLOCK_M, BLOCK_K, T_RB, T_CB):
            if T_RB == 0 or T_CB == 0:
                amax = _whole_amax(
                    one_amax, row_amax, column_amax, batch, i, j, M, K, partials, T_RB, T_CB, PARTIALS
                )  # fmt: skip
            else:
                amax = tile_amax(magnitude_bits(loaded), BLOCK_M, BLOCK_K, T_RB, T_CB)
            encode_t, decode_t = encode_and_scale(amax, T_ELEMENT, T_ROUNDING)
            codes_t = to_codes(loaded.to(tl.float32) * encode_t, T_ELEMENT, T_CAST)
            store_codes(turned, codes_t, tile_m, tile_k, M, K, BLOCK_M, BLOCK_K, T_ELEMENT, True, EVICT)
            store_scales(
                turned_scale, decode_t, tile_m, tile_k, M, K, BLOCK_M, BLOCK_K, T_RB, T_CB, True
            )  # fmt: skip
        else:
            flipped = tl.trans(loaded)
            amax = tile_amax(magnitude_bits(flipped), BLOCK_K, BLOCK_M, T_CB, T_RB)
            encode_t, decode_t = encode_and_scale(amax, T_ELEMENT, T_ROUNDING)
            codes_t = tile_codes(
                flipped.to(tl.float32), encode_t, BLOCK_K, BLOCK_M, T_CB, T_RB, T_ELEMENT, T_CAST
            )  # fmt: skip
            store_codes(turned, codes_t, tile_k, tile_m, K, M, BLOCK_K, BLOCK_M, T_ELEMENT, False, EVICT)
            store_scales(
                turned_scale, decode_t, tile_k, tile_m, K, M, BLOCK_K, BLOCK_M, T_CB, T_RB, False
            )  # fmt: skip


@triton.jit
def _scales_of(M, K, RB: tl.constexpr, CB: tl.constexpr):
    rows = 1 if RB == 0 else tl.cdiv(M, RB)
    columns = 1 if CB == 0 else tl.cdiv(K, CB)
    return rows * columns
