"""Matrix instructions: D[M, N] = A[M, K] B[K, N] + C[M, N] over the registers of a wave.

Register layouts are those of AMD's matrix instruction calculator and ISA documents. Products and sums are computed
in float64 and rounded once to float32 at the end; the hardware's order and rounding of the sum are not published, so
results agree with hardware only to within float32 rounding of the accumulation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .asm import Instruction, Operand
from .formats import BF8, E2M1, E2M3, E3M2, E4M3FN, E5M2, FP8, SmallFloat, bf16_to_f32, e8m0_to_f64
from .operands import constant_bits
from .state import LANES, Machine
from .table import Run, register

_U32 = np.uint32


@functools.cache
def result_layout(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column, each [registers, 64], of every element of a `size` x `size` result (size 16 or 32)."""
    lane = np.arange(LANES)
    registers = size * size // LANES
    reg = np.arange(registers)[:, None]
    rows_per_group = LANES // size * 4  # registers come in fours; the lane groups take turns
    row = rows_per_group * (reg // 4) + 4 * (lane // size) + reg % 4
    return row, np.broadcast_to(lane % size, row.shape)


@functools.cache
def operand_k(size: int, depth: int, chunk: int) -> np.ndarray:
    """K index [64, values per lane] of the values a lane holds; its row (column for B) is lane % size.

    A lane group takes `chunk` consecutive K, then the next group does, and so on until each lane is full.
    """
    groups = LANES // size
    per_lane = depth // groups
    group = (np.arange(LANES) // size)[:, None]
    value = np.arange(per_lane)[None, :]
    return chunk * groups * (value // chunk) + chunk * group + value % chunk


@dataclass(frozen=True)
class Element:
    """How a lane's registers split into values: `bits` each, decoded to float64 by `decode`."""

    bits: int
    decode: Callable[[np.ndarray], np.ndarray]


def _small(form: SmallFloat) -> Element:
    return Element(form.bits, lambda codes: form.values[codes].astype(np.float64))


def _round_xf32(bits: np.ndarray) -> np.ndarray:
    """float32 patterns rounded to 10 mantissa bits (nearest even), as the xf32 instructions read them."""
    bits = bits.astype(np.uint32)
    rounded = (bits + _U32(0xFFF) + ((bits >> _U32(13)) & _U32(1))) & ~_U32(0x1FFF)
    special = (bits & _U32(0x7F800000)) == _U32(0x7F800000)
    return np.where(special, bits, rounded).view(np.float32).astype(np.float64)


ELEMENTS: dict[str, Element] = {
    "f32": Element(32, lambda c: c.astype(np.uint32).view(np.float32).astype(np.float64)),
    "xf32": Element(32, _round_xf32),
    "f16": Element(16, lambda c: c.astype(np.uint16).view(np.float16).astype(np.float64)),
    "bf16": Element(16, lambda c: bf16_to_f32(c).astype(np.float64)),
    "i8": Element(8, lambda c: c.astype(np.uint8).view(np.int8).astype(np.float64)),
}
# Operand formats of the f8f6f4 instructions, by the value of cbsz (A) and blgp (B).
F8F6F4 = (E4M3FN, E5M2, E2M3, E3M2, E2M1)


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """Codes [..., words * 32 / bits] of uint32[..., words], lowest bits first."""
    if bits in (8, 16, 32):
        dtype = {8: np.uint8, 16: np.uint16, 32: np.uint32}[bits]
        return np.ascontiguousarray(words).view(dtype)
    stream = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=-1, bitorder="little")
    groups = stream.reshape(*stream.shape[:-1], -1, bits)
    return (groups << np.arange(bits, dtype=np.uint8)).sum(axis=-1, dtype=np.uint8)


def _words(m: Machine, o: Operand) -> np.ndarray:
    """uint32[count, 64, registers]."""
    return np.stack([m.rv(o.reg + i) for i in range(o.count)], axis=-1)


def gather(m: Machine, o: Operand, element: Element, size: int, depth: int, chunk: int) -> np.ndarray:
    """float64[count, size, depth] of an A operand; a B operand is read as its transpose."""
    values = element.decode(unpack(_words(m, o), element.bits))
    out = np.empty((m.count, size, depth))
    lane = np.arange(LANES)[:, None]
    out[:, lane % size, operand_k(size, depth, chunk)] = values
    return out


def _accumulator(ins: Instruction, o: Operand, registers: int, kind: str) -> Callable[[Machine], Any]:
    """C as float64[count, registers, 64] or a constant."""
    dtype = np.int32 if kind == "i32" else np.float32
    if o.kind in ("int", "float"):
        value = np.uint32(constant_bits(o, kind, ins)).view(dtype)
        return lambda m: np.float64(value)
    if o.kind != "v" or o.count != registers:
        raise ins.unsupported(f"accumulator {o.text}")
    return lambda m: (
        np.stack([m.rv(o.reg + i) for i in range(registers)], axis=1).view(dtype).astype(np.float64)
    )


def _check_operand(ins: Instruction, o: Operand, values: int, bits: int) -> None:
    if o.kind != "v" or o.count * 32 != values * bits:
        raise ins.unsupported(f"operand {o.text} does not hold {values} values of {bits} bits")


def _write_result(m: Machine, o: Operand, product: np.ndarray, c: Any, size: int, kind: str) -> None:
    row, column = result_layout(size)
    total = product[:, row, column] + c
    if kind == "i32":
        bits = np.mod(total, 2.0**32).astype(np.uint32)
    else:
        bits = total.astype(np.float32).view(np.uint32)
    for i in range(o.count):
        m.wv(o.reg + i, bits[:, i])


def _require_full(m: Machine, ins: Instruction) -> None:
    """The matrix unit ignores EXEC; a kernel that relies on a partial EXEC here is wrong."""
    if not m.full:
        raise ins.unsupported("matrix instruction with inactive lanes")


def _plain(size: int, depth: int, a_kind: str, b_kind: str, result: str) -> Callable[[Instruction], Run]:
    def element(kind: str, target: str) -> Element:
        if kind in ("fp8", "bf8"):
            return _small((FP8 if kind == "fp8" else BF8)[target])
        return ELEMENTS[kind]

    def build(ins: Instruction) -> Run:
        d, a, b, c = ins.operands
        per_lane = depth * size // LANES
        registers = size * size // LANES
        for o, kind in ((a, a_kind), (b, b_kind)):
            _check_operand(ins, o, per_lane, 8 if kind in ("fp8", "bf8") else ELEMENTS[kind].bits)
        read_c = _accumulator(ins, c, registers, result)
        _check_operand(ins, d, registers, 32)

        def run(m: Machine) -> None:
            _require_full(m, ins)
            left = gather(m, a, element(a_kind, m.target), size, depth, per_lane)
            right = gather(m, b, element(b_kind, m.target), size, depth, per_lane)
            _write_result(m, d, left @ right.transpose(0, 2, 1), read_c(m), size, result)

        return run

    return build


# (rows, K, operand type, result type, targets): single-block instructions. K in the name is the K of one instruction.
_PLAIN: tuple[tuple[int, int, str, str, tuple[str, ...]], ...] = (
    (32, 2, "f32", "f32", ()),
    (16, 4, "f32", "f32", ()),
    (32, 4, "xf32", "f32", ("gfx942",)),
    (16, 8, "xf32", "f32", ("gfx942",)),
    (32, 8, "f16", "f32", ()),
    (16, 16, "f16", "f32", ()),
    (32, 8, "bf16", "f32", ()),
    (16, 16, "bf16", "f32", ()),
    (32, 16, "f16", "f32", ("gfx950",)),
    (16, 32, "f16", "f32", ("gfx950",)),
    (32, 16, "bf16", "f32", ("gfx950",)),
    (16, 32, "bf16", "f32", ("gfx950",)),
    (32, 16, "i8", "i32", ()),
    (16, 32, "i8", "i32", ()),
    (32, 32, "i8", "i32", ("gfx950",)),
    (16, 64, "i8", "i32", ("gfx950",)),
)
for _size, _depth, _kind, _result, _targets in _PLAIN:
    register(
        f"v_mfma_{_result}_{_size}x{_size}x{_depth}_{_kind}",
        _plain(_size, _depth, _kind, _kind, _result),
        _targets,
    )
# Names that gfx90a introduced and LLVM keeps as aliases.
for _size, _depth in ((32, 8), (16, 16)):
    register(f"v_mfma_f32_{_size}x{_size}x{_depth}bf16_1k", _plain(_size, _depth, "bf16", "bf16", "f32"))
    register(f"v_mfma_f32_{_size}x{_size}x{_depth}f16", _plain(_size, _depth, "f16", "f16", "f32"))
for _a in ("fp8", "bf8"):
    for _b in ("fp8", "bf8"):
        for _size, _depth in ((32, 16), (16, 32)):
            register(f"v_mfma_f32_{_size}x{_size}x{_depth}_{_a}_{_b}", _plain(_size, _depth, _a, _b, "f32"))


def _chunk(form: SmallFloat, per_lane: int) -> int:
    """8-bit operands hold two chunks of 16 consecutive K a lane, narrower ones 32 consecutive K."""
    return 16 if form.bits == 8 else per_lane


def scale_byte(op_sel: int, op_sel_hi: int) -> int:
    """Which byte of a scale register an operand uses."""
    return op_sel + 2 * op_sel_hi


def scales(m: Machine, o: Operand, byte: int, size: int, depth: int) -> np.ndarray:
    """float64[count, size, depth]: the scale of each element. Block b of row r has its scale in lane r + size * b."""
    codes = (m.rv(o.reg) >> _U32(8 * byte)) & _U32(255)
    blocks = e8m0_to_f64(codes).reshape(m.count, depth // 32, size)
    return np.repeat(blocks.transpose(0, 2, 1), 32, axis=2)


def _f8f6f4(scaled: bool, size: int, depth: int) -> Callable[[Instruction], Run]:
    def build(ins: Instruction) -> Run:
        d, a, b, c, *scale_operands = ins.operands
        formats = []
        for name in ("cbsz", "blgp"):
            code = ins.take_int(name)
            if code >= len(F8F6F4):
                raise ins.unsupported(f"{name}:{code}")
            formats.append(F8F6F4[code])
        per_lane, registers = depth * size // LANES, size * size // LANES
        for o, form in zip((a, b), formats, strict=True):
            _check_operand(ins, o, per_lane, form.bits)
        read_c = _accumulator(ins, c, registers, "f32")
        _check_operand(ins, d, registers, 32)
        picks = []
        if scaled:
            low, high = ins.take_list("op_sel", 2, 0), ins.take_list("op_sel_hi", 2, 0)
            if len(scale_operands) != 2 or any(o.kind != "v" for o in scale_operands):
                raise ins.unsupported("scales must be two vector registers")
            picks = [(o, scale_byte(low[i], high[i])) for i, o in enumerate(scale_operands)]
        elif scale_operands:
            raise ins.unsupported(f"{len(ins.operands)} operands")

        def run(m: Machine) -> None:
            _require_full(m, ins)
            sides = []
            for i, (o, form) in enumerate(zip((a, b), formats, strict=True)):
                side = gather(m, o, _small(form), size, depth, _chunk(form, per_lane))
                sides.append(side * scales(m, *picks[i], size, depth) if picks else side)
            _write_result(m, d, sides[0] @ sides[1].transpose(0, 2, 1), read_c(m), size, "f32")

        return run

    return build


for _size, _depth in ((32, 64), (16, 128)):
    _shape = f"{_size}x{_size}x{_depth}"
    register(f"v_mfma_f32_{_shape}_f8f6f4", _f8f6f4(False, _size, _depth), ("gfx950",))
    register(f"v_mfma_scale_f32_{_shape}_f8f6f4", _f8f6f4(True, _size, _depth), ("gfx950",))
