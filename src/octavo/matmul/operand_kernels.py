"""Triton pieces of the matrix products: the order of tiles, operands and their scales, one tile's contraction.

Every product is ``a[M, K] @ b[N, K].T``. A tile is BLOCK_M rows of a by BLOCK_N rows of b; rows that do not exist
are read as the last one that does and never stored, so that only the contraction's tail needs masks. Tiles start
at a 64-bit offset and are addressed from there in 32 bits, which AMD's buffer loads want.

KIND says where the scales go:

    plain        there are none (16- and 32-bit operands)
    epilogue     one a row or one in all: after the contraction
    block        one for BLOCK_K elements of the contraction: a float32 accumulator takes each block's product,
                 scaled (two-level accumulation)
    dequantize   e8m0 for 32 elements, decoded with the values to bfloat16, which holds every e4m3, e5m2 and e2m1
                 value times a power of two exactly, in float32's range of exponents
    scaled       the same scales given to the matrix instruction (gfx950)
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_of(pid, tiles_m, tiles_n, BAND: tl.constexpr, DIES: tl.constexpr):
    """(row tile, column tile) of a program: bands of BAND row tiles, walked down first, share b in the cache.

    Neighbouring programs go to different dies in turn, each with a cache of its own: DIES > 1 gives every die
    a run of neighbouring tiles.
    """
    if DIES > 1:
        total = tiles_m * tiles_n
        die = pid % DIES
        pid = die * (total // DIES) + tl.minimum(die, total % DIES) + pid // DIES
    band = pid // (BAND * tiles_n)
    height = tl.minimum(tiles_m - band * BAND, BAND)
    within = pid - band * BAND * tiles_n
    return band * BAND + within % height, within // height


@triton.jit
def decode_e8m0(codes):
    """2^(code - 127) as float32; NaN for code 255."""
    codes = codes.to(tl.int32)
    bits = tl.where(codes == 0, 0x400000, codes << 23)
    return tl.where(codes == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _decode_e2m1(nibbles):
    # Exponent and mantissa in float32's places are 2^126 too small, subnormals included.
    nibbles = nibbles.to(tl.int32)
    bits = ((nibbles & 7) << 22) | ((nibbles & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def _to_bfloat16(value, TRUNCATE: tl.constexpr):
    # The values are exact in bfloat16: gfx942, which has no conversion instruction, may cut.
    if TRUNCATE:
        return (value.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return value.to(tl.bfloat16)


@triton.jit
def _times_scales(value, codes, ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr):
    blocks = tl.reshape(value, (ROWS, COLS // WIDTH, WIDTH)) * decode_e8m0(codes)[:, :, None]
    return tl.reshape(blocks, (ROWS, COLS))


@triton.jit
def decode_mx(
    stored, codes, ROWS: tl.constexpr, COLS: tl.constexpr, PACK: tl.constexpr, TRUNCATE: tl.constexpr
):
    """bfloat16 values of a tile of COLS stored elements a row: (even columns, odd columns) if two share a byte,
    else the values twice."""
    if PACK == 2:
        low = _times_scales(_decode_e2m1(stored & 0xF), codes, ROWS, COLS, 16)
        high = _times_scales(_decode_e2m1(stored >> 4), codes, ROWS, COLS, 16)
        return _to_bfloat16(low, TRUNCATE), _to_bfloat16(high, TRUNCATE)
    else:
        value = _to_bfloat16(_times_scales(stored.to(tl.float32), codes, ROWS, COLS, 32), TRUNCATE)
        return value, value


@triton.jit
def _interleaved(even, odd, ROWS: tl.constexpr, COLS: tl.constexpr, PACK: tl.constexpr):
    if PACK == 2:
        return tl.reshape(tl.join(even, odd), (ROWS, COLS * 2))
    else:
        return even


@triton.jit
def multiply(a, b, acc, PROMOTE: tl.constexpr, PRECISION: tl.constexpr, BLOCK_K: tl.constexpr):
    """Add the product of two tiles; PROMOTE is how many FP8 products Hopper may add up in its own 14 bits before
    they go to float32, 0 for any number."""
    if PROMOTE == 0:
        return tl.dot(a, tl.trans(b), acc, input_precision=PRECISION)
    elif PROMOTE < BLOCK_K:
        return tl.dot(a, tl.trans(b), acc, max_num_imprecise_acc=PROMOTE)
    else:
        # Given the whole tile's length the compiler chains the tiles, so the sum is written out.
        return acc + tl.dot(a, tl.trans(b), max_num_imprecise_acc=BLOCK_K)


@triton.jit
def multiply_mx(
    a, b, a_codes, b_codes, acc,
    KIND: tl.constexpr, A_PACK: tl.constexpr, B_PACK: tl.constexpr,
    A_FORMAT: tl.constexpr, B_FORMAT: tl.constexpr, TRUNCATE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Add the product of two MX tiles, by the scaled matrix instruction or decoded to bfloat16."""
    if KIND == "scaled":
        return tl.dot_scaled(a, a_codes, A_FORMAT, tl.trans(b), b_codes, B_FORMAT, acc)
    a_even, a_odd = decode_mx(a, a_codes, BLOCK_M, BLOCK_K // A_PACK, A_PACK, TRUNCATE)
    b_even, b_odd = decode_mx(b, b_codes, BLOCK_N, BLOCK_K // B_PACK, B_PACK, TRUNCATE)
    if A_PACK == 2 and B_PACK == 2:
        # The contraction may take its elements in any order, so nothing is put back in place.
        acc = tl.dot(a_even, tl.trans(b_even), acc)
        return tl.dot(a_odd, tl.trans(b_odd), acc)
    left = _interleaved(a_even, a_odd, BLOCK_M, BLOCK_K // A_PACK, A_PACK)
    right = _interleaved(b_even, b_odd, BLOCK_N, BLOCK_K // B_PACK, B_PACK)
    return tl.dot(left, tl.trans(right), acc)


@triton.jit
def row_scales(
    scale, row, live, block, sr, sk,
    DIV: tl.constexpr, ONE: tl.constexpr, E8M0: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Scales of a tile's rows at one block of the contraction, float32: one if ONE, else [BLOCK].

    DIV rows share a scale; strides are 0 along a whole dimension.
    """
    if ONE:
        value = tl.load(scale + (row // DIV).to(tl.int64) * sr + block * sk)
    else:
        i = row + tl.minimum(tl.arange(0, BLOCK), live - 1)
        value = tl.load(scale + (i // DIV).to(tl.int64) * sr + block * sk)
    if E8M0:
        value = decode_e8m0(value)
    return value


@triton.jit
def outer(sa, sb, A_ONE: tl.constexpr, B_ONE: tl.constexpr):
    """The product of two sets of scales, broadcastable to a tile."""
    # Scale times scale first: the accumulator times one of two far-apart scales could overflow.
    if A_ONE and B_ONE:
        return sa * sb
    elif A_ONE:
        return (sa * sb)[None, :]
    elif B_ONE:
        return (sa * sb)[:, None]
    else:
        return sa[:, None] * sb[None, :]


@triton.jit
def _load_left(pointers, left, other: tl.constexpr, COLS: tl.constexpr):
    """The first ``left`` columns of a tile, and ``other`` beyond."""
    return tl.load(pointers, mask=(tl.arange(0, COLS) < left)[None, :], other=other)


@triton.jit
def _left_of(tile, left, COLS: tl.constexpr):
    """The first ``left`` columns of a tile, and zeros beyond."""
    return tl.where((tl.arange(0, COLS) < left)[None, :], tile, tl.zeros_like(tile))


@triton.jit
def _offsets(live, stride_row, stride_k, ROWS: tl.constexpr, COLS: tl.constexpr):
    i = tl.minimum(tl.arange(0, ROWS), live - 1)
    return i[:, None] * stride_row + tl.arange(0, COLS)[None, :] * stride_k


@triton.jit
def accumulate(
    a, b, a_scale, b_scale, a_box, b_box,
    a_box_row, b_box_row, a_row, b_row, a_live, b_live, first, last,
    sam, sak, sbn, sbk, ssam, ssak, ssbn, ssbk,
    KIND: tl.constexpr, A_PACK: tl.constexpr, B_PACK: tl.constexpr,
    A_FORMAT: tl.constexpr, B_FORMAT: tl.constexpr,
    A_DIV: tl.constexpr, B_DIV: tl.constexpr, A_ONE: tl.constexpr, B_ONE: tl.constexpr,
    E8M0: tl.constexpr, PROMOTE: tl.constexpr, PRECISION: tl.constexpr, TRUNCATE: tl.constexpr,
    TMA: tl.constexpr, TAIL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """float32 [BLOCK_M, BLOCK_N] of the contraction over [first, last) of one tile; epilogue scales are not in it.

    ``a`` and ``b`` point at the tiles' first rows; ``a_row`` and ``b_row`` are those rows as the scales count
    them; ``a_box_row`` and ``b_box_row`` as the tensor descriptors do. A whole number of BLOCK_K is contracted
    without masks, and the rest, if TAIL, with one.
    """
    a_cols: tl.constexpr = BLOCK_K // A_PACK
    b_cols: tl.constexpr = BLOCK_K // B_PACK
    if not TMA:
        a_offsets = _offsets(a_live, sam, sak, BLOCK_M, a_cols)
        b_offsets = _offsets(b_live, sbn, sbk, BLOCK_N, b_cols)
    a += (first // A_PACK).to(tl.int64) * sak
    b += (first // B_PACK).to(tl.int64) * sbk
    whole = (last - first) // BLOCK_K
    mx: tl.constexpr = KIND == "dequantize" or KIND == "scaled"
    blocks: tl.constexpr = BLOCK_K // 32
    if mx:
        a_codes = a_scale + a_row.to(tl.int64) * ssam + (first // 32) * ssak
        b_codes = b_scale + b_row.to(tl.int64) * ssbn + (first // 32) * ssbk
        a_code_offsets = _offsets(a_live, ssam, ssak, BLOCK_M, blocks)
        b_code_offsets = _offsets(b_live, ssbn, ssbk, BLOCK_N, blocks)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(whole):
        if TMA:
            k = first + step * BLOCK_K
            x = a_box.load([a_box_row, k // A_PACK])
            y = b_box.load([b_box_row, k // B_PACK])
        else:
            x = tl.load(a + a_offsets)
            y = tl.load(b + b_offsets)
            a += a_cols * sak
            b += b_cols * sbk
        if KIND == "block":
            # Before the product, which hides their way from memory.
            index = first // BLOCK_K + step
            sa = row_scales(a_scale, a_row, a_live, index, ssam, ssak, A_DIV, A_ONE, E8M0, BLOCK_M)
            sb = row_scales(b_scale, b_row, b_live, index, ssbn, ssbk, B_DIV, B_ONE, E8M0, BLOCK_N)
            acc += tl.dot(x, tl.trans(y), max_num_imprecise_acc=BLOCK_K) * outer(sa, sb, A_ONE, B_ONE)
        elif mx:
            p = tl.load(a_codes + a_code_offsets)
            q = tl.load(b_codes + b_code_offsets)
            a_codes += blocks * ssak
            b_codes += blocks * ssbk
            acc = multiply_mx(
                x, y, p, q, acc, KIND, A_PACK, B_PACK, A_FORMAT, B_FORMAT, TRUNCATE, BLOCK_M, BLOCK_N, BLOCK_K
            )
        else:
            acc = multiply(x, y, acc, PROMOTE, PRECISION, BLOCK_K)
    left = last - first - whole * BLOCK_K
    if TAIL and left > 0:
        if TMA:
            k = first + whole * BLOCK_K
            x = _left_of(a_box.load([a_box_row, k // A_PACK]), left // A_PACK, a_cols)
            y = _left_of(b_box.load([b_box_row, k // B_PACK]), left // B_PACK, b_cols)
        else:
            x = _load_left(a + a_offsets, left // A_PACK, 0.0, a_cols)
            y = _load_left(b + b_offsets, left // B_PACK, 0.0, b_cols)
        if KIND == "block":
            index = first // BLOCK_K + whole
            sa = row_scales(a_scale, a_row, a_live, index, ssam, ssak, A_DIV, A_ONE, E8M0, BLOCK_M)
            sb = row_scales(b_scale, b_row, b_live, index, ssbn, ssbk, B_DIV, B_ONE, E8M0, BLOCK_N)
            acc += tl.dot(x, tl.trans(y), max_num_imprecise_acc=BLOCK_K) * outer(sa, sb, A_ONE, B_ONE)
        elif mx:
            p = _load_left(a_codes + a_code_offsets, tl.cdiv(left, 32), 127, blocks)
            q = _load_left(b_codes + b_code_offsets, tl.cdiv(left, 32), 127, blocks)
            acc = multiply_mx(
                x, y, p, q, acc, KIND, A_PACK, B_PACK, A_FORMAT, B_FORMAT, TRUNCATE, BLOCK_M, BLOCK_N, BLOCK_K
            )
        else:
            acc = multiply(x, y, acc, PROMOTE, PRECISION, BLOCK_K)
    return acc


@triton.jit
def store_tile(out, acc, live_m, live_n, som, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Store the live rows and columns of a tile at ``out``, rounded once."""
    i = tl.arange(0, BLOCK_M)
    j = tl.arange(0, BLOCK_N)
    mask = (i < live_m)[:, None] & (j < live_n)[None, :]
    tl.store(out + i[:, None] * som + j[None, :], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _finish_columns(
    acc, out, bias, a_scale, b_scale, a_row, b_row, a_live, b_live, store_m, ssam, ssbn, som,
    KIND: tl.constexpr, A_DIV: tl.constexpr, B_DIV: tl.constexpr, A_ONE: tl.constexpr, B_ONE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    if KIND == "epilogue":
        sa = row_scales(a_scale, a_row, a_live, 0, ssam, 0, A_DIV, A_ONE, False, BLOCK_M)
        sb = row_scales(b_scale, b_row, b_live, 0, ssbn, 0, B_DIV, B_ONE, False, BLOCK_N)
        acc = acc * outer(sa, sb, A_ONE, B_ONE)
    if bias is not None:
        j = tl.minimum(tl.arange(0, BLOCK_N), b_live - 1)
        acc += tl.load(bias + b_row + j).to(tl.float32)[None, :]
    store_tile(out, acc, store_m, b_live, som, BLOCK_M, BLOCK_N)


@triton.jit
def finish(
    acc, out, bias, a_scale, b_scale, a_row, b_row, a_live, b_live, store_m, ssam, ssbn, som,
    KIND: tl.constexpr, A_DIV: tl.constexpr, B_DIV: tl.constexpr, A_ONE: tl.constexpr, B_ONE: tl.constexpr,
    HALVES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Epilogue scales, the bias (None for none) at the rows of b, and the store of ``store_m`` rows.

    HALVES takes the columns in two parts, so that a wide accumulator leaves registers for their scales.
    """
    if HALVES:
        half: tl.constexpr = BLOCK_N // 2
        left, right = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, half)), (0, 2, 1)))
        _finish_columns(
            left, out, bias, a_scale, b_scale, a_row, b_row, a_live, b_live, store_m, ssam, ssbn, som,
            KIND, A_DIV, B_DIV, A_ONE, B_ONE, BLOCK_M, half,
        )  # fmt: skip
        _finish_columns(
            right, out + half, bias, a_scale, b_scale, a_row, b_row + half, a_live, b_live - half, store_m,
            ssam, ssbn, som, KIND, A_DIV, B_DIV, A_ONE, B_ONE, BLOCK_M, half,
        )  # fmt: skip
    else:
        _finish_columns(
            acc, out, bias, a_scale, b_scale, a_row, b_row, a_live, b_live, store_m, ssam, ssbn, som,
            KIND, A_DIV, B_DIV, A_ONE, B_ONE, BLOCK_M, BLOCK_N,
        )  # fmt: skip
