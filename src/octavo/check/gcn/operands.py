"""Turn operands into functions that read and write typed lane arrays.

A reader is `read(machine) -> array` of shape [waves, 64] (vector), [waves, 1] (scalar) or [] (constant), so that
NumPy broadcasting does what the hardware does. Types are named as in AMD's ISA documents: b32, u32, i32, f32, u16,
i16, f16, u64, i64, f64 and `mask` (a lane mask in a scalar register pair).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from .asm import Instruction, Operand
from .state import Machine

Reader = Callable[[Machine], Any]
Writer = Callable[..., None]

DTYPES: dict[str, Any] = {
    "b32": np.uint32,
    "u32": np.uint32,
    "i32": np.int32,
    "f32": np.float32,
    "b16": np.uint16,
    "u16": np.uint16,
    "i16": np.int16,
    "f16": np.float16,
    "b64": np.uint64,
    "u64": np.uint64,
    "i64": np.int64,
    "f64": np.float64,
}
FLOATS = {"f16", "f32", "f64"}
# b32 is here for v_cndmask_b32, whose source modifiers act on the sign bit.
_SIGN = {
    "b32": np.uint32(0x80000000),
    "f16": np.uint16(0x8000),
    "f32": np.uint32(0x80000000),
    "f64": np.uint64(1 << 63),
}
_TINY = np.float32(2.0**-126)


def width(kind: str) -> int:
    """Bits of a type."""
    return 64 if kind == "mask" else int(kind[1:])


def flush(x: np.ndarray) -> np.ndarray:
    """Replace float32 subnormals by zero of the same sign."""
    return np.where(np.abs(x) < _TINY, np.copysign(np.float32(0), x), x)


def constant_bits(o: Operand, kind: str, instruction: Instruction) -> int:
    """Bits of an inline constant or literal read as `kind` (CDNA3 ISA, "Scalar ALU operands")."""
    bits = width(kind)
    if o.kind == "float":
        # Inline floats take the operand's own precision; integer operands of 32 bits receive the float32 pattern.
        code = {16: "<e", 32: "<f", 64: "<d"}[bits]
        return int.from_bytes(struct.pack(code, o.value), "little")
    value = int(o.value)
    hexadecimal = "0x" in o.text
    if kind == "f64" and hexadecimal:
        return (value << 32) & 0xFFFFFFFFFFFFFFFF
    if bits == 64 and hexadecimal and value >> 31 and kind == "i64":
        raise instruction.unsupported("a 32-bit literal with its top bit set for a signed 64-bit operand")
    return value & ((1 << bits) - 1)


def raw32(o: Operand, instruction: Instruction, offset: int = 0, kind: str = "b32") -> Reader:
    """Reader of one 32-bit word of an operand (`offset` counts words), without modifiers."""
    if o.kind == "v":
        reg = o.reg + offset
        return lambda m: m.rv(reg)
    if o.kind == "s":
        reg = o.reg + offset
        return lambda m: m.rs(reg)[:, None]
    if o.kind in ("int", "float"):
        value = np.uint32(constant_bits(o, kind, instruction) >> (32 * offset) & 0xFFFFFFFF)
        return lambda m: value
    raise instruction.unsupported(f"operand {o.text!r}")


def _need(o: Operand, words: int, instruction: Instruction) -> None:
    if o.kind in ("v", "s") and o.count != words:
        raise instruction.unsupported(f"operand {o.text} has {o.count} registers, {words} needed")


def _with_sign(read: Reader, o: Operand, kind: str) -> Reader:
    """Apply |x| and -x to the bits of a float operand."""
    if not (o.neg or o.abs):
        return read
    sign, absolute, negative = _SIGN[kind], o.abs, o.neg
    unsigned, own = DTYPES["u" + kind[1:]], DTYPES[kind]

    def modified(m: Machine) -> Any:
        bits = read(m).view(unsigned)
        if absolute:
            bits = bits & ~sign
        return (bits ^ sign if negative else bits).view(own)

    return modified


def _maybe_flush(read: Reader, kind: str) -> Reader:
    if kind != "f32":
        return read
    return lambda m: flush(read(m)) if m.flush32 else read(m)


def reader(
    o: Operand, kind: str, instruction: Instruction, raw: Reader | None = None, high: bool = False
) -> Reader:
    """Typed reader of `o`. `raw` replaces the register read (DPP, SDWA); `high` takes the upper half of a word."""
    if kind == "mask":
        _need(o, 2, instruction)
        if o.kind != "s":
            raise instruction.unsupported(f"lane mask operand {o.text!r}")
        reg = o.reg
        return lambda m: m.mask(reg)
    if (o.neg or o.abs) and kind not in _SIGN:
        raise instruction.unsupported(f"neg or abs on the {kind} operand {o.text}")
    if o.sext and raw is None:
        raise instruction.unsupported("sext outside SDWA")
    dtype = DTYPES[kind]
    bits = width(kind)
    if bits == 64:
        _need(o, 2, instruction)
        read = _reader64(o, kind, instruction)
    elif bits == 32:
        _need(o, 1, instruction)
        word = raw or raw32(o, instruction, kind=kind)
        read = word if dtype is np.uint32 else lambda m: word(m).view(dtype)
    else:
        _need(o, 1, instruction)
        word = raw or raw32(o, instruction, kind=kind)
        shift = np.uint32(16 if high and o.kind not in ("int", "float") else 0)
        read = lambda m: (word(m) >> shift).astype(np.uint16).view(dtype)  # noqa: E731
    return _maybe_flush(_with_sign(read, o, kind), kind)


def _reader64(o: Operand, kind: str, instruction: Instruction) -> Reader:
    dtype = DTYPES[kind]
    if o.kind in ("int", "float"):
        value = np.uint64(constant_bits(o, kind, instruction)).view(dtype)
        return lambda m: value
    if o.kind == "s":
        reg = o.reg
        return lambda m: m.rs64(reg).view(dtype)[:, None]
    if o.kind == "v":
        reg = o.reg
        return lambda m: (
            m.rv(reg).astype(np.uint64) | (m.rv(reg + 1).astype(np.uint64) << np.uint64(32))
        ).view(dtype)
    raise instruction.unsupported(f"operand {o.text!r}")


def scalar_reader(o: Operand, kind: str, instruction: Instruction) -> Reader:
    """Reader for scalar instructions: arrays of shape [waves] or constants []."""
    _need(o, 1 if width(kind) <= 32 else 2, instruction)
    dtype = DTYPES[kind]
    if o.kind == "s":
        reg = o.reg
        if width(kind) == 64:
            return lambda m: m.rs64(reg).view(dtype)
        return lambda m: m.rs(reg).view(dtype)
    if o.kind in ("int", "float"):
        unsigned = np.uint64 if width(kind) == 64 else np.uint32
        value = np.asarray(constant_bits(o, kind, instruction), unsigned).view(dtype)
        return lambda m: value
    raise instruction.unsupported(f"scalar operand {o.text!r}")


def scalar_writer(o: Operand, kind: str, instruction: Instruction) -> Writer:
    """Writer of a scalar register (pair)."""
    if o.kind != "s":
        raise instruction.unsupported(f"scalar destination {o.text!r}")
    _need(o, 1 if width(kind) <= 32 else 2, instruction)
    reg = o.reg
    if width(kind) == 64:
        return lambda m, x: m.ws64(reg, np.asarray(x).view(np.uint64))
    return lambda m, x: m.ws(reg, np.asarray(x).view(np.uint32))


def writer(o: Operand, kind: str, instruction: Instruction, high: bool = False) -> Writer:
    """Typed writer `write(machine, value, where=None)` of a vector destination or a lane mask.

    16-bit results clear the upper half of the register, as gfx9 does, unless `high` asks for the upper half,
    which keeps the lower one.
    """
    if kind == "mask":
        _need(o, 2, instruction)
        if o.kind != "s":
            raise instruction.unsupported(f"lane mask destination {o.text!r}")
        reg = o.reg
        return lambda m, x, where=None: m.wmask(reg, x)
    if o.kind != "v":
        raise instruction.unsupported(f"vector destination {o.text!r}")
    reg, bits = o.reg, width(kind)
    _need(o, 2 if bits == 64 else 1, instruction)
    if bits == 64:
        return lambda m, x, where=None: m.wv64(reg, np.asarray(x).view(np.uint64), where)
    if bits == 32:
        if kind == "f32":

            def write_float(m: Machine, x: Any, where: np.ndarray | None = None) -> None:
                m.wv(reg, (flush(x) if m.flush32 else np.asarray(x)).view(np.uint32), where)

            return write_float
        return lambda m, x, where=None: m.wv(reg, np.asarray(x).view(np.uint32), where)
    if high:

        def write_high(m: Machine, x: Any, where: np.ndarray | None = None) -> None:
            half = np.asarray(x).view(np.uint16).astype(np.uint32) << np.uint32(16)
            m.wv(reg, (m.rv(reg) & np.uint32(0xFFFF)) | half, where)

        return write_high
    return lambda m, x, where=None: m.wv(reg, np.asarray(x).view(np.uint16).astype(np.uint32), where)
