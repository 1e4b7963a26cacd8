"""Triton quantization of ragged groups of rows, with the group ends read on the device.

``offs`` [G] are cumulative ends; the padded layout (:mod:`octavo.quantize.grouped`) starts each group at a
multiple of ``align``. Every program finds the few groups that its rows belong to and walks over them, so a
launch depends on the number of rows and of groups alone, never on their sizes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.quantize.numerics_kernels import encode_and_scale, magnitude_bits, scaled_codes
from octavo.quantize.triton_kernels import (
    as_blocks,
    block_amax,
    store_direct,
    store_scales,
    store_turned,
    tile_rows,
)

_BEYOND = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _load_ends(offs, G, GROUPS: tl.constexpr):
    g = tl.arange(0, GROUPS)
    return tl.load(offs + g, mask=g < G, other=_BEYOND)


@triton.jit
def _load_padded_ends(offs, G, align, GROUPS: tl.constexpr):
    g = tl.arange(0, GROUPS)
    ends = tl.load(offs + g, mask=g < G, other=0)
    starts = tl.load(offs + g - 1, mask=(g > 0) & (g < G), other=0)
    ends = tl.cumsum(tl.cdiv(ends - starts, align) * align, 0)
    return tl.where(g < G, ends, _BEYOND)


@triton.jit
def _group_of(ends, position):
    return tl.sum((ends <= position).to(tl.int32), 0)


@triton.jit
def _start_of(ends, group, GROUPS: tl.constexpr):
    # Ends do not decrease, so the largest one before the group is where it starts.
    g = tl.arange(0, GROUPS)
    return tl.max(tl.where(g < group, ends, 0), 0)


@triton.jit
def _wide(number):
    # int64 [1]; a loop index may be a plain integer.
    return tl.arange(0, 1).to(tl.int64) + number


@triton.jit(do_not_specialize=["G", "tiles_k"])
def group_amax(
    x, offs, amax, M, K, sm, sk, G, tiles_k,
    ONE: tl.constexpr, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Amax bits of each group: [G] if ONE, else of each of its columns, [G, K]; starts at zero."""
    pid = tl.program_id(0)
    tile_m, tile_k = pid // tiles_k, pid % tiles_k
    i = tile_rows(tile_m, BLOCK_M, R)
    j = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (i < M)[:, :, None] & (j < K)[None, None, :]
    source = x + i.to(tl.int64)[:, :, None] * sm + j.to(tl.int64)[None, None, :] * sk
    bits = magnitude_bits(tl.load(source, mask=mask, other=0.0))
    ends = _load_ends(offs, G, GROUPS)
    first = _group_of(ends, tile_m * BLOCK_M)
    last = tl.minimum(_group_of(ends, tile_m * BLOCK_M + BLOCK_M - 1), G - 1)
    for group in range(first, last + 1):
        start = tl.load(offs + group - 1, mask=group > 0, other=0)
        end = tl.load(offs + group)
        inside = ((i >= start) & (i < end))[:, :, None]
        columns = tl.max(tl.max(tl.where(inside, bits, 0), 0), 0)
        if ONE:
            tl.atomic_max(amax + group, tl.max(columns, 0), sem="relaxed")
        else:
            tl.atomic_max(amax + _wide(group) * K + j, columns, mask=j < K, sem="relaxed")


