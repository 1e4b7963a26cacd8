"""Which RMSNorm kernel serves which shape, and with what launch parameters: ``plans.json`` and arithmetic."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_COLUMNS = 2**20
"""Longer rows are left to PyTorch."""


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


@functools.cache
def table() -> dict[str, list[dict[str, Any]]]:
    """Lines of ``plans.json`` for "forward" and "backward"; the last of each fits every shape."""
    return json.loads(Path(__file__).with_name("plans.json").read_text())


def _fits(line: dict[str, Any], m: int, n: int, itemsize: int) -> bool:
    exact = ((itemsize, line["itemsize"]), (n % 16 == 0, line["aligned"]))
    limits = ((m, line["rows"]), (n, line["columns"]))
    return all(want is None or got == want for got, want in exact) and all(
        limit is None or size <= limit for size, limit in limits
    )


def _choose(kind: str, m: int, n: int, itemsize: int, programs: int, lanes: int) -> Plan:
    line = next(line for line in table()[kind] if _fits(line, m, n, itemsize))
    # The table counts warps of 32 lanes; as many threads are half as many waves of 64.
    design, warps = line["design"], max(1, line["num_warps"] * 32 // lanes)
    if lanes == 64 and kind == "backward" and design == "rows" and n > 8192:
        # x and g of longer rows do not fit the registers of a gfx942 or gfx950 program (octavo check).
        return split_plan(m, n, 1024, programs, 4, 2)
    if design == "long":
        return LongPlan(line["chunk"], warps)
    if design == "split":
        return split_plan(m, n, line["chunk"], programs, warps, line.get("group", 4))
    rows = max(1, line["elements"] // next_power_of_2(n)) if design == "short" else 1
    groups = -(-m // rows)
    count = min(groups, line["programs"] * programs // 2) if "programs" in line else 0
    options = {
        "programs": count,
        "stages": line.get("stages", 1),
        "hold_weight": line.get("hold_weight", False),
    }
    chunk = line.get("chunk")
    if chunk is not None and n > chunk:
        return RowsPlan(rows, chunk, -(-n // chunk), warps, **options)
    return rows_plan(n, itemsize, warps, rows, **options)


@functools.lru_cache(4096)
def choose_forward(m: int, n: int, itemsize: int, programs: int, lanes: int = 32) -> Plan:
    """The forward plan for ``m`` rows of ``n`` columns by ``plans.json``.

    ``programs`` fill the device twice; ``lanes`` are those of a warp, 64 on AMD.
    """
    return _choose("forward", m, n, itemsize, programs, lanes)


@functools.lru_cache(4096)
def choose_backward(m: int, n: int, itemsize: int, programs: int, lanes: int = 32) -> Plan:
    """As ``choose_forward``, for the backward."""
    return _choose("backward", m, n, itemsize, programs, lanes)
