"""Runs made up for reports, with curves and operands that are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from octavo.trainer.records import Run, Step

Content = Callable[..., dict[str, Any]]


def operands(layers: int, sqnr: float) -> list[dict[str, Any]]:
    pairs = [(p, o) for p, names in (("output", ("input", "weight")), ("grad_input", ("grad_output", "weight")),
             ("grad_weight", ("grad_output", "input"))) for o in names]  # fmt: skip
    return [
        {"layer": f"layers.{i}.w", "product": p, "operand": o, "amax": 1.0, "saturated": 0.0}
        | {"underflowed": 1e-3 * i, "nonfinite": 0.0, "sqnr_db": sqnr + i}
        for i in range(layers)
        for p, o in pairs
    ]


def run_of(name: str, losses: list[float], status: str = "finished", **changes: Any) -> Run:
    watched = {} if name == "bf16" else {"operands": operands(3, 25.0)}
    steps = [
        Step(i, loss, 1.0, 1e-3, 0.5, peak_memory=3 * 2**29, **(watched if i % 5 == 0 else {}))
        for i, loss in enumerate(losses, 1)
    ]
    flops = {"aten.mm": 25, "octavo.scaled_mm": 0 if name == "bf16" else 75}
    known: dict[str, Any] = {
        "flops": flops,
        "converted": 3,
        "wall_seconds": 12.0,
        "validation_loss": losses[-1],
    }
    return Run(name, steps, status, **(known | changes))
