"""From results files to a table of wins (``octavo.operators.wins``): which calls Octavo's operators take over.

A measured shape is a win if Octavo's kernel was taken and checked there and was faster than PyTorch's by ``MARGIN`` in
every time that the file has: CUDA-graph replay, events with a cleared cache, and back-to-back wall time; and faster
than decoding its operands first, where that was timed. Each win becomes a box, conservatively (attention and matrix
products by rules of their own, in ``attention_wins`` and ``gemm_wins``):

* rows: from those measured up, but below the next larger row count that was measured and did not win;
* k: down to half the power of two that the kernels pad it to, as those calls run the same code;
* columns: those measured, and those between two neighbouring wins that differ in nothing else but their rows, if no
  further apart than ``GAP``; the box takes the rows that both allow.

A box that holds a measured shape which did not win is dropped.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.bench import attention_wins, gemm_wins

MARGIN = 1.02
"""How many times faster a win must be, so that noise alone makes none."""

SUITES = ("attention", *gemm_wins.SUITES, "rmsnorm", "topk")
"""Those that measure operators which can be taken over."""

GAP = 4.0
"""Largest ratio of columns across which two wins speak for what lies between."""

RIVALS = ("aten", "decode_first")
"""Contenders that do the same work from the same inputs, and that a call goes to where it is not taken."""

UNLIMITED = 2**62

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_CASE = re.compile(r"(fp32|bf16|fp16) (\d+)x(\d+)(?: k=(\d+))?")


@dataclass(frozen=True, order=True)
class Point:
    """A measured shape; ``k`` is 0 for operators that have none."""

    dtype: str
    k: int
    n: int
    m: int


Box = dict[str, list[Any]]


def operator_of(suite: str, group: str) -> str:
    """The operator that a group of a suite measures, by its name in a table.

    Raises:
        ValueError: for a suite that measures no operator of PyTorch's.
    """
    if suite == "topk":
        return "topk"
    if suite == "rmsnorm":
        return "rms_norm_backward" if group.endswith("_backward") else "rms_norm"
    raise ValueError(f"suite {suite!r} measures no operator that can be taken over; need {', '.join(SUITES)}")


def is_win(case: dict[str, Any]) -> bool:
    """Whether Octavo's kernel was faster by every clock."""
    clocks = [case[name] for name in ("ms", "event_ms", "wall_ms") if name in case]
    faster = all(
        times[rival] >= MARGIN * times["octavo"] for times in clocks for rival in RIVALS if rival in times
    )
    return bool(case["checked"] and case["taken"] and faster)


def points(contents: Iterable[dict[str, Any]]) -> dict[str, dict[Point, bool]]:
    """Operator to measured shapes, each with whether it won (every time, if measured more than once).

    Raises:
        ValueError: for a case whose name gives no shape.
    """
    found: dict[str, dict[Point, bool]] = {}
    for content in contents:
        for case in content["cases"]:
            match = _CASE.fullmatch(case["case"])
            if match is None:
                raise ValueError(
                    f"case {case['case']!r} is not named DTYPE ROWSxCOLUMNS or DTYPE ROWSxCOLUMNS k=K"
                )
            dtype, m, n, k = match.groups()
            point = Point(_DTYPES[dtype], int(k or 0), int(n), int(m))
            shapes = found.setdefault(operator_of(content["suite"], case["group"]), {})
            shapes[point] = is_win(case) and shapes.get(point, True)
    return found


def _rows_limit(point: Point, losses: list[Point]) -> int:
    larger = [p.m for p in losses if (p.dtype, p.k, p.n) == (point.dtype, point.k, point.n) and p.m > point.m]
    return min(larger, default=UNLIMITED + 1) - 1


