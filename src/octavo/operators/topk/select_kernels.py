"""TopK of long rows and large k by streaming: threshold, candidates, exact selection, sort.

A program streams one row (or, with ``SPLITS``, one part of it) twice. The first pass keeps the maximum of every
group of columns equal modulo ``GROUPS``; the k-th largest of these, found by bisection, bounds the k-th largest value
from below, and for ``GROUPS >= 2 k`` random data leave at most about 1.4 k columns above it. The second pass packs
those into scratch memory, from where a bisection on unique 64-bit keys takes exactly k.

If the candidates do not fit (many ties, or periodic data that crowd the largest values into few groups), counting
passes raise the threshold until they do, or until it is exact; ties at an exact threshold are taken by column. The
result is the same in every case and in every run.

Parts of a row write their k candidates as packed keys, and the same kernel selects from those (``PACKED``).
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
def _keys(x, cols, LARGEST: tl.constexpr, PACK32: tl.constexpr, PACKED: tl.constexpr):
    """int32 keys and true columns of loaded elements at ``cols``."""
    if PACKED:
        key = (x >> 32).to(tl.int32)
        cols = column_of64(x)
    elif PACK32:
        key = packed32(x, cols, LARGEST)
    else:
        key = value_key(x, LARGEST)
    return key, cols


@triton.jit
def _tile(
    x_row,
    start,
    end,
    stride_col,
    U: tl.constexpr,
    C: tl.constexpr,
    LARGEST: tl.constexpr,
    PACK32: tl.constexpr,
    PACKED: tl.constexpr,
):
    """int32 keys [U, C] of ``U * C`` columns from ``start`` on; the lowest key past ``end``."""
    cols = start + (tl.arange(0, U) * C)[:, None] + tl.arange(0, C)[None, :]
    mask = cols < end
    x = tl.load(x_row + cols.to(tl.int64) * stride_col, mask=mask, other=0)
    key, _ = _keys(x, cols, LARGEST, PACK32, PACKED)
    return tl.where(mask, key, LOWEST32)


@triton.jit
def _block(
    x_row,
    start,
    end,
    stride_col,
    SIZE: tl.constexpr,
    LARGEST: tl.constexpr,
    PACK32: tl.constexpr,
    PACKED: tl.constexpr,
):
    """int32 keys and columns of ``SIZE`` columns from ``start`` on; the lowest key past ``end``."""
    cols = start + tl.arange(0, SIZE)
    mask = cols < end
    x = tl.load(x_row + cols.to(tl.int64) * stride_col, mask=mask, other=0)
    key, cols = _keys(x, cols, LARGEST, PACK32, PACKED)
    return tl.where(mask, key, LOWEST32), cols


@triton.jit
def _kth_largest(keys, k):
    """A lower bound of the k-th largest of int32 ``keys`` that exactly k reach, or the k-th largest itself."""
    threshold = LOWEST32
    if tl.sum((keys >= 0).to(tl.int32), axis=0) >= k:
        threshold = 0
    bit = 1 << 30
    while bit > 0:
        reach = tl.sum((keys >= threshold + bit).to(tl.int32), axis=0)
        if reach >= k:
            threshold += bit
        bit = tl.where(reach == k, 0, bit >> 1)
    return threshold


@triton.jit
def _kth_largest64(keys, k, low, high):
    """A lower bound that exactly k of the unique int64 ``keys`` reach; at least k reach ``low``, fewer ``high``."""
    while high - low > 1:
        middle = low + ((high - low) >> 1)
        reach = tl.sum((keys >= middle).to(tl.int32), axis=0)
        if reach >= k:
            low = middle
        else:
            high = middle
        high = tl.where(reach == k, low, high)
    return low


@triton.jit
def _count_row(
    x_row,
    begin,
    end,
    stride_col,
    threshold,
    SIZE: tl.constexpr,
    LARGEST: tl.constexpr,
    PACK32: tl.constexpr,
    PACKED: tl.constexpr,
):
    count = tl.zeros([SIZE], tl.int32)
    for start in range(begin, end, SIZE):
        key, _ = _block(x_row, start, end, stride_col, SIZE, LARGEST, PACK32, PACKED)
        count += (key >= threshold).to(tl.int32)
    return tl.sum(count, axis=0)


@triton.jit
def _emit_all(
    x_row,
    begin,
    end,
    stride_col,
    slots,
    threshold,
    CAP: tl.constexpr,
    U: tl.constexpr,
    C: tl.constexpr,
    LARGEST: tl.constexpr,
    PACK32: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Pack the keys from ``threshold`` on into ``slots``; returns how many: those past ``CAP`` are not written.

    Hits are few, so they are found as bits of one integer for the ``U`` columns of a thread, and read again.
    """
    bit = (tl.full([U], 1, tl.int32) << tl.arange(0, U))[:, None]
    written = 0
    for start in range(begin, end, U * C):
        key = _tile(x_row, start, end, stride_col, U, C, LARGEST, PACK32, PACKED)
        bits = tl.sum(tl.where(key >= threshold, bit, 0), axis=0)
        count = popcount(bits)
        position = written + tl.cumsum(count, axis=0) - count
        for _ in range(tl.max(count, axis=0)):
            hit = bits != 0
            cols = start + lowest_bit_index(bits) * C + tl.arange(0, C)
            x = tl.load(x_row + cols.to(tl.int64) * stride_col, mask=hit, other=0)
            found, true_cols = _keys(x, cols, LARGEST, PACK32, PACKED)
            tl.store(slots + position, packed64(found, true_cols), mask=hit & (position < CAP))
            position += hit.to(tl.int32)
            bits &= bits - 1
        written += tl.sum(count, axis=0)
    return written


