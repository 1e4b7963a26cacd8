"""Atomic operations on global memory and LDS. Lanes act one after the other, in lane order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .asm import Instruction
from .formats import bf16_to_f32, f32_to_bf16
from .lds import lds_address
from .memory import check_registers, place_operands, take_cache_flags
from .state import LANES, Machine
from .table import Run, register
from .tracking import LGKM, VM


@dataclass(frozen=True)
class Atomic:
    """`function(old, operand)` on elements of `dtype`; packed operations work on two 16-bit elements a word."""

    dtype: Any
    function: Callable[[Any, Any], Any]

    @property
    def size(self) -> int:
        return max(np.dtype(self.dtype).itemsize, 4)


def _increment(old: Any, limit: Any) -> Any:
    return 0 if old >= limit else old + 1


def _decrement(old: Any, limit: Any) -> Any:
    return limit if old == 0 or old > limit else old - 1


def _add_bf16(old: Any, x: Any) -> Any:
    return f32_to_bf16(bf16_to_f32(old) + bf16_to_f32(x))


_INTEGER: dict[str, tuple[Any, Any, Callable[[Any, Any], Any]]] = {
    "add": (np.uint32, np.uint64, lambda old, x: old + x),
    "sub": (np.uint32, np.uint64, lambda old, x: old - x),
    "smin": (np.int32, np.int64, min),
    "smax": (np.int32, np.int64, max),
    "umin": (np.uint32, np.uint64, min),
    "umax": (np.uint32, np.uint64, max),
    "and": (np.uint32, np.uint64, lambda old, x: old & x),
    "or": (np.uint32, np.uint64, lambda old, x: old | x),
    "xor": (np.uint32, np.uint64, lambda old, x: old ^ x),
    "swap": (np.uint32, np.uint64, lambda old, x: x),
    "inc": (np.uint32, np.uint64, _increment),
    "dec": (np.uint32, np.uint64, _decrement),
}
GLOBAL = {name: Atomic(narrow, f) for name, (narrow, _, f) in _INTEGER.items()}
GLOBAL |= {f"{name}_x2": Atomic(wide, f) for name, (_, wide, f) in _INTEGER.items()}
GLOBAL |= {
    "add_f32": Atomic(np.float32, lambda old, x: old + x),
    "add_f64": Atomic(np.float64, lambda old, x: old + x),
    "min_f64": Atomic(np.float64, np.fmin),
    "max_f64": Atomic(np.float64, np.fmax),
    "pk_add_f16": Atomic(np.float16, lambda old, x: old + x),
    "pk_add_bf16": Atomic(np.uint16, _add_bf16),
}
LOCAL = {
    "add_u32": GLOBAL["add"],
    "add_u64": GLOBAL["add_x2"],
    "sub_u32": GLOBAL["sub"],
    "min_i32": GLOBAL["smin"],
    "max_i32": GLOBAL["smax"],
    "min_u32": GLOBAL["umin"],
    "max_u32": GLOBAL["umax"],
    "and_b32": GLOBAL["and"],
    "or_b32": GLOBAL["or"],
    "xor_b32": GLOBAL["xor"],
    "add_f32": GLOBAL["add_f32"],
    "add_f64": GLOBAL["add_f64"],
    "min_f32": Atomic(np.float32, np.fmin),
    "max_f32": Atomic(np.float32, np.fmax),
}


def _operands(m: Machine, reg: int, active: np.ndarray, atomic: Atomic, part: int = 0) -> np.ndarray:
    """[n, elements] operand values of the active lanes."""
    words = [m.rv(reg + part * atomic.size // 4 + i)[active] for i in range(atomic.size // 4)]
    return np.ascontiguousarray(np.stack(words, axis=-1)).view(atomic.dtype)


def apply_in_order(memory: np.ndarray, at: np.ndarray, values: np.ndarray, atomic: Atomic) -> np.ndarray:
    """Update `memory` (uint8) at byte offsets `at`, one lane after the other; the old values [n, elements]."""
    view = memory.view(atomic.dtype)
    step = np.dtype(atomic.dtype).itemsize
    old = np.zeros(values.shape, atomic.dtype)
    for i, start in enumerate(at // step):
        for j in range(values.shape[1]):
            old[i, j] = view[start + j]
            view[start + j] = atomic.function(old[i, j], values[i, j])
    return old


def _return_old(m: Machine, reg: int, active: np.ndarray, old: np.ndarray) -> None:
    words = np.ascontiguousarray(old).view(np.uint32)
    for i in range(words.shape[1]):
        result = np.zeros((m.count, LANES), np.uint32)
        result[active] = words[:, i]
        m.wv(reg + i, result)


def _global(atomic: Atomic, buffer: bool) -> Callable[[Instruction], Run]:
    def build(ins: Instruction) -> Run:
        returns = ins.take_flag("sc0")  # on gfx942 and gfx950, sc0 asks an atomic for the old value
        take_cache_flags(ins)
        operands = list(ins.operands)
        if buffer:
            destination = source = operands.pop(0)
        else:
            destination = operands.pop(0) if returns else operands[1]
            source = operands.pop(1)
        check_registers(ins, source, atomic.size)
        place = place_operands(ins, buffer, tuple(operands))
        keys = destination.keys if returns else ()

        def run(m: Machine) -> None:
            address, active = place(m, atomic.size)
            at = m.memory.locate(address[active], atomic.size, ins, write=True)
            old = apply_in_order(m.memory.bytes, at, _operands(m, source.reg, active, atomic), atomic)
            if returns:
                _return_old(m, destination.reg, active, old)
            m.tracker.issue(m, VM, keys)

        return run

    return build


def _compare_swap(dtype: Any, buffer: bool) -> Callable[[Instruction], Run]:
    """Stores the new value (first half of the data) where memory equals the second half."""
    atomic = Atomic(dtype, lambda old, x: x)
    size = atomic.size

    def build(ins: Instruction) -> Run:
        returns = ins.take_flag("sc0")
        take_cache_flags(ins)
        operands = list(ins.operands)
        if buffer:
            destination = source = operands.pop(0)
        else:
            destination = operands.pop(0) if returns else operands[1]
            source = operands.pop(1)
        check_registers(ins, source, 2 * size)
        place = place_operands(ins, buffer, tuple(operands))
        keys = destination.keys if returns else ()

        def run(m: Machine) -> None:
            address, active = place(m, size)
            at = m.memory.locate(address[active], size, ins, write=True)
            new, expected = (_operands(m, source.reg, active, atomic, part) for part in (0, 1))
            view = m.memory.bytes.view(dtype)
            old = np.zeros((len(at), 1), dtype)
            for i, place_in in enumerate(at // size):
                old[i] = view[place_in]
                if view[place_in] == expected[i, 0]:
                    view[place_in] = new[i, 0]
            if returns:
                _return_old(m, destination.reg, active, old)
            m.tracker.issue(m, VM, keys)

        return run

    return build


def _local(atomic: Atomic, returns: bool) -> Callable[[Instruction], Run]:
    def build(ins: Instruction) -> Run:
        operands = list(ins.operands)
        destination = operands.pop(0) if returns else operands[1]
        place, source = operands
        address, offset = lds_address(ins, place), ins.take_int("offset")
        keys = destination.keys if returns else ()

        def run(m: Machine) -> None:
            number = m.tracker.issue(m, LGKM, keys)
            at = m.lds.atomic_access(m, ins, address(m, offset), m.lanes, atomic.size, number)
            old = apply_in_order(m.lds.data, at, _operands(m, source.reg, m.lanes, atomic), atomic)
            if returns:
                _return_old(m, destination.reg, m.lanes, old)

        return run

    return build


for _name, _atomic in GLOBAL.items():
    register(f"global_atomic_{_name} flat_atomic_{_name}", _global(_atomic, False))
    register(f"buffer_atomic_{_name}", _global(_atomic, True))
for _name, _dtype in (("cmpswap", np.uint32), ("cmpswap_x2", np.uint64)):
    register(f"global_atomic_{_name} flat_atomic_{_name}", _compare_swap(_dtype, False))
    register(f"buffer_atomic_{_name}", _compare_swap(_dtype, True))
for _name, _atomic in LOCAL.items():
    register(f"ds_{_name}", _local(_atomic, False))
    _stem, _, _type = _name.rpartition("_")
    register(f"ds_{_stem}_rtn_{_type}", _local(_atomic, True))
