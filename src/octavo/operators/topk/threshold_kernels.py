"""TopK of rows that fit in registers: a threshold from group maxima, then the few columns above it.

The columns of a row fall into ``GROUPS`` groups. The k-th largest of the group maxima is a lower bound of the k-th
largest value, and for ``GROUPS >= 2 k`` only about ``GROUPS * ln(GROUPS / (GROUPS - k))`` values of random data
reach it (9 for k = 8 and 32 groups). Those are written to scratch memory, read back as one small tile and sorted.
Cost: one read of the row and about nine instructions a value, whatever k is.

Rows whose data defeat the bound (many ties, or large values crowded into few groups) take a branch that finds the
exact k-th key by bisection first, so the candidates are exactly k and the result does not depend on luck.

One program holds one row as a tile [CHUNKS, CHUNK]: neighbouring columns run over the lanes and warps, and the chunks
lie in the registers of one thread, so maxima and counts over the first axis need no communication. Which chunks of
a column passed the threshold is one bit each of an int32, hence at most 32 chunks.
"""

import triton
import triton.language as tl

from .key_kernels import (
    LOWEST32,
    LOWEST64,
    column_of64,
    lowest_bit_index,
    packed32,
    packed64,
    popcount,
    value_key,
)


@triton.jit
def _hits(key, cols, threshold, bound, TIES: tl.constexpr):
    """Keys from ``threshold`` on; with ``TIES``, those equal to it only in columns up to ``bound``."""
    if TIES:
        hit = (key > threshold) | ((key == threshold) & (cols <= bound))
    else:
        hit = key >= threshold
    return hit


@triton.jit
def _hit_bits(key, cols, threshold, bound, TIES: tl.constexpr):
    """int32 [C]: bit u is the hit of key [u, C]."""
    chunks: tl.constexpr = key.shape[0]
    bit = (tl.full([chunks], 1, tl.int32) << tl.arange(0, chunks))[:, None]
    return tl.sum(tl.where(_hits(key, cols, threshold, bound, TIES), bit, 0), axis=0)


@triton.jit
def _count_from(key, cols, threshold, bound, TIES: tl.constexpr):
    return tl.sum(tl.sum(_hits(key, cols, threshold, bound, TIES).to(tl.int32), axis=0), axis=0)


@triton.jit
def _exact_threshold(key, cols, k, n):
    """The k-th largest key, and the last column taken among the keys equal to it."""
    threshold = LOWEST32
    if _count_from(key, cols, 0, 0, False) >= k:
        threshold = 0
    for step in range(31):
        trial = threshold + (1 << (30 - step))
        if _count_from(key, cols, trial, 0, False) >= k:
            threshold = trial
    # Columns up to `bound` hold fewer than the k wanted; the next one completes them.
    bound = -1
    size = 1
    while size < n:
        size *= 2
    while size > 0:
        if _count_from(key, cols, threshold, bound + size, True) < k:
            bound += size
        size = size // 2
    return threshold, bound + 1


@triton.jit
def _pop_candidates(
    x_row, stride_col, slots, bits, count, CHUNK: tl.constexpr, LARGEST: tl.constexpr, PACK32: tl.constexpr
):
    """Write the packed key of every set bit of [C] to ``slots``, packed from 0."""
    position = tl.cumsum(count, axis=0) - count
    first = tl.arange(0, CHUNK)
    for _ in range(tl.max(count, axis=0)):
        hit = bits != 0
        cols = lowest_bit_index(bits) * CHUNK + first
        x = tl.load(x_row + cols.to(tl.int64) * stride_col, mask=hit, other=0.0)
        if PACK32:
            key = packed32(x, cols, LARGEST)
        else:
            key = value_key(x, LARGEST)
        tl.store(slots + position, packed64(key, cols), mask=hit)
        position += hit.to(tl.int32)
        bits &= bits - 1


@triton.jit(do_not_specialize=["k"])
def threshold_topk_kernel(
    x_ptr,
    values_ptr,
    indices_ptr,
    scratch_ptr,
    n,
    k,
    stride_row,
    stride_col,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUPS: tl.constexpr,
    CAP: tl.constexpr,
    KP: tl.constexpr,
    LARGEST: tl.constexpr,
    PACK32: tl.constexpr,
    EVEN: tl.constexpr,
):
    """x [rows, n] by strides -> values, indices [rows, k] contiguous, sorted; one program a row.

    ``CHUNK * CHUNKS >= n`` (equal when ``EVEN``), ``CHUNKS <= 32``; ``CHUNK`` a multiple of ``GROUPS >= k``;
    ``CAP >= KP >= k``; scratch int64 [rows, CAP].
    """
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row * stride_row
    cols = (tl.arange(0, CHUNKS) * CHUNK)[:, None] + tl.arange(0, CHUNK)[None, :]
    if EVEN:
        x = tl.load(x_row + cols.to(tl.int64) * stride_col)
    else:
        x = tl.load(x_row + cols.to(tl.int64) * stride_col, mask=cols < n, other=0.0)
    if PACK32:
        key = packed32(x, cols, LARGEST)
    else:
        key = value_key(x, LARGEST)
    if not EVEN:
        key = tl.where(cols < n, key, LOWEST32)

    maxima = tl.max(key, axis=0)
    if GROUPS < CHUNK:
        maxima = tl.max(tl.reshape(maxima, [GROUPS, CHUNK // GROUPS]), axis=1)
    ordered = tl.sort(maxima, descending=True)
    threshold = tl.max(tl.where(tl.arange(0, GROUPS) == k - 1, ordered, LOWEST32), axis=0)
    # With fewer than k groups in use it is the key of padding, which must not be selected.
    threshold = tl.maximum(threshold, LOWEST32 + 1)

    bits = _hit_bits(key, cols, threshold, 0, False)
    count = popcount(bits)
    total = tl.sum(count, axis=0)
    if total > CAP:
        exact, bound = _exact_threshold(key, cols, k, n)
        bits = _hit_bits(key, cols, exact, bound, True)
        count = popcount(bits)
        total = tl.sum(count, axis=0)

    slots = scratch_ptr + row * CAP
    _pop_candidates(x_row, stride_col, slots, bits, count, CHUNK, LARGEST, PACK32)
    tl.debug_barrier()

    places = tl.arange(0, CAP)
    candidates = tl.load(slots + places, mask=places < total, other=LOWEST64)
    if KP < CAP:
        best = tl.topk(candidates, KP)
    else:
        best = tl.sort(candidates, descending=True)
    ranks = tl.arange(0, KP)
    keep = ranks < k
    best_cols = column_of64(best)
    value = tl.load(x_row + best_cols.to(tl.int64) * stride_col, mask=keep, other=0.0)
    tl.store(values_ptr + row * k + ranks, value, mask=keep)
    tl.store(indices_ptr + row * k + ranks, best_cols.to(tl.int64), mask=keep)