@triton.jit
def _emit_ties(
    x_row,
    begin,
    end,
    stride_col,
    slots,
    threshold,
    ties,
    CAP: tl.constexpr,
    SIZE: tl.constexpr,
    LARGEST: tl.constexpr,
    PACK32: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Pack the keys above ``threshold`` and the first ``ties`` equal to it into ``slots``, in column order.

    Returns how many there are; those past ``CAP`` are counted, not written.
    """
    above_before = 0
    equal_before = 0
    for start in range(begin, end, SIZE):
        key, cols = _block(x_row, start, end, stride_col, SIZE, LARGEST, PACK32, PACKED)
        above = (key > threshold).to(tl.int32)
        equal = (key == threshold).to(tl.int32)
        # Two running counts in one scan: a block is far shorter than 65536.
        both = above + (equal << 16)
        through = tl.cumsum(both, axis=0)
        before = through - both
        equal_rank = equal_before + (before >> 16)
        position = above_before + (before & 0xFFFF) + tl.minimum(equal_rank, ties)
        hit = (key > threshold) | ((key == threshold) & (equal_rank < ties))
        tl.store(slots + position, packed64(key, cols), mask=hit & (position < CAP))
        block_total = tl.sum(both, axis=0)
        above_before += block_total & 0xFFFF
        equal_before += block_total >> 16
    return above_before + tl.minimum(equal_before, ties)


@triton.jit
def _raise_threshold(
    x_row,
    begin,
    end,
    stride_col,
    k,
    threshold,
    CAP: tl.constexpr,
    SIZE: tl.constexpr,
    LARGEST: tl.constexpr,
    PACK32: tl.constexpr,
    PACKED: tl.constexpr,
):
    """A threshold that k to CAP columns reach, else the exact k-th key; and how many ties to take at it."""
    low = threshold.to(tl.int64)
    high = low * 0 + 2147483648
    middle = low + 1
    ties = CAP
    while high - low > 1:
        reach = _count_row(x_row, begin, end, stride_col, middle.to(tl.int32), SIZE, LARGEST, PACK32, PACKED)
        if reach >= k:
            low = middle
        else:
            high = middle
            ties = k - reach
        if (reach >= k) & (reach <= CAP):
            high = low
            ties = CAP
        middle = low + ((high - low) >> 1)
    return low.to(tl.int32), ties


@triton.jit(do_not_specialize=["k"])
def select_topk_kernel(
    x_ptr,
    source_ptr,
    values_ptr,
    indices_ptr,
    scratch_ptr,
    partial_ptr,
    n,
    k,
    span,
    stride_row,
    stride_col,
    source_stride_row,
    source_stride_col,
    SPLITS: tl.constexpr,
    GROUPS: tl.constexpr,
    UNROLL: tl.constexpr,
    CAP: tl.constexpr,
    KP: tl.constexpr,
    LARGEST: tl.constexpr,
    PACK32: tl.constexpr,
    PACKED: tl.constexpr,
    SORTED: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Top k of x [rows, n] by strides; grid (rows * SPLITS,).

    With ``SPLITS`` above 1 a program takes ``span`` columns (at least k) and writes ``KP`` packed keys to ``partial``
    int64 [rows, SPLITS, KP]; otherwise values, indices [rows, k] contiguous. ``PACKED``: x is such keys, and the
    values come from ``source``. ``GROUPS >= 2 k`` and ``CAP >= 2 k`` are powers of two; ``KP >= k``; ``UNROLL`` at
    most 32; ``scratch`` int64 [rows * SPLITS, CAP]. ``ALIGNED``: n and span are multiples of 16.
    """
    program = tl.program_id(0).to(tl.int64)
    row = program // SPLITS
    begin = 0
    end = n
    if SPLITS > 1:
        begin = (program % SPLITS).to(tl.int32) * span
        end = tl.minimum(begin + span, n)
    if ALIGNED:
        begin = tl.multiple_of(begin, 16)
        end = tl.multiple_of(end, 16)
    x_row = x_ptr + row * stride_row
    slots = scratch_ptr + program * CAP

    maxima = tl.full([GROUPS], LOWEST32, tl.int32)
    for start in range(begin, end, GROUPS * UNROLL):
        key = _tile(x_row, start, end, stride_col, UNROLL, GROUPS, LARGEST, PACK32, PACKED)
        maxima = tl.maximum(maxima, tl.max(key, axis=0))
    # With fewer than k groups in use the k-th is the key of padding, which must not be selected.
    threshold = tl.maximum(_kth_largest(maxima, k), LOWEST32 + 1)

    total = _emit_all(
        x_row, begin, end, stride_col, slots, threshold, CAP, UNROLL, GROUPS, LARGEST, PACK32, PACKED
    )
    if total > CAP:
        threshold, ties = _raise_threshold(
            x_row, begin, end, stride_col, k, threshold, CAP, GROUPS, LARGEST, PACK32, PACKED
        )
        total = _emit_ties(
            x_row, begin, end, stride_col, slots, threshold, ties, CAP, GROUPS, LARGEST, PACK32, PACKED
        )
    tl.debug_barrier()

    places = tl.arange(0, CAP)
    candidates = tl.load(slots + places, mask=places < total, other=LOWEST64)
    wanted = tl.minimum(k, total)
    low = threshold.to(tl.int64) << 32
    high = tl.max(candidates, axis=0) + 1
    chosen = candidates >= _kth_largest64(candidates, wanted, low, high)
    taken = chosen.to(tl.int32)
    rank = tl.cumsum(taken, axis=0) - taken
    tl.debug_barrier()
    tl.store(slots + rank, candidates, mask=chosen)
    tl.debug_barrier()

    ranks = tl.arange(0, KP)
    best = tl.load(slots + ranks, mask=ranks < wanted, other=LOWEST64)
    if SPLITS > 1:
        tl.store(partial_ptr + program * KP + ranks, best)
    else:
        if SORTED:
            best = tl.sort(best, descending=True)
        keep = ranks < k
        cols = column_of64(best)
        source = source_ptr + row * source_stride_row + cols.to(tl.int64) * source_stride_col
        value = tl.load(source, mask=keep, other=0.0)
        tl.store(values_ptr + row * k + ranks, value, mask=keep)
        tl.store(indices_ptr + row * k + ranks, cols.to(tl.int64), mask=keep)
