"""Triton quantization with a transposed output by quads of rows: four loads of every fourth row.

A word of the transposed output holds the codes of four rows that follow each other. Here each of the four is a
tensor [Q, BLOCK_K] of its own, loaded by itself, so that packing needs no exchange between threads; only finished
words are transposed, and a tile of 128 rows writes full lines of 128 bytes. Rows come in fours: M is a multiple of 4.

On sm_90 the conversion of PTX takes two floats and gives both codes in one register: two rows packed on the way. The
largest magnitude of 16-bit values is found two columns at a time. Elsewhere the same is said with integers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.quantize.numerics_kernels import encode_and_scale, is_mx, magnitude_bits, to_codes
from octavo.quantize.source_kernels import load_source
from octavo.quantize.triton_kernels import scales_of, spread_scales, tile_of


@triton.jit
def packed_codes(a, b, c, d, ELEMENT: tl.constexpr, CAST: tl.constexpr):
    """int32 words of the codes of four float32 tensors, ``a`` in the lowest byte."""
    if CAST == "saturates" and ELEMENT == "e4m3fn":
        return tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; "
            "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
            "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    elif CAST == "saturates" and ELEMENT == "e5m2":
        return tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; cvt.rn.satfinite.e5m2x2.f32 low, $2, $1; "
            "cvt.rn.satfinite.e5m2x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
            "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        low = to_codes(a, ELEMENT, CAST).to(tl.int32) | (to_codes(b, ELEMENT, CAST).to(tl.int32) << 8)
        high = to_codes(c, ELEMENT, CAST).to(tl.int32) | (to_codes(d, ELEMENT, CAST).to(tl.int32) << 8)
        return low | (high << 16)


@triton.jit
def quad_bits(a, b, c, d, CAST: tl.constexpr):
    """Magnitude bits of the largest of four values of one dtype."""
    if CAST == "saturates" and a.dtype.primitive_bitwidth == 16:
        # Magnitudes of 16-bit floats are ordered as integers, as those of float32 are, NaN above inf.
        held = tl.inline_asm_elementwise(
            "{ .reg .b32 a, b, c, d; and.b32 a, $1, 0x7fff7fff; and.b32 b, $2, 0x7fff7fff; "
            "and.b32 c, $3, 0x7fff7fff; and.b32 d, $4, 0x7fff7fff; "
            "max.s16x2 a, a, b; max.s16x2 c, c, d; max.s16x2 $0, a, c; }",
            "=r,r,r,r,r",
            [
                a.to(tl.int16, bitcast=True),
                b.to(tl.int16, bitcast=True),
                c.to(tl.int16, bitcast=True),
                d.to(tl.int16, bitcast=True),
            ],
            dtype=tl.int16, is_pure=True, pack=2,
        )  # fmt: skip
        return magnitude_bits(held.to(a.dtype, bitcast=True))
    else:
        low = tl.maximum(magnitude_bits(a), magnitude_bits(b))
        return tl.maximum(low, tl.maximum(magnitude_bits(c), magnitude_bits(d)))


@triton.constexpr_function
def _rows_of(q, rb):
    # Quads of one block: all of them, or those of RB; a block of one row is taken row by row.
    return q if rb == 0 else 1 if rb == 1 else rb // 4


@triton.constexpr_function
def _columns_of(k, cb):
    return k if cb == 0 else cb


@triton.jit
def _blocks(x, Q: tl.constexpr, K: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr):
    # [Q, K] as [row blocks, quads of one, column blocks, columns of one].
    q: tl.constexpr = _rows_of(Q, RB)
    c: tl.constexpr = _columns_of(K, CB)
    return tl.reshape(x, (Q // q, q, K // c, c))


@triton.jit
def _scaled(x, encode, Q: tl.constexpr, K: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr):
    return tl.reshape(_blocks(x, Q, K, RB, CB).to(tl.float32) * encode, (Q, K))


@triton.jit
def _amax_of(
    bits, amax, batch, i, j, M, K, partials,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr, PARTIALS: tl.constexpr,
):  # fmt: skip
    # Amax bits of the blocks that hold the values of which ``bits`` are the magnitudes (i: their rows).
    if RB == 0 and CB == 0:
        p = tl.arange(0, PARTIALS)
        found = tl.load(amax + batch * partials + p, mask=p < partials, other=0)
        return tl.full((1, 1, 1, 1), 0, tl.int32) + tl.max(found, 0)
    elif CB == 0:
        found = tl.load(amax + batch * M + i, mask=i < M, other=0)
        return tl.reshape(found, (BLOCK_Q, 1, 1, 1))
    elif RB == 0:
        found = tl.load(amax + batch * K + j, mask=j < K, other=0)
        return tl.reshape(found, (1, 1, BLOCK_K, 1))
    else:
        blocks = _blocks(bits, BLOCK_Q, BLOCK_K, RB, CB)
        if CB > 1:
            blocks = tl.max(blocks, 3, keep_dims=True)
        if RB > 1:
            blocks = tl.max(blocks, 1, keep_dims=True)
        return blocks


@triton.jit
def _multipliers(bits, ELEMENT: tl.constexpr, ROUNDING: tl.constexpr, CAST: tl.constexpr, RB: tl.constexpr):
    if RB != 1 and CAST == "saturates" and not is_mx(ROUNDING) and bits.numel > 1:
        return spread_scales(bits, ELEMENT, ROUNDING)
    else:
        return encode_and_scale(bits, ELEMENT, ROUNDING)


@triton.jit
def _store_scales(
    scale, decode, tile_m, tile_k, step, M, K, pitch,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    # ``step`` is the row of the quad for blocks of one row, 0 for all others.
    groups: tl.constexpr = BLOCK_Q // _rows_of(BLOCK_Q, RB)
    across: tl.constexpr = BLOCK_K // _columns_of(BLOCK_K, CB)
    rows = 1 if RB == 0 else tl.cdiv(M, RB)
    columns = 1 if CB == 0 else tl.cdiv(K, CB)
    i = tile_m * groups + tl.arange(0, groups)
    if RB == 1:
        i = i * 4 + step
    j = tile_k * across + tl.arange(0, across)
    mask = (i < rows)[:, None] & (j < columns)[None, :]
    i, j = i.to(tl.int64)[:, None], j.to(tl.int64)[None, :]
    offset = j * pitch + i if TURNED else i * pitch + j
    tl.store(scale + offset, tl.reshape(decode, (groups, across)), mask=mask)


@triton.jit
def _store_rows(
    value, data, scale, amax, batch, tile_m, tile_k, step: tl.constexpr, common, M, K, pitch, scale_pitch, partials,
    ELEMENT: tl.constexpr, ROUNDING: tl.constexpr, CAST: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PARTIALS: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    # Codes and scales of every fourth row, as they lie; ``common`` are the magnitudes of the quads.
    i = tile_m * (4 * BLOCK_Q) + tl.arange(0, BLOCK_Q) * 4 + step
    j = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    bits = magnitude_bits(value) if RB == 1 and CB != 0 else common
    found = _amax_of(bits, amax, batch, i, j, M, K, partials, BLOCK_Q, BLOCK_K, RB, CB, PARTIALS)
    encode, decode = _multipliers(found, ELEMENT, ROUNDING, CAST, RB)
    codes = to_codes(_scaled(value, encode, BLOCK_Q, BLOCK_K, RB, CB), ELEMENT, CAST)
    mask = (i < M)[:, None] & (j < K)[None, :]
    tl.store(data + i.to(tl.int64)[:, None] * pitch + j[None, :], codes, mask=mask, eviction_policy=EVICT)
    if RB == 1 or step == 0:
        _store_scales(
            scale, decode, tile_m, tile_k, step, M, K, scale_pitch, BLOCK_Q, BLOCK_K, RB, CB, False
        )  # fmt: skip


@triton.jit
def _load_quad(at, mask, sm, half, SOURCE: tl.constexpr, EVICT: tl.constexpr):
    return (
        load_source(at, mask, half, SOURCE, EVICT),
        load_source(at + sm, mask, half, SOURCE, EVICT),
        load_source(at + 2 * sm, mask, half, SOURCE, EVICT),
        load_source(at + 3 * sm, mask, half, SOURCE, EVICT),
    )


@triton.jit(do_not_specialize=["tiles_m", "tiles_k", "partials"])
def quantize_quads(
    x, direct, direct_scale, direct_amax, turned, turned_scale, turned_amax,
    M, K, sb, sm, sk, tiles_m, tiles_k, direct_pitch, direct_scale_pitch, turned_pitch, turned_scale_pitch,
    partials,
    D_ELEMENT: tl.constexpr, D_ROUNDING: tl.constexpr, D_CAST: tl.constexpr,
    D_RB: tl.constexpr, D_CB: tl.constexpr,
    T_ELEMENT: tl.constexpr, T_ROUNDING: tl.constexpr, T_CAST: tl.constexpr,
    T_RB: tl.constexpr, T_CB: tl.constexpr, SOURCE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, REVERSE: tl.constexpr,
    PARTIALS: tl.constexpr, EVICT: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """As ``triton_kernels.quantize_tiles`` where there is a transposed output of 8-bit codes, T_RB is not 1 and M
    is a multiple of 4; the direct output is optional.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // 4
    pid = tl.program_id(0)
    if REVERSE:
        pid = tl.num_programs(0) - 1 - pid
    batch = tl.program_id(1).to(tl.int64)
    tile_m, tile_k = tile_of(pid, tiles_m, tiles_k, GROUP)
    i = tile_m * BLOCK_M + tl.arange(0, BLOCK_Q) * 4
    j = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (i < M)[:, None] & (j < K)[None, :]
    at = x + batch * sb + i.to(tl.int64)[:, None] * sm + j.to(tl.int64)[None, :] * sk
    a, b, c, d = _load_quad(at, mask, sm, K * sk, SOURCE, "" if AGAIN else EVICT)
    common = quad_bits(a, b, c, d, T_CAST)
    if D_ELEMENT != "":
        direct += batch * M * direct_pitch
        direct_scale += batch * scales_of(M, K, D_RB, D_CB)
        for step in tl.static_range(4):
            _store_rows(
                a if step == 0 else b if step == 1 else c if step == 2 else d,
                direct, direct_scale, direct_amax, batch, tile_m, tile_k, step, common,
                M, K, direct_pitch, direct_scale_pitch, partials,
                D_ELEMENT, D_ROUNDING, D_CAST, D_RB, D_CB, BLOCK_Q, BLOCK_K, PARTIALS, EVICT,
            )  # fmt: skip
        if AGAIN:
            a, b, c, d = _load_quad(at, mask, sm, K * sk, SOURCE, EVICT)
            common = quad_bits(a, b, c, d, T_CAST)
    found = _amax_of(common, turned_amax, batch, i, j, M, K, partials, BLOCK_Q, BLOCK_K, T_RB, T_CB, PARTIALS)
    encode, decode = _multipliers(found, T_ELEMENT, T_ROUNDING, T_CAST, T_RB)
    words = packed_codes(
        _scaled(a, encode, BLOCK_Q, BLOCK_K, T_RB, T_CB), _scaled(b, encode, BLOCK_Q, BLOCK_K, T_RB, T_CB),
        _scaled(c, encode, BLOCK_Q, BLOCK_K, T_RB, T_CB), _scaled(d, encode, BLOCK_Q, BLOCK_K, T_RB, T_CB),
        T_ELEMENT, T_CAST,
    )  # fmt: skip
    turned = (turned + batch * M * K).to(tl.pointer_type(tl.int32))
    q = tile_m * BLOCK_Q + tl.arange(0, BLOCK_Q)
    target = turned + j.to(tl.int64)[:, None] * turned_pitch + q[None, :]
    inside = (j < K)[:, None] & (q < M // 4)[None, :]
    tl.store(target, tl.trans(words), mask=inside, eviction_policy=EVICT)
    turned_scale += batch * scales_of(M, K, T_RB, T_CB)
    _store_scales(
        turned_scale, decode, tile_m, tile_k, 0, M, K, turned_scale_pitch, BLOCK_Q, BLOCK_K, T_RB, T_CB, True
    )  # fmt: skip
