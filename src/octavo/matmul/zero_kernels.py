"""Zeros where a grouped product of PyTorch's leaves memory as it was: rows past the last group, and empty groups.

The sizes of groups are on the device, so a mask over the whole output would be the way without these kernels: a read
and a write of all of it for what usually is nothing. Here a program looks where its part of the output lies, and ends.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["M", "G"])
def zero_rows_past(out, offs, M, N, G, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows of out [M, N] from ``offs[G - 1]`` on; a program has BLOCK_M rows."""
    end = tl.load(offs + G - 1)
    m = tl.program_id(0) * BLOCK_M
    if m + BLOCK_M > end:
        i = m + tl.arange(0, BLOCK_M)
        live = ((i >= end) & (i < M))[:, None]
        row = out + i.to(tl.int64)[:, None] * N
        for start in range(0, N, BLOCK_N):
            j = start + tl.arange(0, BLOCK_N)[None, :]
            tl.store(row + j, tl.zeros((BLOCK_M, BLOCK_N), out.dtype.element_ty), mask=live & (j < N))


@triton.jit
def zero_empty_groups(out, offs, size, tiles, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """``out[g]``, of ``size`` elements, for groups without rows; a program has STEPS times BLOCK of them."""
    group = tl.program_id(0) // tiles
    start = tl.load(offs + group - 1, mask=group > 0, other=0)
    if tl.load(offs + group) == start:
        first = (tl.program_id(0) % tiles).to(tl.int64) * (STEPS * BLOCK)
        matrix = out + group.to(tl.int64) * size
        for step in range(STEPS):
            j = first + step * BLOCK + tl.arange(0, BLOCK)
            tl.store(matrix + j, tl.zeros((BLOCK,), out.dtype.element_ty), mask=j < size)
