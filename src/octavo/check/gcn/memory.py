"""Global memory: an address space over the launch's arrays, scalar loads, global, flat and buffer instructions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .asm import M0, Instruction, Operand
from .errors import MemoryFault
from .operands import Reader, raw32, scalar_reader
from .state import LANES, Machine
from .table import Run, instruction, register
from .tracking import LGKM, VM

_U32, _U64 = np.uint32, np.uint64
_BASE = 0x7F3A_0000_0000  # 47-bit addresses, as the driver gives out; the upper half must survive 64-bit arithmetic
_GUARD = 4096  # bytes between buffers, so that an overrun never lands in a neighbour


class GlobalMemory:
    """Buffers in one array, with unmapped bytes around each and the alignment (to 256 bytes) that the host has.

    Arrays that share memory share addresses. `store_back` copies written buffers into the arrays.
    """

    def __init__(self, arrays: list[np.ndarray], kernarg: np.ndarray) -> None:
        spans = sorted({(a.__array_interface__["data"][0], a.nbytes) for a in (*arrays, kernarg)})
        merged: list[list[int]] = []
        for start, size in spans:
            if merged and start < merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], start + size)
            else:
                merged.append([start, start + size])
        self._host = [m[0] for m in merged]
        self.starts = np.zeros(len(merged), np.int64)
        self.ends = np.zeros(len(merged), np.int64)
        offset = _GUARD
        for i, (start, end) in enumerate(merged):
            offset += start % 256
            self.starts[i], self.ends[i] = offset, offset + end - start
            offset = -(-(offset + end - start + _GUARD) // 256) * 256
        self.bytes = np.zeros(offset + _GUARD, np.uint8)
        self.writable = np.zeros(len(merged), bool)
        for a in arrays:
            self.writable[self._segment(a)] |= a.flags.writeable
        self._arrays = arrays
        for a in (*arrays, kernarg):
            self.copy_in(a)

    def _segment(self, a: np.ndarray) -> int:
        return int(np.searchsorted(self._host, a.__array_interface__["data"][0], "right")) - 1

    def _offset(self, a: np.ndarray) -> int:
        segment = self._segment(a)
        return int(self.starts[segment]) + a.__array_interface__["data"][0] - self._host[segment]

    def copy_in(self, a: np.ndarray) -> None:
        at = self._offset(a)
        self.bytes[at : at + a.nbytes] = a.reshape(-1).view(np.uint8)

    def address(self, a: np.ndarray) -> int:
        """Device address of an array of the launch."""
        return _BASE + self._offset(a)

    def store_back(self) -> None:
        for a in self._arrays:
            if a.flags.writeable:
                at = self._offset(a)
                a.reshape(-1).view(np.uint8)[:] = self.bytes[at : at + a.nbytes]

    def locate(self, address: np.ndarray, size: int, ins: Instruction, write: bool = False) -> np.ndarray:
        """Array offsets of `size`-byte accesses at uint64 addresses; MemoryFault outside every buffer, and for a
        write to arguments or a read-only array."""
        at = (address - _U64(_BASE)).view(np.int64)
        segment = np.searchsorted(self.starts, at, "right") - 1
        bad = (segment < 0) | (at + size > self.ends[np.maximum(segment, 0)])
        if bad.any():
            first = int(address.reshape(-1)[np.argmax(bad.reshape(-1))])
            raise MemoryFault(
                f"{ins.where()}: {size} bytes at {first:#x} lie outside every argument's memory"
            )
        if write and not self.writable[segment].all():
            raise MemoryFault(f"{ins.where()}: stores into a read-only array")
        return at

    def load(self, at: np.ndarray, words: int) -> np.ndarray:
        """uint32[n, words] from byte offsets."""
        if (at & 3 == 0).all():
            return self.bytes.view(_U32)[(at >> 2)[:, None] + np.arange(words)]
        return self.bytes[at[:, None] + np.arange(4 * words)].view(_U32)

    def store(self, at: np.ndarray, data: np.ndarray) -> None:
        """Store uint8[n, size] at byte offsets."""
        self.bytes[at[:, None] + np.arange(data.shape[1])] = data


# --- scalar loads
def _scalar_load(words: int) -> Callable[[Instruction], Run]:
    def build(ins: Instruction) -> Run:
        destination, base, offset = ins.operands
        read_base = scalar_reader(base, "u64", ins)
        read_offset = scalar_reader(offset, "u32", ins)
        reg, keys = destination.reg, destination.keys

        def run(m: Machine) -> None:
            address = np.broadcast_to(read_base(m) + read_offset(m).astype(_U64), m.count) & ~_U64(3)
            at = m.memory.locate(address, 4 * words, ins)
            data = m.memory.load(at, words)
            for i in range(words):
                m.ws(reg + i, data[:, i])
            m.tracker.issue(m, LGKM, keys, scalar=True)

        return run

    return build


for _words in (1, 2, 4, 8, 16):
    register(f"s_load_dword{'' if _words == 1 else f'x{_words}'}", _scalar_load(_words))


# --- vector addresses
def take_cache_flags(ins: Instruction) -> None:
    for flag in ("sc0", "sc1", "nt", "glc", "slc"):
        ins.take(flag)


def global_address(ins: Instruction, base: Operand, vector: Operand) -> Reader:
    """uint64[count, 64] byte addresses: a vector pair, or a scalar pair plus a 32-bit vector offset."""
    offset = _U64(ins.take_int("offset") & 0xFFFFFFFFFFFFFFFF)
    if base.kind == "word" and base.text == "off":
        low, high = raw32(vector, ins), raw32(vector, ins, 1)
        return lambda m: (low(m).astype(_U64) | (high(m).astype(_U64) << _U64(32))) + offset
    scalar, word = scalar_reader(base, "u64", ins), raw32(vector, ins)
    return lambda m: scalar(m)[:, None] + word(m).astype(_U64) + offset


class BufferAddress:
    """Addresses of a raw buffer access: base + scalar offset + vector offset + immediate, range-checked.

    An access at or past num_records reads zero and stores nothing (CDNA3 ISA, "Buffer addressing"). Strides,
    index and swizzle are not modelled.
    """

    def __init__(self, ins: Instruction, vector: Operand | None, resource: Operand, scalar: Operand) -> None:
        self.ins = ins
        self.offset = ins.take_int("offset")
        if ins.take_flag("idxen"):
            raise ins.unsupported("idxen")
        offen = ins.take_flag("offen")
        if offen and vector is None:
            raise ins.unsupported("offen without a vector offset")
        self.vector = raw32(vector, ins) if offen and vector is not None else None
        self.scalar = scalar_reader(scalar, "u32", ins)
        if resource.count != 4:
            raise ins.unsupported(f"resource {resource.text}")
        self.resource = resource.reg

    def __call__(self, m: Machine, size: int) -> tuple[np.ndarray, np.ndarray]:
        """uint64[count, 64] addresses and bool[count, 64] in range, for `size` bytes a lane."""
        low, high, records = (m.rs(self.resource + i) for i in range(3))
        if (high >> _U32(16) & _U32(0x3FFF)).any() or (high >> _U32(31)).any():
            raise self.ins.unsupported("buffer resource with a stride or swizzle")
        base = low.astype(_U64) | ((high & _U32(0xFFFF)).astype(_U64) << _U64(32))
        inner = np.full((m.count, LANES), self.offset, np.int64)
        if self.vector is not None:
            inner = inner + self.vector(m).astype(np.int64)
        scalar = np.broadcast_to(self.scalar(m), m.count).astype(np.int64)[:, None]
        inside = inner + size <= records.astype(np.int64)[:, None] - scalar
        return base[:, None] + (inner + scalar).astype(_U64), inside


# --- loads and stores
_SIZES = {"ubyte": 1, "sbyte": 1, "ushort": 2, "sshort": 2, "short": 2, "byte": 1, "dword": 4}
_SIZES |= {f"dwordx{n}": 4 * n for n in (2, 3, 4)}


def load_vector(
    m: Machine, ins: Instruction, address: np.ndarray, active: np.ndarray, size: int
) -> np.ndarray:
    """uint8[count, 64, padded size]: bytes of active lanes, zero elsewhere; padded to whole words."""
    words = -(-size // 4)
    out = np.zeros((m.count, LANES, words), _U32)
    if size % 4 == 0:
        at = m.memory.locate(address[active], size, ins)
        out[active] = m.memory.load(at, words)
    else:
        at = m.memory.locate(address[active], size, ins)
        small = np.zeros((len(at), 4), np.uint8)
        small[:, :size] = m.memory.bytes[at[:, None] + np.arange(size)]
        out[active] = small.view(_U32)
    return out


def write_loaded(m: Machine, destination: Operand, data: np.ndarray, kind: str) -> None:
    """Write loaded words (uint32[count, 64, words]) to registers, extended or merged as the suffix says."""
    if kind.endswith(("_d16", "_d16_hi")):
        value = data[..., 0] & _U32(0xFFFF)
        if kind.startswith("s"):  # sbyte_d16
            value = extend_sign(value, 8) & _U32(0xFFFF) if kind.startswith("sbyte") else value
        old = m.rv(destination.reg)
        high = kind.endswith("_hi")
        merged = (old & _U32(0xFFFF)) | (value << _U32(16)) if high else (old & _U32(0xFFFF0000)) | value
        m.wv(destination.reg, merged)
        return
    for i in range(data.shape[2]):
        value = data[..., i]
        if kind in ("sbyte", "sshort", "i8", "i16"):
            value = extend_sign(value, 8 if kind in ("sbyte", "i8") else 16)
        m.wv(destination.reg + i, value)


def extend_sign(value: np.ndarray, bits: int) -> np.ndarray:
    up = _U32(32 - bits)
    return ((value << up).view(np.int32) >> np.int32(32 - bits)).view(_U32)


def stored_bytes(m: Machine, source: Operand, size: int, high: bool) -> np.ndarray:
    """uint8[count, 64, size] of a store's data registers."""
    words = [m.rv(source.reg + i) for i in range(-(-size // 4))]
    if high:
        words = [w >> _U32(16) for w in words]
    return np.ascontiguousarray(np.stack(words, axis=-1)).view(np.uint8)[..., :size]


def check_registers(ins: Instruction, o: Operand, size: int) -> None:
    if o.kind != "v" or o.count != -(-size // 4):
        raise ins.unsupported(f"data operand {o.text} for {size} bytes")


def _load(kind: str, buffer: bool) -> Callable[[Instruction], Run]:
    size = _SIZES[kind.removesuffix("_hi").removesuffix("_d16")]

    def build(ins: Instruction) -> Run:
        if ins.take_flag("lds"):
            return _load_to_lds(ins, size)
        take_cache_flags(ins)
        destination = ins.operands[0]
        check_registers(ins, destination, size)
        place = place_operands(ins, buffer, ins.operands[1:])

        def run(m: Machine) -> None:
            address, active = place(m, size)
            write_loaded(m, destination, load_vector(m, ins, address, active, size), kind)
            m.tracker.issue(m, VM, destination.keys)

        return run

    return build


def _store(kind: str, buffer: bool) -> Callable[[Instruction], Run]:
    size = _SIZES[kind.removesuffix("_d16_hi")]
    high = kind.endswith("_d16_hi")

    def build(ins: Instruction) -> Run:
        take_cache_flags(ins)
        if buffer:
            source, places = ins.operands[0], ins.operands[1:]
        else:
            source, places = ins.operands[1], (ins.operands[0], *ins.operands[2:])
        check_registers(ins, source, size)
        place = place_operands(ins, buffer, places)

        def run(m: Machine) -> None:
            address, active = place(m, size)
            at = m.memory.locate(address[active], size, ins, write=True)
            m.memory.store(at, stored_bytes(m, source, size, high)[active])
            m.tracker.issue(m, VM, ())

        return run

    return build


def place_operands(ins: Instruction, buffer: bool, operands: tuple[Operand, ...]) -> Callable[..., Any]:
    """`place(machine, size)` gives addresses and the lanes that access memory."""
    if buffer:
        vector = operands[0] if operands[0].kind == "v" else None
        buffer_address = BufferAddress(ins, vector, operands[-2], operands[-1])

        def place_buffer(m: Machine, size: int) -> tuple[np.ndarray, np.ndarray]:
            address, inside = buffer_address(m, size)
            return address, inside & m.lanes

        return place_buffer
    vector, *rest = operands
    base = rest[0] if rest else Operand("word", text="off")  # flat_* has no base operand
    address = global_address(ins, base, vector)
    return lambda m, size: (np.broadcast_to(address(m), m.lanes.shape), m.lanes)


def _load_to_lds(ins: Instruction, size: int) -> Run:
    """Load straight into LDS at M0 + offset + lane * size: no register is written; vmcnt says when it is done."""
    if size % 4:
        raise ins.unsupported("direct-to-LDS loads of less than a word")
    take_cache_flags(ins)
    offset = int(ins.modifiers.get("offset", "0"), 0)
    if ins.name.startswith("buffer_"):
        place = place_operands(ins, True, ins.operands)
    else:
        place = place_operands(ins, False, ins.operands)

    def run(m: Machine) -> None:
        address, inside = place(m, size)
        data = load_vector(m, ins, address, inside, size)
        target = m.rs(M0).astype(np.int64)[:, None] + offset + size * np.arange(LANES)
        number = m.tracker.issue(m, VM, ())
        bytes_ = data.view(np.uint8).reshape(m.count, LANES, -1)[..., :size]
        m.lds.write(m, ins, target, m.lanes, bytes_, VM, number)

    return run


for _kind in ("ubyte", "sbyte", "ushort", "sshort", "dword", "dwordx2", "dwordx3", "dwordx4"):
    register(f"global_load_{_kind} flat_load_{_kind}", _load(_kind, False))
    register(f"buffer_load_{_kind}", _load(_kind, True))
for _kind in ("ubyte_d16", "ubyte_d16_hi", "sbyte_d16", "sbyte_d16_hi", "short_d16", "short_d16_hi"):
    register(f"global_load_{_kind} flat_load_{_kind}", _load(_kind, False))
    register(f"buffer_load_{_kind}", _load(_kind, True))
for _kind in ("byte", "short", "dword", "dwordx2", "dwordx3", "dwordx4", "byte_d16_hi", "short_d16_hi"):
    register(f"global_store_{_kind} flat_store_{_kind}", _store(_kind, False))
    register(f"buffer_store_{_kind}", _store(_kind, True))
register("global_load_lds_dword", lambda ins: _load_to_lds(ins, 4))
register("global_load_lds_dwordx3", lambda ins: _load_to_lds(ins, 12), ("gfx950",))
register("global_load_lds_dwordx4", lambda ins: _load_to_lds(ins, 16), ("gfx950",))


@instruction("s_waitcnt")
def _waitcnt(ins: Instruction) -> Run:
    """vmcnt(n), lgkmcnt(n), expcnt(n), in any combination."""
    limits: dict[int, int] = {}
    for o in ins.operands:
        name, _, rest = o.text.partition("(")
        if not rest or name not in ("vmcnt", "lgkmcnt", "expcnt"):
            raise ins.unsupported(f"s_waitcnt operand {o.text!r}")
        if (
            name != "expcnt"
        ):  # exports do not exist in compute kernels, and gfx9 stores do not use this counter
            limits[VM if name == "vmcnt" else LGKM] = int(rest.rstrip(")"))

    def run(m: Machine) -> None:
        for counter, allowed in limits.items():
            m.tracker.wait(m, counter, allowed)

    return run
