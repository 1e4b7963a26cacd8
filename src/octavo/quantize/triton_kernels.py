"""Triton quantization kernels for matrices: one source for gfx942, gfx950 and sm_90.

Legend: ``x`` is [B, M, K] with strides (sb, sm, sk), ``sk`` the small one. ``direct`` data has the layout of x,
``turned`` data is its transpose [B, K, M]. A block of RB x CB elements *of x* shares a scale in either; 0 means
the whole dimension, whose amax comes from an earlier pass. Rows are indexed by i, columns by j.

A tile is held as [R, Q, BLOCK_K] with R * Q rows, row q * R + r: so a thread holds R rows that follow each
other, packs their codes into one word of up to 32 bits, and the transposition moves words, not bytes.

Counts of tiles are not specialized on, so that a new number of tokens compiles nothing. Offsets are int64:
experts' weights pass 2^31 elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.quantize.numerics_kernels import (
    code_bits,
    encode_and_scale,
    is_mx,
    is_packed,
    magnitude_bits,
    scaled_codes,
)
from octavo.quantize.source_kernels import load_source


@triton.jit(do_not_specialize=["programs"])
def quantize_rows(
    x, data, scale, column_amax,
    M, K, sb, sm, sk, pitch, programs,
    ELEMENT: tl.constexpr, ROUNDING: tl.constexpr, CAST: tl.constexpr,
    SOURCE: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, WHOLE: tl.constexpr,
    COLUMN_AMAX: tl.constexpr,
):  # fmt: skip
    """Rowwise in one read: a program holds ROWS whole rows (or, unless WHOLE, reads long rows twice).

    ``programs`` of a batch entry stride over its rows together, so that what was read last is what a
    following pass can still find in the cache. With COLUMN_AMAX it also leaves the amax of every column.
    ``pitch`` is the row length of ``data``; SOURCE says what a value is (:func:`load_source`).
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
        target = data + i.to(tl.int64)[:, None] * pitch
        if WHOLE:
            mask = (i < M)[:, None] & (j < K)[None, :]
            value = load_source(source + j.to(tl.int64)[None, :] * sk, mask, K * sk, SOURCE, "")
            bits = magnitude_bits(value)
            if COLUMN_AMAX:
                held = tl.maximum(held, tl.max(bits, 0))
            encode, decode = encode_and_scale(tl.max(bits, 1), ELEMENT, ROUNDING)
            codes = scaled_codes(value, encode[:, None], ELEMENT, CAST)
            tl.store(target + j[None, :], codes, mask=mask)
        else:
            amax = tl.zeros((ROWS, BLOCK_K), tl.int32)
            for k in range(0, K, BLOCK_K):
                mask = (i < M)[:, None] & (k + j < K)[None, :]
                value = load_source(
                    source + (k + j).to(tl.int64)[None, :] * sk, mask, K * sk, SOURCE, ""
                )  # fmt: skip
                amax = tl.maximum(amax, magnitude_bits(value))
            encode, decode = encode_and_scale(tl.max(amax, 1), ELEMENT, ROUNDING)
            for k in range(0, K, BLOCK_K):
                mask = (i < M)[:, None] & (k + j < K)[None, :]
                value = load_source(
                    source + (k + j).to(tl.int64)[None, :] * sk, mask, K * sk, SOURCE, ""
                )  # fmt: skip
                codes = scaled_codes(value, encode[:, None], ELEMENT, CAST)
                tl.store(target + (k + j)[None, :], codes, mask=mask)
        tl.store(scale + i, decode, mask=i < M)
    if COLUMN_AMAX:
        tl.atomic_max(column_amax + batch * K + j, held, mask=j < K, sem="relaxed")


