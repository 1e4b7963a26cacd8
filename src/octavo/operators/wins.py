"""Where a kernel of ours was measured faster than PyTorch's own: committed tables, and the owner's overlay.

``wins_tables/<architecture>.json`` holds, for each operator, boxes of shapes; in a box every shape measured was faster
by event time and by unflushed back-to-back wall time:

    {"run": "topk-h200.json of 2026-12-01T10:00:00+00:00 on NVIDIA H200",
     "topk": [{"dtype": ["float32"], "m": [256, 65536], "n": [1024, 8192], "k": [1, 16]}]}

A list of strings is a set, a pair of integers a closed range. ``octavo.bench.wins_table`` makes the boxes from results
files; the owner's own, in ``$OCTAVO_WINS`` (or ``~/.cache/octavo/wins``), replace the operators they name.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from octavo import hardware

COMMITTED = Path(__file__).with_name("wins_tables")
"""Tables that come with the package; ``octavo tune --wins --committed`` writes them."""

OTHER_DIMENSION = "not measured: another dimension than a contiguous last one"
NOT_A_WIN = "not measured faster for this shape"

_listeners: list[Callable[[], None]] = []


@dataclass(frozen=True)
class Table:
    """The boxes of one operator on one architecture, and the run that measured them."""

    boxes: tuple[dict[str, list[Any]], ...]
    run: str


def overlay_folder() -> Path:
    """Where the owner's own measurements are kept."""
    return Path(os.environ.get("OCTAVO_WINS") or Path.home() / ".cache" / "octavo" / "wins")


@functools.cache
def tables(architecture: str) -> dict[str, Table]:
    """Operator name to table, the overlay's in place of the committed ones; empty where nothing was measured."""
    found: dict[str, Table] = {}
    for folder in (COMMITTED, overlay_folder()):
        path = folder / f"{architecture}.json"
        if not path.is_file():
            continue
        data = json.loads(path.read_text())
        run = data.pop("run")
        for operator, boxes in data.items():
            found[operator] = Table(tuple(boxes), run if folder is COMMITTED else f"{run} ({path})")
    return found


def is_won_anywhere(operator: str) -> bool:
    """Whether any architecture's table, which is known before a device is, has a box of ``operator``."""
    paths = (path for folder in (COMMITTED, overlay_folder()) for path in folder.glob("*.json"))
    found = (tables(architecture).get(operator) for architecture in {path.stem for path in paths})
    return any(table is not None and table.boxes for table in found)


def reload() -> None:
    """Forget the tables read so far; routers follow."""
    tables.cache_clear()
    _decide.cache_clear()
    for listener in _listeners:
        listener()


def on_reload(listener: Callable[[], None]) -> None:
    """Have ``listener`` called after the tables were forgotten."""
    _listeners.append(listener)


def _inside(value: Any, limits: list[Any]) -> bool:
    if isinstance(value, str):
        return value in limits
    return limits[0] <= value <= limits[1]


@functools.lru_cache(8192)
def _decide(operator: str, architecture: str, shape: tuple[tuple[str, Any], ...]) -> str | None:
    table = tables(architecture).get(operator)
    if table is None:
        return f"not measured on {architecture}"
    for box in table.boxes:
        if all(_inside(value, box[name]) for name, value in shape):
            return None
    return NOT_A_WIN


def why_not(operator: str, device: torch.device, **shape: Any) -> str | None:
    """Why no box of the device's architecture holds ``shape`` (names as in the table), or None if one does."""
    return _decide(operator, hardware.architecture(device), tuple(shape.items()))
