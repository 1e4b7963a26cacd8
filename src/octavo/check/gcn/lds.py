"""Local data share: bytes of each workgroup, DS instructions, races between waves, bank conflicts.

Two accesses of a byte by different waves, one of them a write, are ordered when the first was waited for
(s_waitcnt) before a barrier that both waves passed. Each byte remembers its last writer and reader (wave, counter,
operation number); each wave remembers how far it had waited at its last barrier. That is enough to find a missing
wait, a missing barrier, and a direct-to-LDS load read too early by its own wave.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .asm import Instruction, Operand
from .errors import MemoryFault
from .lanes import parse_swizzle, swizzle_source
from .memory import stored_bytes, write_loaded
from .operands import raw32
from .state import LANES, Machine
from .table import Run, instruction, register
from .tracking import LGKM

_U32 = np.uint32
BANKS = {"gfx942": 32, "gfx950": 64}


class LocalMemory:
    """LDS of a batch of workgroups: `data` is uint8[workgroups, size]."""

    def __init__(self, workgroups: int, size: int, waves: int, target: str) -> None:
        self.size = size
        self.data = np.full(workgroups * size, 0xA5, np.uint8)
        self.banks = BANKS[target]
        self.conflicts = 0
        total = workgroups * size
        self.writer = np.full(total, -1, np.int32)
        self.writer_number = np.zeros(total, np.int64)
        self.writer_counter = np.zeros(total, np.int8)
        self.writer_atomic = np.zeros(total, bool)
        self.reader = np.full(total, -1, np.int32)
        self.reader_number = np.zeros(total, np.int64)
        self.many_readers = np.zeros(total, bool)
        self.synced = np.zeros((2, waves), np.int64)  # operations retired at the wave's last barrier

    def at_barrier(self, m: Machine, waves: np.ndarray) -> None:
        self.synced[:, waves] = m.tracker.done[:, waves]

    # --- addresses
    def _flat(self, m: Machine, ins: Instruction, address: np.ndarray, active: np.ndarray, size: int) -> Any:
        """Flat byte indices [n, size] and wave numbers [n] of the active lanes."""
        lane_address = np.broadcast_to(address, active.shape)[active]
        bad = (lane_address < 0) | (lane_address + size > self.size)
        if bad.any():
            raise MemoryFault(
                f"{ins.where()}: {size} bytes at LDS address {int(lane_address[np.argmax(bad)])} "
                f"with {self.size} bytes allocated"
            )
        waves = np.broadcast_to(m.selected[:, None], active.shape)[active]
        start = m.workgroup[waves] * self.size + lane_address
        return start[:, None] + np.arange(size), waves

    def read(
        self, m: Machine, ins: Instruction, address: np.ndarray, active: np.ndarray, size: int
    ) -> np.ndarray:
        """uint32[count, 64, words] read as a DS operation; sizes below a word are zero-extended."""
        index, waves = self._flat(m, ins, address, active, size)
        number = m.tracker.issued[LGKM][waves] + 1  # the caller issues the operation after reading
        self._check_read(m, ins, index, waves, number)
        self._count_conflicts(m, address, active, size)
        raw = np.zeros((len(waves), -(-size // 4) * 4), np.uint8)
        raw[:, :size] = self.data[index]
        out = np.zeros((*active.shape, raw.shape[1] // 4), _U32)
        out[active] = raw.view(_U32)
        return out

    def write(
        self,
        m: Machine,
        ins: Instruction,
        address: np.ndarray,
        active: np.ndarray,
        data: np.ndarray,
        counter: int,
        number: np.ndarray,
    ) -> None:
        """Write uint8[count, 64, size] as operation `number` (of each wave) of `counter`."""
        size = data.shape[2]
        index, waves = self._flat(m, ins, address, active, size)
        numbers = np.broadcast_to(number[:, None], active.shape)[active]
        if counter == LGKM:
            self._count_conflicts(m, address, active, size)
        new = data[active]
        # Compilers let waves write equal values to one byte (replicated layouts): harmless in any order.
        self._check_write(m, ins, index, waves, numbers, counter, self.data[index] != new)
        self.data[index] = new
        if ((self.data[index] != new) & (self.writer[index] != waves[:, None])).any():
            m.tracker.report("lds", ins, "two waves write different values to one byte in the same step")

    def atomic_access(
        self,
        m: Machine,
        ins: Instruction,
        address: np.ndarray,
        active: np.ndarray,
        size: int,
        number: np.ndarray,
    ) -> np.ndarray:
        """Flat byte offsets [n] of an atomic operation. Atomics of different waves need no order among themselves,
        but do against plain reads and writes."""
        index, waves = self._flat(m, ins, address, active, size)
        numbers = np.broadcast_to(number[:, None], active.shape)[active]
        plain = ~self.writer_atomic[index]
        self._count_conflicts(m, address, active, size)
        self._check_write(m, ins, index, waves, numbers, LGKM, plain)
        self.writer_atomic[index] = True
        return index[:, 0]

    # --- ordering
    def _unordered_writer(self, m: Machine, index: np.ndarray, waves: np.ndarray) -> np.ndarray:
        """True where the byte's last write is not ordered before an access of `waves`."""
        owner = self.writer[index]
        known = owner >= 0
        safe_owner = np.maximum(owner, 0)
        counter, number = self.writer_counter[index], self.writer_number[index]
        other = owner != waves[:, None]
        unsynced = number > self.synced[counter, safe_owner]
        # Own DS writes execute in order; an own direct-to-LDS load must have been waited for.
        own_async = (counter != LGKM) & (number > m.tracker.done[counter, safe_owner])
        return known & np.where(other, unsynced, own_async)

    def _check_read(self, m: Machine, ins: Instruction, index: Any, waves: Any, number: Any) -> None:
        if self._unordered_writer(m, index, waves).any():
            m.tracker.report("lds", ins, "reads a byte whose write is not ordered by a wait and a barrier")
        owner = self.reader[index]
        fresh = (owner >= 0) & (self.reader_number[index] > self.synced[LGKM, np.maximum(owner, 0)])
        others = fresh & (owner != waves[:, None])
        self.many_readers[index] = (self.many_readers[index] & fresh) | others
        self.reader[index] = waves[:, None]
        self.reader_number[index] = number[:, None]
        if len(waves):  # lanes of different waves reading one byte in the same step
            self.many_readers[index] |= self.reader[index] != waves[:, None]

    def _check_write(
        self,
        m: Machine,
        ins: Instruction,
        index: Any,
        waves: Any,
        number: Any,
        counter: int,
        changes: np.ndarray,
    ) -> None:
        if (self._unordered_writer(m, index, waves) & changes).any():
            m.tracker.report(
                "lds", ins, "overwrites a byte whose write is not ordered by a wait and a barrier"
            )
        owner = self.reader[index]
        fresh = (owner >= 0) & (self.reader_number[index] > self.synced[LGKM, np.maximum(owner, 0)])
        if (fresh & changes & ((owner != waves[:, None]) | self.many_readers[index])).any():
            m.tracker.report(
                "lds", ins, "overwrites a byte whose read is not ordered by a wait and a barrier"
            )
        self.writer[index] = waves[:, None]
        self.writer_number[index] = number[:, None]
        self.writer_counter[index] = counter
        self.writer_atomic[index] = False

    def _count_conflicts(self, m: Machine, address: np.ndarray, active: np.ndarray, size: int) -> None:
        """Add the extra cycles of the access: lanes are served in groups that fill all banks once (32 lanes of 4
        bytes on 32 banks), and a bank serves one word a cycle; lanes that read the same word share it."""
        words = max(size // 4, 1)
        group = self.banks // (4 if words == 3 else words)
        first = np.broadcast_to(address, active.shape) >> 2
        word = first[..., None] + np.arange(words)
        word = np.where(active[..., None], word, -1)
        word = word.reshape(-1, min(group, LANES) * words)  # one row a group
        word = np.sort(word, axis=1)
        distinct = np.ones(word.shape, bool)
        distinct[:, 1:] = word[:, 1:] != word[:, :-1]
        distinct &= word >= 0
        rows = np.broadcast_to(np.arange(len(word))[:, None], word.shape)[distinct]
        load = np.bincount(rows * self.banks + word[distinct] % self.banks, minlength=len(word) * self.banks)
        cycles = load.reshape(len(word), self.banks).max(axis=1)
        self.conflicts += int(np.maximum(cycles - 1, 0).sum())


# --- reads and writes
def lds_address(ins: Instruction, o: Operand) -> Callable[[Machine, int], np.ndarray]:
    """`address(machine, offset)`: byte addresses, computed modulo 2^32 as the hardware does."""
    word = raw32(o, ins)
    return lambda m, offset: (word(m) + _U32(offset)).astype(np.int64)


def _read(kind: str, size: int) -> Callable[[Instruction], Run]:
    def build(ins: Instruction) -> Run:
        destination, source = ins.operands
        address, offset = lds_address(ins, source), ins.take_int("offset")

        def run(m: Machine) -> None:
            data = m.lds.read(m, ins, address(m, offset), m.lanes, size)
            write_loaded(m, destination, data, kind)
            m.tracker.issue(m, LGKM, destination.keys)

        return run

    return build


def _write(size: int, high: bool = False) -> Callable[[Instruction], Run]:
    def build(ins: Instruction) -> Run:
        place, source = ins.operands
        address, offset = lds_address(ins, place), ins.take_int("offset")

        def run(m: Machine) -> None:
            number = m.tracker.issue(m, LGKM, ())
            data = stored_bytes(m, source, size, high)
            m.lds.write(m, ins, address(m, offset), m.lanes, data, LGKM, number)

        return run

    return build


for _name, _size in {"b32": 4, "b64": 8, "b96": 12, "b128": 16}.items():
    register(f"ds_read_{_name}", _read(_name, _size))
    register(f"ds_write_{_name}", _write(_size))
for _name, _size in {"u8": 1, "i8": 1, "u16": 2, "i16": 2}.items():
    register(f"ds_read_{_name}", _read(_name, _size))
for _name, _size in {"u8_d16": 1, "u8_d16_hi": 1, "u16_d16": 2, "u16_d16_hi": 2}.items():
    register(f"ds_read_{_name}", _read(_name, _size))
for _name, _size in {"b8": 1, "b16": 2}.items():
    register(f"ds_write_{_name}", _write(_size))
    register(f"ds_write_{_name}_d16_hi", _write(_size, True))


def _pair_offsets(ins: Instruction, unit: int) -> tuple[int, int]:
    return ins.take_int("offset0") * unit, ins.take_int("offset1") * unit


def _read2(size: int, stride: int) -> Callable[[Instruction], Run]:
    def build(ins: Instruction) -> Run:
        destination, source = ins.operands
        address, offsets = lds_address(ins, source), _pair_offsets(ins, size * stride)

        def run(m: Machine) -> None:
            parts = [m.lds.read(m, ins, address(m, offset), m.lanes, size) for offset in offsets]
            write_loaded(m, destination, np.concatenate(parts, axis=2), "b32")
            m.tracker.issue(m, LGKM, destination.keys)

        return run

    return build


def _write2(size: int, stride: int) -> Callable[[Instruction], Run]:
    def build(ins: Instruction) -> Run:
        place, *sources = ins.operands
        address, offsets = lds_address(ins, place), _pair_offsets(ins, size * stride)

        def run(m: Machine) -> None:
            number = m.tracker.issue(m, LGKM, ())
            for source, offset in zip(sources, offsets, strict=True):
                data = stored_bytes(m, source, size, False)
                m.lds.write(m, ins, address(m, offset), m.lanes, data, LGKM, number)

        return run

    return build


for _name, _size in {"b32": 4, "b64": 8}.items():
    register(f"ds_read2_{_name}", _read2(_size, 1))
    register(f"ds_read2st64_{_name}", _read2(_size, 64))
    register(f"ds_write2_{_name}", _write2(_size, 1))
    register(f"ds_write2st64_{_name}", _write2(_size, 64))


def _read_transposed(bits: int) -> Callable[[Instruction], Run]:
    """ds_read_b64_tr_b*: groups of 16 lanes read a K x 16 matrix, rows contiguous in memory, and each lane keeps one
    column (CDNA4 ISA, "MFMA Transpose Load from LDS"). A lane supplies 64 bits (96 for 6-bit elements), that is
    `n` elements; 16 / n lanes supply a row; lane i receives element i of every row."""
    size = 12 if bits == 6 else 8
    n = 8 * size // bits
    lane, element = np.arange(LANES), np.arange(n)
    column = lane % 16
    source_lane = (lane - column)[:, None] + (16 // n) * element[None, :] + (column // n)[:, None]
    source_element = np.broadcast_to((column % n)[:, None], source_lane.shape)

    def build(ins: Instruction) -> Run:
        destination, source = ins.operands
        address, offset = lds_address(ins, source), ins.take_int("offset")

        def run(m: Machine) -> None:
            if not m.full:
                raise ins.unsupported("transposing read with inactive lanes")
            data = m.lds.read(m, ins, address(m, offset), m.lanes, size)
            stream = np.unpackbits(data.view(np.uint8), axis=-1, bitorder="little")
            elements = stream.reshape(m.count, LANES, n, bits)
            moved = elements[:, source_lane, source_element].reshape(m.count, LANES, -1)
            packed = np.packbits(moved, axis=-1, bitorder="little").view(_U32)
            write_loaded(m, destination, packed, "b32")
            m.tracker.issue(m, LGKM, destination.keys)

        return run

    return build


for _bits, _name in ((16, "b64_tr_b16"), (8, "b64_tr_b8"), (4, "b64_tr_b4"), (6, "b96_tr_b6")):
    register(f"ds_read_{_name}", _read_transposed(_bits), ("gfx950",))


# --- permutes: they use the LDS crossbar, not its memory
@instruction("ds_bpermute_b32")
def _backward_permute(ins: Instruction) -> Run:
    """Each active lane reads the lane named by its address / 4; an inactive source lane reads as 0."""
    destination, address, source = ins.operands
    read_address, read = raw32(address, ins), raw32(source, ins)
    offset = _U32(ins.take_int("offset"))

    def run(m: Machine) -> None:
        lane = ((np.broadcast_to(read_address(m), m.lanes.shape) + offset) >> _U32(2)).astype(np.int64) & 63
        values = np.where(m.lanes, read(m), _U32(0))
        m.wv(destination.reg, np.take_along_axis(values, lane, axis=1))
        m.tracker.issue(m, LGKM, destination.keys)

    return run


@instruction("ds_permute_b32")
def _forward_permute(ins: Instruction) -> Run:
    """Each active lane sends its value to the lane named by its address / 4; the highest sender wins; lanes that
    receive nothing read 0."""
    destination, address, source = ins.operands
    read_address, read = raw32(address, ins), raw32(source, ins)
    offset = _U32(ins.take_int("offset"))

    def run(m: Machine) -> None:
        lane = ((np.broadcast_to(read_address(m), m.lanes.shape) + offset) >> _U32(2)).astype(np.int64) & 63
        values, result = np.broadcast_to(read(m), m.lanes.shape), np.zeros((m.count, LANES), _U32)
        rows = np.arange(m.count)
        for sender in range(LANES):
            on = m.lanes[:, sender]
            result[rows[on], lane[on, sender]] = values[on, sender]
        m.wv(destination.reg, result)
        m.tracker.issue(m, LGKM, destination.keys)

    return run


@instruction("ds_swizzle_b32")
def _swizzle(ins: Instruction) -> Run:
    destination, source = ins.operands
    text = ins.take("offset", "0") or "0"
    pattern = parse_swizzle(text) if "(" in text else int(text, 0)
    if pattern is None:
        raise ins.unsupported(f"swizzle {text}")
    lanes, read = swizzle_source(pattern), raw32(source, ins)

    def run(m: Machine) -> None:
        values = np.where(m.lanes, read(m), _U32(0))
        m.wv(destination.reg, values[:, lanes])
        m.tracker.issue(m, LGKM, destination.keys)

    return run
