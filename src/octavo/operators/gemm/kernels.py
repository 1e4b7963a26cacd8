"""Triton products of operands that are decoded inside the kernel: both MX, or 16-bit rows by a quantized weight.

``out[M, N] = a[M, K] @ b[N, K].T``. What an operand holds is its KIND:

    mx      e4m3, e5m2 or two e2m1 a byte, with an e8m0 code for 32 elements of the contraction
    block   e4m3 with a float32 scale for 128 x 128 (b alone)
    plain   bfloat16 or float16 (a; b only beside a plain a of its own dtype)

NATIVE gives MX operands and their codes to the matrix instruction (gfx950). Elsewhere they are decoded to 16 bits:
bfloat16 holds every MX value exactly (float32's range of exponents), and beside float16 rows a weight is rounded to
float16 once. SWAP multiplies ``b @ a.T``: the weight's rows then fill the instruction's M, which has at least 16 rows
and 64 on Hopper, and the few rows of ``a`` its N.

Codes lie plain, [rows, K / 32], or swizzled for Blackwell's instructions (cuBLAS's 1-D block scaling layout: tiles of
128 rows by 4 codes, 512 bytes each, 32 x 4 x 4 inside). They are read where they lie.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.matmul.operand_kernels import decode_mx, store_tile, tile_of


@triton.jit
def _code_offsets(first, live, stride, SWIZZLED: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """Where the codes of a tile's rows lie, from the first of BLOCKS along the contraction.

    ``stride`` is that of a row of plain codes, or of 128 rows of swizzled ones, of which 4 divides BLOCKS.
    """
    i = first + tl.minimum(tl.arange(0, ROWS), live - 1)
    j = tl.arange(0, BLOCKS)
    if SWIZZLED:
        rows = i // 128 * stride + i % 32 * 16 + i % 128 // 32 * 4
        cols = j // 4 * 512 + j % 4
    else:
        rows = i * stride
        cols = j
    return rows[:, None] + cols[None, :]


@triton.jit
def _values(stored, codes, like, KIND: tl.constexpr, PACK: tl.constexpr, TRUNCATE: tl.constexpr,
            ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """16-bit (even, odd) columns of a tile of COLS stored elements, or the values twice if a byte holds one."""
    if KIND == "mx":
        even, odd = decode_mx(stored, codes, ROWS, COLS, PACK, TRUNCATE)
        return even.to(like), odd.to(like)
    else:
        # Every e4m3 value is one of bfloat16 and of float16; the scale follows the product.
        value = stored.to(tl.float32).to(like)
        return value, value


@triton.jit
def _times(a, b, acc, SWAP: tl.constexpr):
    if SWAP:
        return tl.dot(b, tl.trans(a), acc)
    else:
        return tl.dot(a, tl.trans(b), acc)


@triton.jit
def _multiply(
    a, b, a_codes, b_codes, acc, like,
    A_KIND: tl.constexpr, B_KIND: tl.constexpr, A_PACK: tl.constexpr, B_PACK: tl.constexpr,
    A_FORMAT: tl.constexpr, B_FORMAT: tl.constexpr, NATIVE: tl.constexpr, SWAP: tl.constexpr,
    TRUNCATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Add the product of two stored tiles; a block's scale is ``b_codes``, one number."""
    if NATIVE and SWAP:
        return tl.dot_scaled(b, b_codes, B_FORMAT, tl.trans(a), a_codes, A_FORMAT, acc)
    elif NATIVE:
        return tl.dot_scaled(a, a_codes, A_FORMAT, tl.trans(b), b_codes, B_FORMAT, acc)
    elif B_KIND == "plain":
        return _times(a, b, acc, SWAP)
    else:
        b_even, b_odd = _values(b, b_codes, like, B_KIND, B_PACK, TRUNCATE, BLOCK_N, BLOCK_K // B_PACK)
        if A_KIND == "mx":
            a_even, a_odd = _values(a, a_codes, like, A_KIND, A_PACK, TRUNCATE, BLOCK_M, BLOCK_K // A_PACK)
        elif B_PACK == 2:
            a_even, a_odd = tl.split(tl.reshape(a, (BLOCK_M, BLOCK_K // 2, 2)))
        else:
            a_even = a
            a_odd = a
        if B_KIND == "block":
            if SWAP:
                return acc + tl.dot(b_even, tl.trans(a_even)) * b_codes
            else:
                return acc + tl.dot(a_even, tl.trans(b_even)) * b_codes
        acc = _times(a_even, b_even, acc, SWAP)
        if B_PACK == 2:
            # The contraction may take its elements in any order, so nothing is put back in place.
            acc = _times(a_odd, b_odd, acc, SWAP)
        return acc


@triton.jit
def _columns(pointers, left, TAIL: tl.constexpr, COLS: tl.constexpr, other: tl.constexpr):
    """A tile, of which only the first ``left`` columns exist if TAIL."""
    if TAIL:
        return tl.load(pointers, mask=(tl.arange(0, COLS) < left)[None, :], other=other)
    else:
        return tl.load(pointers)


@triton.jit
def _tile_offsets(live, stride, ROWS: tl.constexpr, COLS: tl.constexpr):
    # Rows that do not exist are read as the last one that does, and never stored.
    i = tl.minimum(tl.arange(0, ROWS), live - 1)
    return i[:, None] * stride + tl.arange(0, COLS)[None, :]


@triton.jit(
    do_not_specialize=("M", "split_steps", "sos"), do_not_specialize_on_alignment=("M", "split_steps", "sos")
)
def gemm_decoding_tiles(
    a, b, a_scale, b_scale, bias, out, M, N, K, split_steps, sam, sbn, ssa, ssb, sos, som,
    A_KIND: tl.constexpr, B_KIND: tl.constexpr, A_PACK: tl.constexpr, B_PACK: tl.constexpr,
    A_FORMAT: tl.constexpr, B_FORMAT: tl.constexpr, A_SWIZZLED: tl.constexpr, B_SWIZZLED: tl.constexpr,
    NATIVE: tl.constexpr, SWAP: tl.constexpr, TRUNCATE: tl.constexpr, TAIL: tl.constexpr,
    BAND: tl.constexpr, DIES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``out[split, M, N]``: grid (tiles, splits), each split contracting ``split_steps`` tiles; bias is for one split.

    ``sam`` and ``sbn`` are strides of the stored elements' rows, ``ssa`` and ``ssb`` of the scales' (of 128 rows, if
    swizzled or in blocks). BLOCK_K is a multiple of 128, and 128 where b is in blocks, of which BLOCK_N is no more;
    without any scales it may be less.
    """
    a_cols: tl.constexpr = BLOCK_K // A_PACK
    b_cols: tl.constexpr = BLOCK_K // B_PACK
    blocks: tl.constexpr = BLOCK_K // 32
    # Codes of one tile's step to the next: 512 bytes hold 4 of each row.
    a_step: tl.constexpr = BLOCK_K * 4 if A_SWIZZLED else blocks
    b_step: tl.constexpr = BLOCK_K * 4 if B_SWIZZLED else blocks
    like: tl.constexpr = a.dtype.element_ty if A_KIND == "plain" else tl.bfloat16
    tile_m, tile_n = tile_of(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), BAND, DIES)
    split = tl.program_id(1)
    m = tile_m * BLOCK_M
    n = tile_n * BLOCK_N
    first = split * split_steps * BLOCK_K
    last = tl.minimum(first + split_steps * BLOCK_K, K)
    a += m.to(tl.int64) * sam + first // A_PACK
    b += n.to(tl.int64) * sbn + first // B_PACK
    a_offsets = _tile_offsets(M - m, sam, BLOCK_M, a_cols)
    b_offsets = _tile_offsets(N - n, sbn, BLOCK_N, b_cols)
    if A_KIND == "mx":
        a_codes = (
            a_scale + first // BLOCK_K * a_step + _code_offsets(m, M - m, ssa, A_SWIZZLED, BLOCK_M, blocks)
        )
    if B_KIND == "mx":
        b_codes = (
            b_scale + first // BLOCK_K * b_step + _code_offsets(n, N - n, ssb, B_SWIZZLED, BLOCK_N, blocks)
        )
    elif B_KIND == "block":
        b_codes = b_scale + n // 128 * ssb + first // 128
    if SWAP:
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.range(first, last, BLOCK_K, num_stages=STAGES):
        left = last - k
        x = _columns(a + a_offsets, left // A_PACK, TAIL, a_cols, 0.0)
        y = _columns(b + b_offsets, left // B_PACK, TAIL, b_cols, 0.0)
        p = 0
        q = 0
        if A_KIND == "mx":
            p = _columns(a_codes, tl.cdiv(left, 32), TAIL, blocks, 127)
            a_codes += a_step
        if B_KIND == "mx":
            q = _columns(b_codes, tl.cdiv(left, 32), TAIL, blocks, 127)
            b_codes += b_step
        elif B_KIND == "block":
            q = tl.load(b_codes)
            b_codes += 1
        a += a_cols
        b += b_cols
        acc = _multiply(
            x, y, p, q, acc, like, A_KIND, B_KIND, A_PACK, B_PACK, A_FORMAT, B_FORMAT, NATIVE, SWAP, TRUNCATE,
            BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    if SWAP:
        acc = tl.trans(acc)
    if bias is not None:
        j = n + tl.minimum(tl.arange(0, BLOCK_N), N - n - 1)
        acc += tl.load(bias + j).to(tl.float32)[None, :]
    out += split.to(tl.int64) * sos + m.to(tl.int64) * som + n
    store_tile(out, acc, M - m, N - n, som, BLOCK_M, BLOCK_N)


@triton.jit(do_not_specialize=("M",), do_not_specialize_on_alignment=("M",))
def gemm_decode_tiles(
    data, scale, out, M, K, tiles_k, sdm, ss,
    KIND: tl.constexpr, PACK: tl.constexpr, SWIZZLED: tl.constexpr, TRUNCATE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The 16-bit values [M, K] of an ``mx`` or ``block`` operand, of which a tile's rows share one block of 128."""
    cols: tl.constexpr = BLOCK_K // PACK
    blocks: tl.constexpr = BLOCK_K // 32
    m = tl.program_id(0) // tiles_k * BLOCK_M
    step = tl.program_id(0) % tiles_k
    left = K - step * BLOCK_K
    stored = tl.load(
        data + m.to(tl.int64) * sdm + step * cols + _tile_offsets(M - m, sdm, BLOCK_M, cols),
        mask=(tl.arange(0, cols) < left // PACK)[None, :], other=0.0,
    )  # fmt: skip
    like: tl.constexpr = out.dtype.element_ty
    if KIND == "mx":
        codes = (
            scale
            + step * (BLOCK_K * 4 if SWIZZLED else blocks)
            + _code_offsets(m, M - m, ss, SWIZZLED, BLOCK_M, blocks)
        )
        codes = tl.load(codes, mask=(tl.arange(0, blocks) < tl.cdiv(left, 32))[None, :], other=127)
        even, odd = decode_mx(stored, codes, BLOCK_M, cols, PACK, TRUNCATE)
        if PACK == 2:
            even = tl.reshape(tl.join(even, odd), (BLOCK_M, BLOCK_K))
        value = even.to(like)
    else:
        j = tl.minimum(step * (BLOCK_K // 128) + tl.arange(0, BLOCK_K) // 128, (K - 1) // 128)
        value = (stored.to(tl.float32) * tl.load(scale + m // 128 * ss + j)[None, :]).to(like)
    i = tl.arange(0, BLOCK_M)
    mask = (i < M - m)[:, None] & (tl.arange(0, BLOCK_K) < left)[None, :]
    out += m.to(tl.int64) * K + step * BLOCK_K
    tl.store(out + i[:, None] * K + tl.arange(0, BLOCK_K)[None, :], value, mask=mask)
