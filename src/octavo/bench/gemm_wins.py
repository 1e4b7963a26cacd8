"""From results of the suites of products to their part of a table of wins.

A line is one operator with one dtype or format, N, K and groups, measured at several numbers of rows. Neighbouring row
counts that all won make a box from the first to the last; from ``OPEN_ROWS`` up it has no end, since more rows of a
product that is bound by its FLOPs are more of the same work. Two lines that differ in N, K or groups alone, by no more
than ``GAP`` each, also speak for what lies between them, in the rows that both won. A box that holds a measured shape
which did not win is dropped.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

SUITES = ("gemm", "grouped-bf16", "grouped-fp8", "mx", "scaled")
GAP = 4.0
"""Largest ratio of sizes across which two lines speak for what lies between."""
OPEN_ROWS = 2048
UNLIMITED = 2**62

_DENSE = re.compile(r"(?:(bf16|fp16|e4m3) )?M=(\d+) N=(\d+) K=(\d+)(?: bias)?")
_GROUPED = re.compile(r"rows ([\d,x]+) K=(\d+) N=(\d+)")
_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
_SCALED = {
    "rowwise": ("rowwise", "false"), "rowwise_fast": ("rowwise", "true"),
    "block": ("block", "false"), "blockrows": ("blockrows", "false"),
}  # fmt: skip
_MIXED = "bf16_x_"

Box = dict[str, list[Any]]
Keys = tuple[tuple[str, str], ...]


@dataclass(frozen=True, order=True)
class Point:
    """A measured product; ``groups`` is 0 where there are none, ``keys`` are the words that its box must name."""

    operator: str
    keys: Keys
    n: int
    k: int
    groups: int
    m: int

    @property
    def line(self) -> tuple[Any, ...]:
        """All but the rows."""
        return self.operator, self.keys, self.n, self.k, self.groups


def _of_rows(text: str) -> tuple[int, int]:
    """(rows, groups) of ``8x512`` or ``100,333,777``."""
    if "x" in text:
        groups, rows = map(int, text.split("x"))
        return groups * rows, groups
    sizes = [int(size) for size in text.split(",")]
    return sum(sizes), len(sizes)


def _grouped(suite: str, group: str, rows: str, k: str, n: str) -> Point:
    m, groups = _of_rows(rows)
    if suite == "grouped-bf16":
        operator, keys = "grouped_mm", (("form", "rows"), ("dtype", "bfloat16"))
    else:
        fast = str(group.endswith("_fast")).lower()
        keys = (("form", "rows"), ("dtype", "float8_e4m3fn"), ("fast", fast))
        operator = "scaled_grouped_mm"
    return Point(operator, keys, int(n), int(k), groups, m)


def point(suite: str, case: dict[str, Any]) -> Point:
    """The product of an entry of a results file.

    Raises:
        ValueError: its names are not the suite's.
    """
    group, name = case["group"], case["case"]
    grouped, dense = _GROUPED.fullmatch(name), _DENSE.fullmatch(name)
    if grouped is not None and suite.startswith("grouped"):
        return _grouped(suite, group, *grouped.groups())
    if dense is None or suite.startswith("grouped") or (suite == "scaled" and group not in _SCALED):
        raise ValueError(f"{group!r}, {name!r} is no case of the suite {suite!r}")
    dtype, m, n, k = dense.groups()
    keys: Keys
    if suite == "gemm":
        operator, keys = "mm", (("dtype", _DTYPES[dtype]),)
    elif suite == "scaled":
        kind, fast = _SCALED[group]
        operator, keys = "scaled_mm", (("format", kind), ("fast", fast))
    elif group.startswith(_MIXED):
        operator, keys = "mixed_mm", (("format", group.removeprefix(_MIXED)),)
    else:
        operator, keys = "scaled_mm", (("format", group),)
    return Point(operator, keys, int(n), int(k), 0, int(m))


OPERATORS = {
    "gemm": ("mm",),
    "grouped-bf16": ("grouped_mm",),
    "grouped-fp8": ("scaled_grouped_mm",),
    "mx": ("scaled_mm", "mixed_mm"),
    "scaled": ("scaled_mm",),
}
"""What each suite decides: named in a table even where nothing won."""


def boxes(
    contents: Iterable[dict[str, Any]], is_win: Callable[[dict[str, Any]], bool]
) -> dict[str, list[Box]]:
    """Operator to the boxes of its wins, from results files; a case measured several times must win every time."""
    won: dict[Point, bool] = {}
    found: dict[str, list[Box]] = {}
    for content in contents:
        found |= {name: [] for name in OPERATORS[content["suite"]]}
        for case in content["cases"]:
            place = point(content["suite"], case)
            won[place] = is_win(case) and won.get(place, True)
    losses = [place for place, faster in won.items() if not faster]
    for place, box in _candidates(won):
        if box not in found[place.operator] and not any(holds(box, place, loss) for loss in losses):
            found[place.operator].append(box)
    return found


def _runs(won: dict[Point, bool]) -> list[tuple[Point, Point]]:
    """(fewest rows, most rows) of neighbouring wins of each line."""
    runs = []
    for _, line in itertools.groupby(sorted(won), key=lambda place: place.line):
        for faster, members in itertools.groupby(line, key=lambda place: won[place]):
            if faster:
                places = list(members)
                runs.append((places[0], places[-1]))
    return runs


def _candidates(won: dict[Point, bool]) -> Iterable[tuple[Point, Box]]:
    largest = {place.line: place.m for place in sorted(won)}
    rows = {}
    for first, last in _runs(won):
        open_end = last.m == largest[last.line] and last.m >= OPEN_ROWS
        rows[first] = first.m, UNLIMITED if open_end else last.m
        yield first, _box(first, first, rows[first])
    for a, b in itertools.combinations(rows, 2):
        both = max(rows[a][0], rows[b][0]), min(rows[a][1], rows[b][1])
        if (a.operator, a.keys) == (b.operator, b.keys) and both[0] <= both[1] and _near(a, b):
            yield a, _box(a, b, both)


def _near(a: Point, b: Point) -> bool:
    pairs = ((a.n, b.n), (a.k, b.k), (a.groups, b.groups))
    return a.line != b.line and all(max(pair) <= GAP * min(pair) for pair in pairs)


def _box(a: Point, b: Point, rows: tuple[int, int]) -> Box:
    box: Box = {name: [value] for name, value in a.keys}
    box |= {"m": list(rows), "n": sorted((a.n, b.n)), "k": sorted((a.k, b.k))}
    return box | ({"groups": sorted((a.groups, b.groups))} if a.groups else {})


def holds(box: Box, of: Point, place: Point) -> bool:
    """Whether ``place`` lies in a box that ``of`` made."""
    if (of.operator, of.keys) != (place.operator, place.keys):
        return False
    return all(
        box[name][0] <= getattr(place, name) <= box[name][1]
        for name in ("m", "n", "k", "groups")
        if name in box
    )
