"""Which tiles the products of this operator use: ``plans.json``, a table per architecture, kind of work and rows.

The work is named by its operands: ``mxfp8`` and ``mxfp4`` (both operands), ``16-bit x mxfp8``, ``16-bit x mxfp4`` and
``16-bit x block``, or ``16-bit`` for two plain ones. Lines are ordered by ``up_to``, the most rows M that a line is
for; the last has none. A file ``gemm-<architecture>.json`` in the overlay folder
(:func:`octavo.quantize.launch_tables.overlay_folder`) maps works to lines that stand in place of the committed ones,
for what was measured on the card.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from octavo.formats import Format
from octavo.quantize.launch_tables import overlay_folder

KINDS = ("tiles", "native", "boxes", "decode_first")
DENSE = "16-bit"
"""The name of the work of two plain operands."""


@dataclass(frozen=True)
class Plan:
    """How one product is launched.

    Args:
        kind: ``tiles`` decodes inside the kernel, ``native`` gives MX operands to the matrix instruction (gfx950),
            ``boxes`` loads two plain operands by tensor descriptors where the card has them, ``decode_first`` decodes
            quantized operands to memory and multiplies them by PyTorch's 16-bit product.
        tile: (BLOCK_M, BLOCK_N, BLOCK_K); BLOCK_K is a multiple of 128 beside scales.
        warps, stages: of the program, and of its loads.
        up_to: most rows that the plan is for; None for any number.
        split: most parts that the contraction is cut into while tiles alone do not fill the machine.
        swap: multiply b by a transposed.
        band: row tiles walked down before the next column tile.
    """

    kind: str = "tiles"
    tile: tuple[int, int, int] = (0, 0, 0)
    warps: int = 4
    stages: int = 2
    up_to: int | None = None
    split: int = 1
    swap: bool = False
    band: int = 8


def work_of(a: Format | None, b: Format) -> str:
    """The name of the work in the tables; ``a`` is None for 16-bit rows."""
    name = ("mxfp4" if b.element.packed == 2 else "mxfp8") if b.is_mx else "block"
    return name if a is not None else f"16-bit x {name}"


@functools.cache
def tables() -> dict[str, dict[str, tuple[Plan, ...]]]:
    """Every committed plan, by architecture and work.

    Raises:
        ValueError: if a list of lines is not ordered by up_to with an open last line, or names an unknown kind.
    """
    path = Path(__file__).with_name("plans.json")
    found = json.loads(path.read_text())
    return {arch: _works(f"{path.name}: {arch}", works) for arch, works in found.items()}


def _works(where: str, works: dict[str, Any]) -> dict[str, tuple[Plan, ...]]:
    return {work: _plans(f"{where}, {work}", lines) for work, lines in works.items()}


@functools.cache
def table(architecture: str) -> dict[str, tuple[Plan, ...]]:
    """Plans by work: the architecture's, or those of ``other``; the owner's own in their place.

    Raises:
        ValueError: as ``tables``, for either file.
    """
    committed = tables().get(architecture) or tables()["other"]
    own = overlay_folder() / f"gemm-{architecture}.json"
    return {**committed, **(_works(str(own), json.loads(own.read_text())) if own.is_file() else {})}


def reload() -> None:
    """Forget the tables read so far."""
    for cache in (tables, table, choose):
        cache.cache_clear()


def entry(plan: Plan) -> dict[str, Any]:
    """What a table holds of a plan."""
    defaults = Plan()
    named = {f.name: getattr(plan, f.name) for f in fields(plan)}
    found = {name: value for name, value in named.items() if value != getattr(defaults, name)}
    return {**found, "tile": list(plan.tile)} if "tile" in found else found


def _plans(where: str, lines: list[dict[str, object]]) -> tuple[Plan, ...]:
    plans = tuple(Plan(**{**line, "tile": tuple(line.get("tile", (0, 0, 0)))}) for line in lines)  # type: ignore[arg-type]
    limits = [plan.up_to for plan in plans]
    bounded = [limit for limit in limits[:-1] if limit is not None]
    if not limits or limits[-1] is not None or len(bounded) != len(limits) - 1 or bounded != sorted(bounded):
        raise ValueError(
            f"{where}: the lines must be ordered by up_to and the last alone have none; got {limits}"
        )
    wrong = [plan.kind for plan in plans if plan.kind not in KINDS]
    if wrong:
        raise ValueError(f"{where}: kind {wrong[0]!r} is none of {', '.join(KINDS)}")
    return plans


@functools.lru_cache(8192)
def choose(architecture: str, work: str, rows: int) -> Plan:
    """The plan for ``rows`` rows by ``table``."""
    for plan in table(architecture)[work]:
        if plan.up_to is None or rows <= plan.up_to:
            return plan
    raise ValueError(f"no plan of {work!r} for {rows} rows on {architecture}")


def splits(plan: Plan, tiles: int, k: int, processors: int) -> tuple[int, int]:
    """(parts, steps a part) of the contraction: up to two programs a processor, at least two steps each."""
    steps = max(1, -(-k // plan.tile[2]))
    wanted = min(plan.split, max(1, 2 * processors // tiles), max(1, steps // 2))
    each = -(-steps // wanted)
    return -(-steps // each), each
