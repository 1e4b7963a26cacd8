"""Registers and lane masks of the waves that run together.

All waves of a batch of workgroups execute in step while their program counters agree, so a register is one array
over waves: scalar registers `uint32[waves]`, vector registers `uint32[waves, 64]`. When waves diverge, `select`
narrows every access to the waves at the current program counter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .asm import AGPR, EXEC, Program
from .errors import ExecutionError

if TYPE_CHECKING:
    from .lds import LocalMemory
    from .memory import GlobalMemory
    from .tracking import Tracker

LANES = 64
_POISON = 0xFFC5A5A5  # a NaN when read as float32: a register read before it is written shows in the results

# Fields of the MODE register (CDNA3 ISA, "Mode register").
FP16_OVERFLOW = 1 << 23


class Machine:
    """State of `waves` waves running one program."""

    memory: GlobalMemory
    lds: LocalMemory
    tracker: Tracker

    def __init__(self, program: Program, target: str, waves: int) -> None:
        self.target = target
        self.waves = waves
        self.s = np.full((128, waves), 0xDEADBEEF, np.uint32)
        self.v: list[np.ndarray | None] = [None] * 512
        for i in range(program.vgprs):
            self.v[i] = np.full((waves, LANES), _POISON, np.uint32)
        for i in range(program.agprs):
            self.v[AGPR + i] = np.full((waves, LANES), _POISON, np.uint32)
        self.scc = np.zeros(waves, bool)
        self.mode = np.full(waves, _initial_mode(program), np.uint32)
        self.pc = np.zeros(waves, np.int64)
        self.workgroup = np.zeros(waves, np.int64)  # index of the wave's workgroup within the batch
        self.s[EXEC : EXEC + 2] = 0xFFFFFFFF
        self.idx: np.ndarray | None = None
        self.count = waves
        self.select(None)

    # --- control flow, which Executor (launch.py) implements
    def branch(self, label: str, taken: np.ndarray) -> None:
        """Send the selected waves in `taken` to `label` and the others to the next instruction."""
        raise NotImplementedError

    def end(self) -> None:
        """End the selected waves."""
        raise NotImplementedError

    def barrier(self) -> None:
        """Make the selected waves wait for their workgroups."""
        raise NotImplementedError

    def select(self, idx: np.ndarray | None) -> None:
        """Let instructions act on these waves only (None: on all)."""
        self.idx = idx
        self.count = self.waves if idx is None else len(idx)
        self.refresh_lanes()

    @property
    def selected(self) -> np.ndarray:
        """Indices of the selected waves."""
        return np.arange(self.waves) if self.idx is None else self.idx

    def refresh_lanes(self) -> None:
        self.lanes = self.mask(EXEC)
        self.full = bool(self.lanes.all())

    # --- scalar registers
    def rs(self, reg: int) -> np.ndarray:
        """uint32[count]: a scalar register of the selected waves."""
        return self.s[reg] if self.idx is None else self.s[reg, self.idx]

    def rs64(self, reg: int) -> np.ndarray:
        return self.rs(reg).astype(np.uint64) | (self.rs(reg + 1).astype(np.uint64) << np.uint64(32))

    def ws(self, reg: int, value: np.ndarray | int) -> None:
        if self.idx is None:
            self.s[reg] = value
        else:
            self.s[reg, self.idx] = value
        if reg >= EXEC:
            self.refresh_lanes()

    def ws64(self, reg: int, value: np.ndarray) -> None:
        value = np.asarray(value, np.uint64)
        self.ws(reg, (value & np.uint64(0xFFFFFFFF)).astype(np.uint32))
        self.ws(reg + 1, (value >> np.uint64(32)).astype(np.uint32))

    def mask(self, reg: int) -> np.ndarray:
        """bool[count, 64] from a scalar register pair."""
        words = np.ascontiguousarray(np.stack((self.rs(reg), self.rs(reg + 1)), axis=1))
        return np.unpackbits(words.view(np.uint8), axis=1, bitorder="little").view(bool)

    def wmask(self, reg: int, lanes: np.ndarray) -> None:
        """Write a lane mask to a scalar register pair; inactive lanes write 0, as compares do."""
        lanes = np.broadcast_to(lanes, self.lanes.shape)
        if not self.full:
            lanes = lanes & self.lanes
        words = np.packbits(lanes, axis=1, bitorder="little").view(np.uint32)
        self.ws(reg, words[:, 0])
        self.ws(reg + 1, words[:, 1])

    # --- vector registers
    def rv(self, reg: int) -> np.ndarray:
        """uint32[count, 64]: a vector register of the selected waves (a view when all are selected)."""
        array = self.v[reg]
        if array is None:
            raise ExecutionError(f"vector register {reg} is not allocated")
        return array if self.idx is None else array[self.idx]

    def wv(self, reg: int, value: np.ndarray | int, where: np.ndarray | None = None) -> None:
        """Write active lanes (further restricted by `where`) of a vector register."""
        array = self.v[reg]
        if array is None:
            raise ExecutionError(f"vector register {reg} is not allocated")
        if where is None:
            where = None if self.full else self.lanes
        elif not self.full:
            where = where & self.lanes
        if self.idx is None:
            if where is None:
                array[...] = value
            else:
                np.copyto(array, value, where=where, casting="unsafe")
        elif where is None:
            array[self.idx] = value
        else:
            part = array[self.idx]
            np.copyto(part, value, where=where, casting="unsafe")
            array[self.idx] = part

    def wv64(self, reg: int, value: np.ndarray, where: np.ndarray | None = None) -> None:
        value = np.asarray(value, np.uint64)
        self.wv(reg, (value & np.uint64(0xFFFFFFFF)).astype(np.uint32), where)
        self.wv(reg + 1, (value >> np.uint64(32)).astype(np.uint32), where)

    def mode_bits(self, shift: int, width: int) -> int:
        """A field of MODE, which all selected waves must agree on."""
        mode = self.mode if self.idx is None else self.mode[self.idx]
        field = (mode >> np.uint32(shift)) & np.uint32((1 << width) - 1)
        if (field != field[0]).any():
            raise ExecutionError("waves that run in step disagree about MODE")
        return int(field[0])

    @property
    def fp8_saturates(self) -> bool:
        return bool(self.mode_bits(23, 1))

    @property
    def flush32(self) -> bool:
        """True when MODE flushes float32 subnormals (inputs and results)."""
        return self._flush(4)

    @property
    def flush16(self) -> bool:
        return self._flush(6)

    def _flush(self, shift: int) -> bool:
        bits = self.mode_bits(shift, 2)
        if bits in (1, 2):
            raise ExecutionError(f"MODE denormal control {bits} (one direction only) is not modelled")
        return bits == 0


def _initial_mode(program: Program) -> int:
    d = program.directives
    if d.get("float_round_mode_32", 0) or d.get("float_round_mode_16_64", 0):
        raise ExecutionError(
            "only round to nearest even is modelled; the kernel asks for another rounding mode"
        )
    return (
        d.get("float_denorm_mode_32", 3) << 4
        | d.get("float_denorm_mode_16_64", 3) << 6
        | d.get("dx10_clamp", 1) << 8
        | d.get("ieee_mode", 1) << 9
        | d.get("fp16_overflow", 0) << 23
    )
