"""Races: results used before they were waited for.

Hardware executes memory instructions asynchronously; s_waitcnt makes their results safe to use. Executed one after
the other, code with a missing wait still gives right results, so waits are checked apart from the data: each wave
counts the operations it issued and the ones it has waited for, and each pending register knows its operation.
Vector-memory operations retire in order, LDS operations too; scalar loads retire in any order, so only lgkmcnt(0)
covers them (CDNA3 ISA, "Data dependency resolution").
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .asm import Instruction
    from .state import Machine

VM, LGKM = 0, 1


@dataclass(frozen=True)
class Race:
    """`kind` is "register" (used before its load was waited for), "lds" (two waves, or a wave and its own
    direct-to-LDS load, touch a byte with no wait and barrier between)."""

    kind: str
    instruction: str
    detail: str


@dataclass
class Tracker:
    """Per-wave counts of issued and retired operations of the two counters."""

    waves: int
    races: dict[tuple[str, str], Race] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.issued = np.zeros((2, self.waves), np.int64)
        self.done = np.zeros((2, self.waves), np.int64)
        self.last_scalar_load = np.zeros(self.waves, np.int64)
        # register key -> (counter, operation number of each wave, 0 where none)
        self.pending: dict[int, tuple[int, np.ndarray]] = {}

    def report(self, kind: str, ins: Instruction, detail: str) -> None:
        """Record a race once for each instruction and kind."""
        self.races.setdefault((kind, ins.where()), Race(kind, ins.where(), detail))

    def issue(self, m: Machine, counter: int, keys: tuple[int, ...], scalar: bool = False) -> np.ndarray:
        """Count one operation of the selected waves that will write the registers `keys`; its numbers."""
        index = slice(None) if m.idx is None else m.idx
        self.issued[counter, index] += 1
        number = self.issued[counter, index].copy()
        if scalar:
            self.last_scalar_load[index] = number
        for key in keys:
            entry = self.pending.get(key)
            if entry is None or entry[0] != counter:
                entry = (counter, np.zeros(self.waves, np.int64))
                self.pending[key] = entry
            entry[1][index] = number
        return number

    def wait(self, m: Machine, counter: int, allowed: int) -> None:
        """s_waitcnt: at most `allowed` operations of the counter may still be pending."""
        index = slice(None) if m.idx is None else m.idx
        reached = self.issued[counter, index] - allowed
        if counter == LGKM and allowed:
            # With a scalar load pending, a nonzero lgkmcnt does not say which operations are done.
            blocked = self.last_scalar_load[index] > self.done[counter, index]
            reached = np.where(blocked, 0, reached)
        self.done[counter, index] = np.maximum(self.done[counter, index], reached)

    def check(self, m: Machine, ins: Instruction, keys: frozenset[int], in_order: int | None) -> None:
        """Report registers in `keys` whose operation has not been waited for. A load may overwrite a register that
        an earlier load of the same in-order counter (`in_order`) is still to write."""
        index = slice(None) if m.idx is None else m.idx
        for key in keys & self.pending.keys():
            counter, numbers = self.pending[key]
            late = numbers[index] > self.done[counter, index]
            if not late.any():
                if not (numbers > self.done[counter]).any():
                    del self.pending[key]
                continue
            if counter != in_order:
                name = f"s{key - 512}" if key >= 512 else f"v{key}" if key < 256 else f"a{key - 256}"
                self.report(
                    "register", ins, f"{name} has a {('vector', 'LDS or scalar')[counter]} load pending"
                )
                numbers[index] = 0
