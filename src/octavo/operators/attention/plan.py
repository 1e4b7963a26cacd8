"""Which tiles attention uses: ``plans.json`` per architecture, and how a head dimension is cut."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256


@dataclass(frozen=True)
class Tile:
    """A launch's tile: ``bm`` queries, ``bn`` keys, warps of the program and stages of its loads."""

    bm: int
    bn: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Plan:
    """How one call is launched.

    Args:
        forward: its tile.
        keys: tile of the launch for the gradients of keys and values.
        queries: tile of the launch for the gradient of queries; unused when ``fused``.
        descriptors: read the operands of the main loops through tensor descriptors where their alignment allows it.
        fused: add up the gradient of queries with atomics in the first launch (never in deterministic mode).
    """

    forward: Tile
    keys: Tile
    queries: Tile
    descriptors: bool = False
    fused: bool = False

    def deterministic(self) -> Plan:
        """The same tiles with a result that is the same every time."""
        return replace(self, fused=False)


def cut(dim: int) -> tuple[int, int]:
    """(D0, D1): powers of two, D1 maybe 0, that hold ``dim`` columns with the least padding.

    >>> cut(96), cut(128), cut(192), cut(72), cut(120)
    ((64, 32), (128, 0), (128, 64), (64, 16), (128, 0))
    """
    whole = max(16, 1 << (dim.bit_length() - 1))
    if whole >= dim:
        return whole, 0
    rest = max(16, 1 << (dim - whole - 1).bit_length())
    return (whole, rest) if rest < whole else (2 * whole, 0)


@functools.cache
def _tables() -> dict[str, list[dict[str, Any]]]:
    return json.loads(Path(__file__).with_name("plans.json").read_text())


@functools.lru_cache(4096)
def choose(architecture: str, dim: int, value_dim: int, causal: bool) -> Plan:
    """The plan for a head dimension: the first line of the architecture's table that is wide enough.

    An architecture without a table takes that of ``other``.
    """
    tables = _tables()
    for line in tables.get(architecture, tables["other"]):
        if max(dim, value_dim) <= line["dim"]:
            forward, keys, queries = (Tile(*line[name]) for name in ("forward", "keys", "queries"))
            options = {name: bool(line.get(name)) for name in ("descriptors", "fused")}
            return Plan(forward, keys, queries, **options)
    raise ValueError(f"no attention plan for head dimensions {dim} and {value_dim}")
