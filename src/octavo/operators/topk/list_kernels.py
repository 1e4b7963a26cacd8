"""TopK of short rows with small k: sorted lists in registers.

A row is spread over ``LANES`` threads. Each thread sorts its columns ``KP`` at a time with a fixed network of
compare-exchanges and merges them into its running list of ``KP``; then the heads of the lists are popped ``KP``
times by a maximum over the lanes. Nothing leaves the registers between the load of the row and the result.

Every wire of the network is its own ``[ROWS, LANES]`` tensor, one element a thread, so a compare-exchange is a few
register instructions and the only communication is the maximum over the lanes.
"""

import triton
import triton.language as tl

from .key_kernels import column_of32, column_of64, load_wires, merge_wires, sort_wires


@triton.jit(do_not_specialize=["m", "k"])
def list_topk_kernel(
    x_ptr,
    values_ptr,
    indices_ptr,
    m,
    n,
    k,
    stride_row,
    stride_col,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    VEC: tl.constexpr,
    KP: tl.constexpr,
    BLOCKS: tl.constexpr,
    LARGEST: tl.constexpr,
    PACK32: tl.constexpr,
):
    """x [m, n] by strides -> values, indices [m, k] contiguous, sorted. ``BLOCKS * LANES * KP >= n``, ``KP >= k``."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = rows < m
    row_offsets = rows.to(tl.int64) * stride_row
    kind: tl.constexpr = "packed32" if PACK32 else "packed64"
    best = sort_wires(
        load_wires(x_ptr, row_offsets, row_mask, n, stride_col, 0, LANES, VEC, KP, LARGEST, kind)
    )
    for block in tl.static_range(1, BLOCKS):
        start = block * LANES * KP
        more = load_wires(x_ptr, row_offsets, row_mask, n, stride_col, start, LANES, VEC, KP, LARGEST, kind)
        best = merge_wires(best, sort_wires(more))

    lanes = tl.arange(0, LANES)[None, :]
    # One [ROWS, LANES] tensor for every LANES results; what it starts from is overwritten or never stored.
    results = ()
    for _ in tl.static_range((KP + LANES - 1) // LANES):
        results = results + (best[0],)
    for r in tl.static_range(KP):
        top = tl.max(best[0], axis=1)[:, None]
        placed = ()
        for g in tl.static_range(len(results)):
            if g == r // LANES:
                placed = placed + (tl.where(lanes == r % LANES, top, results[g]),)
            else:
                placed = placed + (results[g],)
        results = placed
        taken = best[0] == top
        # Only the first KP - 1 - r places of a list can still be popped.
        shifted = ()
        for q in tl.static_range(KP):
            if q < KP - 1 - r:
                shifted = shifted + (tl.where(taken, best[q + 1], best[q]),)
            else:
                shifted = shifted + (best[q],)
        best = shifted

    for g in tl.static_range(len(results)):
        ranks = g * LANES + lanes
        cols = column_of32(results[g]) if PACK32 else column_of64(results[g])
        keep = row_mask[:, None] & (ranks < k)
        value = tl.load(x_ptr + row_offsets[:, None] + cols.to(tl.int64) * stride_col, mask=keep, other=0.0)
        out = rows.to(tl.int64)[:, None] * k + ranks
        tl.store(values_ptr + out, value, mask=keep)
        tl.store(indices_ptr + out, cols.to(tl.int64), mask=keep)
