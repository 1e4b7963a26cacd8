"""From results of the attention suite to its part of a table of wins.

A case is a head dimension, a length and causal or not, for forward and backward apart. Each win makes a box of that
length alone; two wins at neighbouring measured lengths, nothing measured between them, also speak for the lengths in
between. A box holds from as many heads (of all sequences) as its longest length was measured with, up: more of them is
more of the same work.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

_GROUP = re.compile(r"(forward|backward)_(\d+)(?:_(\d+))?")
_CASE = re.compile(r"bf16 B=(\d+) H=(\d+) L=(\d+)( causal)?")
_NAMES = {"forward": "attention", "backward": "attention_backward"}
UNLIMITED = 2**62

Box = dict[str, list[Any]]


@dataclass(frozen=True, order=True)
class Point:
    """A measured case; ``heads`` counts those of all sequences."""

    operator: str
    d: int
    dv: int
    causal: bool
    length: int
    heads: int


def point(case: dict[str, Any]) -> Point:
    """The case of an entry of a results file.

    Raises:
        ValueError: its names are not the suite's.
    """
    group, name = _GROUP.fullmatch(case["group"]), _CASE.fullmatch(case["case"])
    if group is None or name is None:
        raise ValueError(f"{case['group']!r}, {case['case']!r} is no case of the attention suite")
    d = int(group[2])
    batch, heads, length = (int(name[i]) for i in (1, 2, 3))
    return Point(_NAMES[group[1]], d, int(group[3] or d), name[4] is not None, length, batch * heads)


def boxes(cases: Iterable[dict[str, Any]], is_win: Callable[[dict[str, Any]], bool]) -> dict[str, list[Box]]:
    """Operator to the boxes of its wins; a case measured several times must win every time."""
    won: dict[Point, bool] = {}
    for case in cases:
        place = point(case)
        won[place] = is_win(case) and won.get(place, True)
    found: dict[str, list[Box]] = {name: [] for name in _NAMES.values()}
    for (operator, *_), group in itertools.groupby(
        sorted(won), key=lambda p: (p.operator, p.d, p.dv, p.causal)
    ):
        lengths = list(group)
        found[operator] += [_box(p, p) for p in lengths if won[p]]
        found[operator] += [_box(a, b) for a, b in itertools.pairwise(lengths) if won[a] and won[b]]
    return found


def _box(shortest: Point, longest: Point) -> Box:
    lengths = [shortest.length, longest.length]
    return {
        "dtype": ["bfloat16"], "causal": [str(shortest.causal).lower()], "d": [shortest.d] * 2, "dv": [shortest.dv] * 2,
        "lq": lengths, "lk": lengths, "heads": [min(shortest.heads, longest.heads), UNLIMITED],
    }  # fmt: skip