@triton.jit(do_not_specialize=["G", "tiles_k"])
def quantize_group_rows(
    x, offs, amax, data, scale, M, K, sm, sk, G, tiles_k,
    ELEMENT: tl.constexpr, ROUNDING: tl.constexpr, CAST: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Rows as they lie with one scale a group, spread as [M, 1]; past the last end zeros with scale 1."""
    pid = tl.program_id(0)
    tile_m, tile_k = pid // tiles_k, pid % tiles_k
    i = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    ends = _load_ends(offs, G, GROUPS)
    first = _group_of(ends, tile_m * BLOCK_M)
    last = tl.minimum(_group_of(ends, tile_m * BLOCK_M + BLOCK_M - 1), G - 1)
    encodes = tl.zeros((BLOCK_M,), tl.float32)
    decodes = tl.full((BLOCK_M,), 1.0, tl.float32)
    for group in range(first, last + 1):
        start = tl.load(offs + group - 1, mask=group > 0, other=0)
        inside = (i >= start) & (i < tl.load(offs + group))
        encode, decode = encode_and_scale(tl.load(amax + group + tl.arange(0, 1)), ELEMENT, ROUNDING)
        encodes = tl.where(inside, encode, encodes)
        decodes = tl.where(inside, decode, decodes)
    # Rows of no group are not read: what they hold is not the caller's promise.
    live = i < tl.load(offs + G - 1)
    mask = live[:, None] & (j < K)[None, :]
    source = x + i.to(tl.int64)[:, None] * sm + j.to(tl.int64)[None, :] * sk
    codes = scaled_codes(tl.load(source, mask=mask, other=0.0), encodes[:, None], ELEMENT, CAST)
    codes = tl.reshape(codes, (1, BLOCK_M, BLOCK_K))
    store_direct(data, codes, tile_m, tile_k, M, K, K, BLOCK_M, BLOCK_K, 1, ELEMENT, "")
    if tile_k == 0:
        tl.store(scale + i, decodes, mask=i < M)


@triton.jit(do_not_specialize=["G", "align", "tiles_p", "tiles_k"])
def quantize_group_columns(
    x, offs, amax, data, scale, M, K, capacity, sm, sk, pitch, scale_pitch, G, align, tiles_p, tiles_k,
    ELEMENT: tl.constexpr, ROUNDING: tl.constexpr, CAST: tl.constexpr,
    RB: tl.constexpr, CB: tl.constexpr, ONE: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """The transpose in the padded group layout: data [K, capacity], padding zero before the scale.

    RB is 0 for one scale a group (ONE) or one a group and column, from ``amax``; else blocks of RB rows of
    x by CB of its columns, which the alignment keeps within one group, as it does the R rows of a thread.
    """
    pid = tl.program_id(0)
    tile_p, tile_k = pid // tiles_k, pid % tiles_k
    p = tile_rows(tile_p, BLOCK_P, R)
    p0 = tile_p * BLOCK_P + tl.arange(0, BLOCK_P // R) * R
    j = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    padded = _load_padded_ends(offs, G, align, GROUPS)
    first = _group_of(padded, tile_p * BLOCK_P)
    last = tl.minimum(_group_of(padded, tile_p * BLOCK_P + BLOCK_P - 1), G - 1)
    to = _start_of(padded, first, GROUPS)
    row = tl.full((R, BLOCK_P // R), -1, tl.int32)
    if RB == 0:
        encodes = tl.zeros((BLOCK_P // R, 1 if ONE else BLOCK_K), tl.float32)
    for group in range(first, last + 1):
        start = tl.load(offs + group - 1, mask=group > 0, other=0)
        size = tl.load(offs + group) - start
        row = tl.where((p >= to) & (p < to + size), p - to + start, row)
        until = to + tl.cdiv(size, align) * align
        if RB == 0:
            if ONE:
                bits = tl.load(amax + group + tl.arange(0, 1))
            else:
                bits = tl.load(amax + _wide(group) * K + j, mask=j < K, other=0)
            encode, _ = encode_and_scale(bits, ELEMENT, ROUNDING)
            inside = ((p0 >= to) & (p0 < until))[:, None]
            encodes = tl.where(inside, encode[None, :], encodes)
        to = until
    mask = (row >= 0)[:, :, None] & (j < K)[None, None, :]
    source = x + row.to(tl.int64)[:, :, None] * sm + j.to(tl.int64)[None, None, :] * sk
    loaded = tl.load(source, mask=mask, other=0.0)
    if RB == 0:
        codes = scaled_codes(loaded, encodes[None, :, :], ELEMENT, CAST)
        _store_group_scales(scale, amax, tile_p, tile_k, tiles_p, j, K, G, ELEMENT, ROUNDING, ONE)
    else:
        bits = block_amax(as_blocks(magnitude_bits(loaded), BLOCK_P, BLOCK_K, R, RB, CB), RB, CB)
        encode, decode = encode_and_scale(bits, ELEMENT, ROUNDING)
        blocks = scaled_codes(as_blocks(loaded, BLOCK_P, BLOCK_K, R, RB, CB), encode, ELEMENT, CAST)
        codes = tl.reshape(blocks, (R, BLOCK_P // R, BLOCK_K))
        store_scales(
            scale, decode, tile_p, tile_k, capacity, K, scale_pitch, BLOCK_P, BLOCK_K, R, RB, CB, True
        )  # fmt: skip
    store_turned(data, codes, tile_p, tile_k, capacity, K, pitch, BLOCK_P, BLOCK_K, R, ELEMENT, "")


@triton.jit
def _store_group_scales(
    scale, amax, tile_p, tile_k, tiles_p, j, K, G,
    ELEMENT: tl.constexpr, ROUNDING: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    # Empty groups own no tile and yet have a scale, so the tiles share out the groups by number.
    for group in range(tile_p, G, tiles_p):
        if ONE:
            bits = tl.load(amax + group + tl.arange(0, 1))
            _, decode = encode_and_scale(bits, ELEMENT, ROUNDING)
            if tile_k == 0:
                tl.store(scale + group + tl.arange(0, 1), decode)
        else:
            at = _wide(group) * K + j
            _, decode = encode_and_scale(tl.load(amax + at, mask=j < K, other=0), ELEMENT, ROUNDING)
            tl.store(scale + at, decode, mask=j < K)
