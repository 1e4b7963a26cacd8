"""Which TopK kernel serves which shape, and with what launch parameters: ``plans.json`` and arithmetic on shapes."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_K = 2048
PACK32_COLUMNS = 65535
"""Rows shorter than this leave room for the column in the lower 16 bits of a 16-bit dtype's key."""


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << max(0, n - 1).bit_length()


def _padded_k(k: int) -> int:
    """Results a program sorts: at least 2, since Triton 3.6 cannot reduce a tile to its single largest element."""
    return max(2, next_power_of_2(k))


@dataclass(frozen=True)
class ListPlan:
    """Launch of ``list_topk_kernel``: ``rows`` rows a program, ``lanes`` threads a row."""

    rows: int
    lanes: int
    vec: int
    kp: int
    blocks: int
    num_warps: int


@dataclass(frozen=True)
class ThresholdPlan:
    """Launch of ``threshold_topk_kernel``: a row a program, ``chunks`` chunks of ``chunk`` columns."""

    chunk: int
    chunks: int
    groups: int
    cap: int
    kp: int
    num_warps: int


@dataclass(frozen=True)
class SelectPlan:
    """Launch of ``select_topk_kernel``: ``splits`` programs a row of ``span`` columns each."""

    splits: int
    span: int
    groups: int
    unroll: int
    cap: int
    kp: int
    num_warps: int


Plan = ListPlan | ThresholdPlan | SelectPlan


def list_plan(n: int, k: int, lanes: int = 8, num_warps: int = 4) -> ListPlan:
    """Sorted lists: short rows and k up to 32."""
    kp = next_power_of_2(k)
    while lanes > 1 and lanes * kp >= 2 * n:
        lanes //= 2
    return ListPlan(32 * num_warps // lanes, lanes, min(4, kp), kp, -(-n // (lanes * kp)), num_warps)


def threshold_plan(n: int, k: int, itemsize: int, num_warps: int) -> ThresholdPlan:
    """Group maxima over a row in registers: k up to 32 and up to 32 columns a chunk position."""
    kp = _padded_k(k)
    chunk = num_warps * 32 * (16 // itemsize)
    chunks = next_power_of_2(-(-n // chunk))
    return ThresholdPlan(chunk, chunks, 32 if k <= 16 else 64, max(16, 4 * kp), kp, num_warps)


def select_plan(
    m: int,
    n: int,
    k: int,
    num_warps: int = 8,
    unroll: int = 4,
    splits: int | None = None,
    programs: int = 264,
) -> SelectPlan:
    """Streaming selection: any row length, k up to 2048; few long rows are split to reach ``programs``."""
    kp = _padded_k(k)
    groups = max(1024, 2 * kp)
    if splits is None:
        splits = max(1, min(programs // m, n // max(8192, 8 * kp)))
    span = n if splits == 1 else -(-n // (splits * 16)) * 16
    splits = -(-n // span)
    if n - (splits - 1) * span < k:
        splits, span = 1, n
    unroll = max(1, min(unroll, next_power_of_2(-(-span // groups))))
    return SelectPlan(splits, span, groups, unroll, max(128, 2 * kp), kp, num_warps)


@functools.cache
def table() -> list[dict[str, Any]]:
    """Lines of ``plans.json``, the last of which fits every shape."""
    return json.loads(Path(__file__).with_name("plans.json").read_text())["lines"]


def _fits(line: dict[str, Any], m: int, n: int, k: int) -> bool:
    limits = ((m, line["rows"]), (n, line["columns"]), (k, line["k"]))
    return m * n >= line["cells"] and all(limit is None or size <= limit for size, limit in limits)


@functools.lru_cache(4096)
def choose(m: int, n: int, k: int, itemsize: int, programs: int) -> Plan:
    """The plan for ``m`` rows of ``n`` columns by ``plans.json``; ``programs`` fill the device twice."""
    line = next(line for line in table() if _fits(line, m, n, k))
    if line["design"] == "list":
        return list_plan(n, k, line["lanes"], line["num_warps"])
    if line["design"] == "threshold":
        warps = 1
        while n > warps * 32 * line["values"]:
            warps *= 2
        return threshold_plan(n, k, itemsize, warps)
    return select_plan(m, n, k, programs=programs)