@triton.jit
def tile_rows(tile_m, BLOCK_M: tl.constexpr, R: tl.constexpr):
    """Row numbers [R, Q] of a tile."""
    q = tl.arange(0, BLOCK_M // R)
    return tile_m * BLOCK_M + q[None, :] * R + tl.arange(0, R)[:, None]


@triton.jit
def tile_bits(
    x, tile_m, j, M, K, sm, sk, SOURCE: tl.constexpr, BLOCK_M: tl.constexpr, R: tl.constexpr
):  # fmt: skip
    """Magnitude bits [R, Q, BLOCK_K] of a tile of x with the columns j."""
    i = tile_rows(tile_m, BLOCK_M, R)
    mask = (i < M)[:, :, None] & (j < K)[None, None, :]
    at = x + i.to(tl.int64)[:, :, None] * sm + j.to(tl.int64)[None, None, :] * sk
    return magnitude_bits(load_source(at, mask, K * sk, SOURCE, ""))


@triton.jit(do_not_specialize=["tiles_m", "tiles_k", "steps"])
def amax_tiles(
    x, one_amax, row_amax, column_amax,
    M, K, sb, sm, sk, tiles_m, tiles_k, steps,
    ONE: tl.constexpr, ROW: tl.constexpr, COLUMN: tl.constexpr, SOURCE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, R: tl.constexpr,
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
    x += batch * sb
    held = tl.zeros((BLOCK_M // R, BLOCK_K), tl.int32)
    for step in range(steps):
        at = tile_m * steps + step
        bits = tile_bits(x, at, j, M, K, sm, sk, SOURCE, BLOCK_M, R)
        if COLUMN or ONE:
            held = tl.maximum(held, tl.max(bits, 0))
        if ROW:
            i = tile_rows(at, BLOCK_M, R)
            tl.atomic_max(row_amax + batch * M + i, tl.max(bits, 2), mask=i < M, sem="relaxed")
    if COLUMN or ONE:
        columns = tl.max(held, 0)
        if COLUMN:
            tl.atomic_max(column_amax + batch * K + j, columns, mask=j < K, sem="relaxed")
        if ONE:
            tl.store(one_amax + pid, tl.max(columns, 0))


# ---- blocks of a tile: [R, row blocks, Q rows in a block, column blocks, columns in a block] ------------------


@triton.constexpr_function
def _block_rows(block_m, rb, r):
    # Q rows of one block: all of them, one, or those of RB.
    return block_m // r if rb == 0 else 1 if rb == 1 else rb // r


@triton.constexpr_function
def _block_columns(block_k, cb):
    return block_k if cb == 0 else cb


@triton.jit
def as_blocks(
    tile, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, R: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr
):  # fmt: skip
    """A tile [R, Q, BLOCK_K] as its blocks of RB x CB elements (0: the whole tile's rows or columns)."""
    q: tl.constexpr = _block_rows(BLOCK_M, RB, R)
    c: tl.constexpr = _block_columns(BLOCK_K, CB)
    return tl.reshape(tile, (R, BLOCK_M // R // q, q, BLOCK_K // c, c))


@triton.jit
def block_amax(blocks, RB: tl.constexpr, CB: tl.constexpr):
    """Amax bits of blocks, reduced dimensions kept; what a thread holds is reduced first."""
    if RB > 1:
        blocks = tl.max(blocks, 0, keep_dims=True)
    if CB > 1:
        blocks = tl.max(blocks, 4, keep_dims=True)
    if RB > 1:
        blocks = tl.max(blocks, 2, keep_dims=True)
    return blocks


@triton.jit
def _whole_amax(
    amax, batch, i, j, M, K, partials,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, R: tl.constexpr,
    RB: tl.constexpr, CB: tl.constexpr, PARTIALS: tl.constexpr,
):  # fmt: skip
    # What an earlier pass found of whole dimensions, ready to broadcast against the blocks of a tile.
    if RB == 0 and CB == 0:
        p = tl.arange(0, PARTIALS)
        found = tl.load(amax + batch * partials + p, mask=p < partials, other=0)
        return tl.full((1, 1, 1, 1, 1), 0, tl.int32) + tl.max(found, 0)
    elif CB == 0:
        found = tl.load(amax + batch * M + i, mask=i < M, other=0)
        return tl.reshape(found, (R, BLOCK_M // R, 1, 1, 1))
    else:
        found = tl.load(amax + batch * K + j, mask=j < K, other=0)
        return tl.reshape(found, (1, 1, 1, BLOCK_K, 1))


@triton.jit
def spread_scales(bits, ELEMENT: tl.constexpr, ROUNDING: tl.constexpr):
    """``encode_and_scale``, the divisions dealt out: every thread of a column holds its amax, a gather spreads them."""
    flat: tl.constexpr = bits.numel
    spread = tl.gather(tl.reshape(bits, (flat,)), tl.arange(0, flat), 0)
    encode, decode = encode_and_scale(spread, ELEMENT, ROUNDING)
    return tl.reshape(encode, bits.shape), tl.reshape(decode, bits.shape)


@triton.jit
def tile_codes(
    loaded, amax, batch, i, j, M, K, partials,
    ELEMENT: tl.constexpr, ROUNDING: tl.constexpr, CAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, R: tl.constexpr,
    RB: tl.constexpr, CB: tl.constexpr, PARTIALS: tl.constexpr,
):  # fmt: skip
    """(codes [R, Q, BLOCK_K], scales of the blocks) of a tile."""
    if RB == 0 or CB == 0:
        bits = _whole_amax(amax, batch, i, j, M, K, partials, BLOCK_M, BLOCK_K, R, RB, CB, PARTIALS)
    else:
        bits = block_amax(as_blocks(magnitude_bits(loaded), BLOCK_M, BLOCK_K, R, RB, CB), RB, CB)
    if RB > 1 and CAST == "saturates" and not is_mx(ROUNDING):
        encode, decode = spread_scales(bits, ELEMENT, ROUNDING)
    else:
        encode, decode = encode_and_scale(bits, ELEMENT, ROUNDING)
    codes = scaled_codes(as_blocks(loaded, BLOCK_M, BLOCK_K, R, RB, CB), encode, ELEMENT, CAST)
    return tl.reshape(codes, (R, BLOCK_M // R, BLOCK_K)), decode


@triton.jit
def store_scales(
    scale, decode, tile_m, tile_k, M, K, pitch,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, R: tl.constexpr,
    RB: tl.constexpr, CB: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Store the scales of a tile's blocks, transposed if TURNED; whole dimensions store once."""
    inner: tl.constexpr = R if RB == 1 else 1
    groups: tl.constexpr = BLOCK_M // R // _block_rows(BLOCK_M, RB, R)
    across: tl.constexpr = BLOCK_K // _block_columns(BLOCK_K, CB)
    rows = 1 if RB == 0 else tl.cdiv(M, RB)
    columns = 1 if CB == 0 else tl.cdiv(K, CB)
    i = tile_rows(tile_m, groups * inner, inner)
    j = tile_k * across + tl.arange(0, across)
    mask = (i < rows)[:, :, None] & (j < columns)[None, None, :]
    i, j = i.to(tl.int64)[:, :, None], j.to(tl.int64)[None, None, :]
    offset = j * pitch + i if TURNED else i * pitch + j
    tl.store(scale + offset, tl.reshape(decode, (inner, groups, across)), mask=mask)


# ---- codes ---------------------------------------------------------------------------------------------------


@triton.jit
def store_direct(
    data, codes, tile_m, tile_k, M, K, pitch,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, R: tl.constexpr, ELEMENT: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """Store codes [R, Q, BLOCK_K] as they lie; ``pitch`` is the bytes of a row of ``data``."""
    per: tl.constexpr = 8 // code_bits(ELEMENT)
    if is_packed(ELEMENT):
        low, high = tl.split(tl.reshape(codes, (R, BLOCK_M // R, BLOCK_K // 2, 2)))
        codes = low | (high << 4)
    i = tile_rows(tile_m, BLOCK_M, R)
    j = tile_k * (BLOCK_K // per) + tl.arange(0, BLOCK_K // per)
    mask = (i < M)[:, :, None] & (j < K // per)[None, None, :]
    target = data + i.to(tl.int64)[:, :, None] * pitch + j[None, None, :]
    tl.store(target, codes, mask=mask, eviction_policy=EVICT)


@triton.jit
def _fold(words, WIDTH: tl.constexpr, R: tl.constexpr, Q: tl.constexpr, K: tl.constexpr):
    # [R, Q, K] words of WIDTH bits to [R / 2, Q, K] words of twice as many, the even row in the low half.
    low, high = tl.split(tl.permute(tl.reshape(words, (R // 2, 2, Q, K)), (0, 2, 3, 1)))
    return low | (high << WIDTH)


@triton.constexpr_function
def folds(element, r):
    """How many times the codes of R rows are folded in pairs into words of at most 32 bits."""
    bits, count = (4 if is_packed(element) else 8), 0
    while bits < 32 and r > 1:
        bits, r, count = 2 * bits, r // 2, count + 1
    return count


@triton.jit
def store_turned(
    data, codes, tile_m, tile_k, M, K, pitch,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, R: tl.constexpr, ELEMENT: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """Store codes [R, Q, BLOCK_K] transposed; ``pitch`` counts words of ``2^folds`` codes, which divide M."""
    Q: tl.constexpr = BLOCK_M // R
    bits: tl.constexpr = code_bits(ELEMENT)
    n: tl.constexpr = folds(ELEMENT, R)
    words = codes
    if n > 0:
        words = _fold(codes.to(tl.int32), bits, R, Q, BLOCK_K)
    if n > 1:
        words = _fold(words, 2 * bits, R // 2, Q, BLOCK_K)
    if n > 2:
        words = _fold(words, 4 * bits, R // 4, Q, BLOCK_K)
    per: tl.constexpr = 2**n
    if bits * per == 32:
        data = data.to(tl.pointer_type(tl.int32))
    elif bits * per == 16:
        data = data.to(tl.pointer_type(tl.int16))
        words = words.to(tl.int16)
    else:
        words = words.to(tl.uint8)
    turned = tl.reshape(tl.permute(words, (2, 1, 0)), (BLOCK_K, BLOCK_M // per))
    j = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    m = tile_m * (BLOCK_M // per) + tl.arange(0, BLOCK_M // per)
    mask = (j < K)[:, None] & (m < M // per)[None, :]
    target = data + j.to(tl.int64)[:, None] * pitch + m[None, :]
    tl.store(target, turned, mask=mask, eviction_policy=EVICT)


@triton.jit
def tile_of(pid, tiles_m, tiles_k, GROUP: tl.constexpr):
    """(tile_m, tile_k): tiles go down GROUP at a time, so that neighbours in a transposed row go together."""
    if GROUP == 1:
        tile_m = pid // tiles_k
        return tile_m, pid - tile_m * tiles_k
    else:
        band = pid // (GROUP * tiles_k)
        height = tl.minimum(tiles_m - band * GROUP, GROUP)
        within = pid - band * GROUP * tiles_k
        return band * GROUP + within % height, within // height


@triton.jit
def write_tile(
    loaded, direct, direct_scale, direct_amax, turned, turned_scale, turned_amax, batch, tile_m, tile_k,
    M, K, direct_pitch, direct_scale_pitch, turned_pitch, turned_scale_pitch, partials,
    D_ELEMENT: tl.constexpr, D_ROUNDING: tl.constexpr, D_CAST: tl.constexpr,
    D_RB: tl.constexpr, D_CB: tl.constexpr,
    T_ELEMENT: tl.constexpr, T_ROUNDING: tl.constexpr, T_CAST: tl.constexpr,
    T_RB: tl.constexpr, T_CB: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, R: tl.constexpr, PARTIALS: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """Write codes and scales of the values [R, Q, BLOCK_K] of a tile of [M, K] as they lie, transposed, or both.

    An output with an empty ELEMENT is absent; EVICT is the cache policy of what no later pass needs. Two outputs
    whose codes are the same take a call each, on values loaded twice: one set of codes stored both ways came out
    wrong on Hopper with Triton 3.6, and a compiler makes one set of two that it can see to be equal.
    """
    i = tile_rows(tile_m, BLOCK_M, R)
    j = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    same: tl.constexpr = D_RB == T_RB and D_CB == T_CB and D_ELEMENT == T_ELEMENT and D_ROUNDING == T_ROUNDING
    tl.static_assert(D_ELEMENT == "" or not same, "the same codes both ways: load the values twice")
    if D_ELEMENT != "":
        codes, decode = tile_codes(
            loaded, direct_amax, batch, i, j, M, K, partials,
            D_ELEMENT, D_ROUNDING, D_CAST, BLOCK_M, BLOCK_K, R, D_RB, D_CB, PARTIALS,
        )  # fmt: skip
        direct += batch * M * direct_pitch
        direct_scale += batch * scales_of(M, K, D_RB, D_CB)
        store_direct(
            direct, codes, tile_m, tile_k, M, K, direct_pitch, BLOCK_M, BLOCK_K, R, D_ELEMENT, EVICT
        )  # fmt: skip
        store_scales(
            direct_scale, decode, tile_m, tile_k, M, K, direct_scale_pitch,
            BLOCK_M, BLOCK_K, R, D_RB, D_CB, False,
        )  # fmt: skip
    if T_ELEMENT != "":
        codes, decode = tile_codes(
            loaded, turned_amax, batch, i, j, M, K, partials,
            T_ELEMENT, T_ROUNDING, T_CAST, BLOCK_M, BLOCK_K, R, T_RB, T_CB, PARTIALS,
        )  # fmt: skip
        turned += batch * (M * code_bits(T_ELEMENT) // 8) * K
        turned_scale += batch * scales_of(M, K, T_RB, T_CB)
        store_turned(
            turned, codes, tile_m, tile_k, M, K, turned_pitch, BLOCK_M, BLOCK_K, R, T_ELEMENT, EVICT
        )  # fmt: skip
        store_scales(
            turned_scale, decode, tile_m, tile_k, M, K, turned_scale_pitch,
            BLOCK_M, BLOCK_K, R, T_RB, T_CB, True,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tiles_m", "tiles_k", "partials"])
def quantize_tiles(
    x, direct, direct_scale, direct_amax, turned, turned_scale, turned_amax,
    M, K, sb, sm, sk, tiles_m, tiles_k, direct_pitch, direct_scale_pitch, turned_pitch, turned_scale_pitch,
    partials,
    D_ELEMENT: tl.constexpr, D_ROUNDING: tl.constexpr, D_CAST: tl.constexpr,
    D_RB: tl.constexpr, D_CB: tl.constexpr,
    T_ELEMENT: tl.constexpr, T_ROUNDING: tl.constexpr, T_CAST: tl.constexpr,
    T_RB: tl.constexpr, T_CB: tl.constexpr, SOURCE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, R: tl.constexpr, GROUP: tl.constexpr, REVERSE: tl.constexpr,
    PARTIALS: tl.constexpr, EVICT: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """Read a tile once and write its codes and scales as they lie, transposed, or both.

    REVERSE starts at the end, where the amax pass before has left x in the cache. AGAIN loads the tile a second
    time, from the cache that is nearest, for what is written transposed.
    """
    pid = tl.program_id(0)
    if REVERSE:
        pid = tl.num_programs(0) - 1 - pid
    batch = tl.program_id(1).to(tl.int64)
    tile_m, tile_k = tile_of(pid, tiles_m, tiles_k, GROUP)
    i = tile_rows(tile_m, BLOCK_M, R)
    j = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (i < M)[:, :, None] & (j < K)[None, None, :]
    at = x + batch * sb + i.to(tl.int64)[:, :, None] * sm + j.to(tl.int64)[None, None, :] * sk
    for turn in tl.static_range(2 if AGAIN else 1):
        write_tile(
            load_source(at, mask, K * sk, SOURCE, "" if AGAIN and turn == 0 else EVICT),
            direct, direct_scale, direct_amax, turned, turned_scale, turned_amax, batch, tile_m, tile_k,
            M, K, direct_pitch, direct_scale_pitch, turned_pitch, turned_scale_pitch, partials,
            D_ELEMENT if turn == 0 else "", D_ROUNDING, D_CAST, D_RB, D_CB,
            T_ELEMENT if turn == 1 or not AGAIN else "", T_ROUNDING, T_CAST, T_RB, T_CB,
            BLOCK_M, BLOCK_K, R, PARTIALS, EVICT,
        )  # fmt: skip


@triton.jit
def scales_of(M, K, RB: tl.constexpr, CB: tl.constexpr):
    """Scales of an [M, K] matrix in blocks of RB x CB."""
    rows = 1 if RB == 0 else tl.cdiv(M, RB)
    columns = 1 if CB == 0 else tl.cdiv(K, CB)
    return rows * columns
