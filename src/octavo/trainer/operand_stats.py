"""What quantization did to every operand over a run: from a monitor on some steps, as data for a report.

Of a watched step, a list with a dict for each operand of each product of each layer: ``NAMES`` say which, and
``MEASURES`` are its numbers as in :class:`octavo.training.monitor.OperandStats`. Watching changes no bit of the
training; it costs time and memory, so that only some steps are watched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from torch import nn

import octavo
from octavo.trainer.records import Step

NAMES = ("layer", "product", "operand")
MEASURES = ("amax", "saturated", "underflowed", "nonfinite", "sqnr_db")


@contextlib.contextmanager
def watching(model: nn.Module, on: bool) -> Iterator[octavo.Monitor | None]:
    """A monitor of what ``model`` does meanwhile; None if not ``on``, or if no product of it is quantized."""
    quantized = any(
        isinstance(m, octavo.Linear) and m.recipe.quantized_products for m in model.modules() if on
    )
    with octavo.monitor(model) if quantized else contextlib.nullcontext() as monitor:
        yield monitor


def read(monitor: octavo.Monitor) -> list[dict[str, Any]]:
    """What ``monitor`` saw, with None for an SQNR that is no number: nothing was lost, or nothing was there."""
    found = map(dataclasses.asdict, monitor.read())
    return [operand | {"sqnr_db": _number(operand["sqnr_db"])} for operand in found]


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def over_steps(steps: list[Step]) -> dict[str, Any]:
    """``{"steps": [...], "layers": {layer: {product: {operand: {measure: [one value a watched step]}}}}}``."""
    watched = [step for step in steps if step.operands is not None]
    layers: dict[str, Any] = {}
    for i, step in enumerate(watched):
        for operand in step.operands or ():
            layer, product, name = (operand[part] for part in NAMES)
            series = layers.setdefault(layer, {}).setdefault(product, {}).setdefault(name, {})
            for measure in MEASURES:
                series.setdefault(measure, [None] * len(watched))[i] = operand[measure]
    return {"steps": [step.number for step in watched], "layers": layers}