def _box(dtype: str, k: int, columns: tuple[int, int], rows: tuple[int, int]) -> Box:
    box: Box = {"dtype": [dtype], "m": list(rows), "n": list(columns)}
    if k:
        box["k"] = [(1 << (k - 1).bit_length()) // 2 + 1 if k > 1 else 1, k]
    return box


def holds(box: Box, point: Point) -> bool:
    """Whether the shape lies in the box."""
    ranges = [(point.m, box["m"]), (point.n, box["n"]), *([(point.k, box["k"])] if "k" in box else [])]
    return point.dtype in box["dtype"] and all(low <= size <= high for size, (low, high) in ranges)


def boxes(shapes: dict[Point, bool]) -> list[Box]:
    """Boxes of the wins among measured shapes, by the rules above."""
    wins = sorted(point for point, won in shapes.items() if won)
    losses = [point for point, won in shapes.items() if not won]
    found = []
    # The fewest rows of each (dtype, k, columns) stand for all above them up to the first loss.
    rows = {point: (point.m, _rows_limit(point, losses)) for point in wins}
    lowest = [p for p in wins if not any(q.m < p.m and rows[q][1] >= p.m and _alike(p, q) for q in wins)]
    for point in lowest:
        found.append(_box(point.dtype, point.k, (point.n, point.n), rows[point]))
    columns = sorted({p.n for p in shapes})
    for a, b in itertools.permutations(lowest, 2):
        if (a.dtype, a.k) != (b.dtype, b.k) or not a.n < b.n <= GAP * a.n:
            continue
        if any(a.n < n < b.n and _measured(shapes, a, n) for n in columns):
            continue
        both = max(a.m, b.m), min(rows[a][1], rows[b][1])
        if both[0] <= both[1]:
            found.append(_box(a.dtype, a.k, (a.n, b.n), both))
    return [box for box in found if not any(holds(box, loss) for loss in losses)]


def _alike(p: Point, q: Point) -> bool:
    return (p.dtype, p.k, p.n) == (q.dtype, q.k, q.n)


def _measured(shapes: dict[Point, bool], like: Point, n: int) -> bool:
    return any((p.dtype, p.k, p.n) == (like.dtype, like.k, n) for p in shapes)


def table(paths: Iterable[Path]) -> tuple[str, dict[str, Any]]:
    """(architecture, content of its table) from results files of one architecture.

    Raises:
        ValueError: without files, for files of several architectures, or of a suite that measures no operator.
    """
    contents = {path: json.loads(path.read_text()) for path in paths}
    architectures = {content["machine"]["architecture"] for content in contents.values()}
    if len(architectures) != 1:
        raise ValueError(
            f"need results of exactly one architecture and got {sorted(architectures) or 'none'}"
        )
    runs = [f"{path.name} of {c['date']} on {c['machine']['gpu']}" for path, c in contents.items()]
    of_attention = [c for c in contents.values() if c["suite"] == "attention"]
    of_products = [c for c in contents.values() if c["suite"] in gemm_wins.SUITES]
    rows = [c for c in contents.values() if c["suite"] not in ("attention", *gemm_wins.SUITES)]
    operators = {name: boxes(shapes) for name, shapes in points(rows).items()}
    if of_attention:
        operators |= attention_wins.boxes((case for c in of_attention for case in c["cases"]), is_win)
    operators |= gemm_wins.boxes(of_products, is_win)
    return architectures.pop(), {"run": "; ".join(runs), **operators}


def write(results: Path, folder: Path) -> Path:
    """Write ``<folder>/<architecture>.json`` from the files of ``SUITES`` in ``results``; returns its path."""
    found = (path for suite in SUITES for path in results.glob(f"{suite}-*.json"))
    paths = sorted(path for path in found if json.loads(path.read_text()).get("suite") in SUITES)
    if not paths:
        wanted = " or ".join(f"{suite}-*.json" for suite in SUITES)
        raise ValueError(f"no {wanted} in {results}: run octavo bench with --force first")
    architecture, content = table(paths)
    lines = [f' "run": {json.dumps(content.pop("run"))}']
    for operator, members in content.items():
        rows = ",\n".join(f"  {json.dumps(box)}" for box in members)
        lines.append(f' "{operator}": [\n{rows}\n ]' if members else f' "{operator}": []')
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{architecture}.json"
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return path
