"""Which RMSNorm kernel serves which shape, and with what launch parameters. Pure arithmetic on shapes."""

from __future__ import annotations

import functools
from dataclasses import dataclass

MAX_COLUMNS = 2**20
"""Longer rows are left to PyTorch."""

ROW_BYTES_FORWARD = 2**17
ROW_BYTES_BACKWARD = 2**16
"""Bytes of a row up to which it is kept in the registers of one program."""


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << max(0, n - 1).bit_length()


@dataclass(frozen=True)
class RowsPlan:
    """Whole rows in registers. ``programs`` 0 means one for each group of ``rows`` rows."""

    rows: int
    c: int
    chunks: int
    num_warps: int
    programs: int = 0
    stages: int = 1
    hold_weight: bool = False


@dataclass(frozen=True)
class LongPlan:
    """Forward only: one program a row, read twice, ``c`` columns at a time."""

    c: int
    num_warps: int


@dataclass(frozen=True)
class SplitPlan:
    """Rows cut into ``splits`` (a power of two) spans; two launches. Backward: ``programs`` groups of rows."""

    splits: int
    span: int
    c: int
    num_warps: int
    rows: int = 1
    programs: int = 1


Plan = RowsPlan | LongPlan | SplitPlan


def _chunked(n: int, warps: int, vec: int) -> tuple[int, int]:
    """Chunk size and count with the least padding: one chunk of a power of two, or many of 32 * vec * warps."""
    c = next_power_of_2(n)
    if c == n:
        return c, 1
    small = min(c, 32 * vec * warps)
    return small, -(-n // small)


def rows_plan(n: int, itemsize: int, num_warps: int, rows: int = 1, **options: object) -> RowsPlan:
    """A ``RowsPlan`` for rows of ``n`` columns."""
    vec = 16 // itemsize if n % 16 == 0 else 4
    c, chunks = (next_power_of_2(n), 1) if rows > 1 else _chunked(n, num_warps, vec)
    return RowsPlan(rows, c, chunks, num_warps, **options)  # type: ignore[arg-type]


def split_plan(m: int, n: int, c: int, programs: int, num_warps: int = 8, rows: int = 4) -> SplitPlan:
    """A ``SplitPlan``: as many spans as fill the device, none shorter than ``c``."""
    splits = 1
    while splits * 2 * c <= n and splits * m < programs:
        splits *= 2
    span = -(-n // (splits * c)) * c
    columns = -(-n // c)
    groups = max(1, min(-(-m // rows), -(-2 * programs // columns)))
    return SplitPlan(splits, span, c, num_warps, rows, groups)


def _short_rows(n: int, elements: int) -> int:
    return max(1, elements // next_power_of_2(n))


@functools.lru_cache(4096)
def choose_forward(m: int, n: int, itemsize: int, programs: int) -> Plan:
    """The forward plan for ``m`` rows of ``n`` columns; ``programs`` fill the device twice."""
    if m * 4 <= programs and n >= 16384:
        return split_plan(m, n, 2048, programs)
    if n * itemsize > ROW_BYTES_FORWARD:
        return LongPlan(8192, 16)
    if n <= 1024:
        return rows_plan(n, itemsize, 4, _short_rows(n, 2048))
    warps = 4
    while warps < 32 and n * itemsize > warps * 2048:
        warps *= 2
    return rows_plan(n, itemsize, warps)


@functools.lru_cache(4096)
def choose_backward(m: int, n: int, itemsize: int, programs: int) -> Plan:
    """The backward plan for ``m`` rows of ``n`` columns; ``programs`` fill the device twice."""
    if n * itemsize > ROW_BYTES_BACKWARD or (m * 4 <= programs and n >= 16384):
        return split_plan(m, n, 1024, programs)
    if n <= 1024:
        rows = _short_rows(n, 4096)
        return rows_plan(n, itemsize, 4, rows, programs=min(-(-m // rows), 2 * programs), stages=2)
    warps = 8 if n <= 8192 else 16
    return rows_plan(n, itemsize, warps, programs=min(m, programs), stages=2)
