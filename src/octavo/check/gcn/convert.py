"""Conversions between number formats, FP8, BF8, FP4 and BF16 included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .asm import Instruction
from .formats import BF8, E2M1, FP8, SmallFloat, bf16_to_f32, e8m0_to_f64, f32_to_bf16
from .operands import Reader, raw32, reader
from .state import Machine
from .table import Run, instruction, register, valu

_F = np.float32


def _to_integer(dtype: Any, rounding: Callable[[Any], Any] = np.trunc) -> Callable[[Any], Any]:
    """Float to integer: clamps at the ends of the range, NaN becomes 0."""
    info = np.iinfo(dtype)

    def convert(x: Any) -> Any:
        wide = rounding(np.asarray(x, np.float64))
        return np.where(np.isnan(wide), 0, np.clip(wide, info.min, info.max)).astype(dtype)

    return convert


valu("v_cvt_f32_i32", "f32", "i32", lambda x: np.asarray(x).astype(_F))
valu("v_cvt_f32_u32", "f32", "u32", lambda x: np.asarray(x).astype(_F))
valu("v_cvt_i32_f32", "i32", "f32", _to_integer(np.int32))
valu("v_cvt_u32_f32", "u32", "f32", _to_integer(np.uint32))
valu("v_cvt_rpi_i32_f32", "i32", "f32", _to_integer(np.int32, lambda x: np.floor(x + 0.5)))
valu("v_cvt_flr_i32_f32", "i32", "f32", _to_integer(np.int32, np.floor))
valu("v_cvt_f32_f16", "f32", "f16", lambda x: np.asarray(x).astype(_F))
valu("v_cvt_f16_f32", "f16", "f32", lambda x: np.asarray(x).astype(np.float16))
valu("v_cvt_f16_u16", "f16", "u16", lambda x: np.asarray(x).astype(np.float16))
valu("v_cvt_f16_i16", "f16", "i16", lambda x: np.asarray(x).astype(np.float16))
valu("v_cvt_u16_f16", "u16", "f16", _to_integer(np.uint16))
valu("v_cvt_i16_f16", "i16", "f16", _to_integer(np.int16))
valu("v_cvt_f64_f32", "f64", "f32", lambda x: np.asarray(x).astype(np.float64))
valu("v_cvt_f32_f64", "f32", "f64", lambda x: np.asarray(x).astype(_F))
valu("v_cvt_f64_i32", "f64", "i32", lambda x: np.asarray(x).astype(np.float64))
valu("v_cvt_f64_u32", "f64", "u32", lambda x: np.asarray(x).astype(np.float64))
for _i in range(4):
    valu(
        f"v_cvt_f32_ubyte{_i}",
        "f32",
        "u32",
        lambda x, k=8 * _i: ((x >> np.uint32(k)) & np.uint32(255)).astype(_F),
    )


def _pack_halves(low: Any, high: Any) -> Any:
    low, high = np.broadcast_arrays(low, high)
    return low.view(np.uint16).astype(np.uint32) | (high.view(np.uint16).astype(np.uint32) << np.uint32(16))


def _toward_zero_f16(x: Any) -> Any:
    near = np.asarray(x).astype(np.float16)
    over = np.abs(near.astype(np.float64)) > np.abs(x)
    return np.where(over, np.nextafter(near, np.float16(0)), near)


valu("v_pack_b32_f16", "b32", "b16 b16", _pack_halves)
valu(
    "v_cvt_pk_bf16_f32",
    "b32",
    "f32 f32",
    lambda a, b: _pack_halves(f32_to_bf16(a), f32_to_bf16(b)),
    targets=("gfx950",),
)
valu(
    "v_cvt_pk_f16_f32",
    "b32",
    "f32 f32",
    lambda a, b: _pack_halves(np.asarray(a).astype(np.float16), np.asarray(b).astype(np.float16)),
    targets=("gfx950",),
)
valu(
    "v_cvt_pkrtz_f16_f32",
    "b32",
    "f32 f32",
    lambda a, b: _pack_halves(_toward_zero_f16(a), _toward_zero_f16(b)),
)


# --- FP8 and BF8. Their meaning depends on the target, which the machine knows.
def _family(name: str) -> dict[str, SmallFloat]:
    return FP8 if "fp8" in name else BF8


def _selected_byte(ins: Instruction, o: Any, byte: int) -> Reader:
    word = raw32(o, ins)
    return lambda m: (word(m) >> np.uint32(8 * byte)) & np.uint32(255)


def _check_source(ins: Instruction, o: Any) -> None:
    if o.neg or o.abs:
        raise ins.unsupported("source modifiers on an FP8 operand")


@instruction("v_cvt_f32_fp8 v_cvt_f32_bf8")
def _decode_one(ins: Instruction) -> Run:
    """One byte to float32; SDWA's src0_sel names the byte."""
    family, (destination, source) = _family(ins.name), ins.operands
    _check_source(ins, source)
    if ins.encoding == "sdwa":
        ins.take("dst_sel")
        ins.take("dst_unused")
        part = ins.take("src0_sel", "BYTE_0") or ""
        if not part.startswith("BYTE_"):
            raise ins.unsupported(f"src0_sel:{part}")
        byte = int(part[-1])
    else:
        byte = 0
    read = _selected_byte(ins, source, byte)
    return lambda m: m.wv(destination.reg, family[m.target].decode(read(m)).view(np.uint32))


@instruction("v_cvt_pk_f32_fp8 v_cvt_pk_f32_bf8")
def _decode_pair(ins: Instruction) -> Run:
    """Two bytes of the selected half to two float32 registers."""
    family, (destination, source) = _family(ins.name), ins.operands
    _check_source(ins, source)
    part = ins.take("src0_sel", "WORD_0") if ins.encoding == "sdwa" else "WORD_0"
    if part not in ("WORD_0", "WORD_1"):
        raise ins.unsupported(f"src0_sel:{part}")
    reads = [_selected_byte(ins, source, 2 * int(part[-1]) + i) for i in (0, 1)]

    def run(m: Machine) -> None:
        decoded = [family[m.target].decode(r(m)).view(np.uint32) for r in reads]
        for i, value in enumerate(decoded):
            m.wv(destination.reg + i, value)

    return run


def _write_half(m: Machine, reg: int, half: int, value: Any) -> None:
    shift = np.uint32(16 * half)
    keep = m.rv(reg) & ~np.uint32(np.uint32(0xFFFF) << shift)
    m.wv(reg, keep | (np.asarray(value).astype(np.uint32) << shift))


def _write_byte(m: Machine, reg: int, byte: int, value: Any) -> None:
    shift = np.uint32(8 * byte)
    keep = m.rv(reg) & ~np.uint32(np.uint32(0xFF) << shift)
    m.wv(reg, keep | (np.asarray(value).astype(np.uint32) << shift))


@instruction("v_cvt_pk_fp8_f32 v_cvt_pk_bf8_f32")
def _encode_pair(ins: Instruction) -> Run:
    """Two float32 to two bytes in the half that op_sel's last bit names. MODE.FP16_OVFL saturates."""
    family = _family(ins.name)
    op_sel = ins.take_list("op_sel", 3, 0)
    if op_sel[:2] != (0, 0):
        raise ins.unsupported(f"op_sel {op_sel} selects parts of float32 sources")
    a, b = (reader(o, "f32", ins) for o in ins.operands[1:])
    reg = ins.operands[0].reg

    def run(m: Machine) -> None:
        form, saturate = family[m.target], m.fp8_saturates
        low = form.encode(a(m), saturate).astype(np.uint32)
        high = form.encode(b(m), saturate).astype(np.uint32)
        _write_half(m, reg, op_sel[2], low | (high << np.uint32(8)))

    return run


# --- gfx950's scaled conversions: to a small format divides by the scale's power of two, from one multiplies
def _power_of_two(scale: Any) -> Any:
    """2^(exponent field - 127) of a float32 scale: only the exponent bits count."""
    return e8m0_to_f64((np.asarray(scale).view(np.uint32) >> np.uint32(23)) & np.uint32(255))


_WIDE: dict[str, Callable[[Any], Any]] = {
    "f32": lambda x: x,
    "f16": lambda x: x,
    "bf16": bf16_to_f32,
}


def _halves(ins: Instruction, o: Any, kind: str) -> list[Reader]:
    """Readers of the two elements of a packed 16-bit operand."""
    if o.neg or o.abs:
        raise ins.unsupported("source modifiers on a packed 16-bit operand")
    word = raw32(o, ins)
    view = np.float16 if kind == "f16" else np.uint16
    decode = _WIDE[kind]
    return [
        lambda m, s=shift: decode(
            ((word(m) >> np.uint32(s)) & np.uint32(0xFFFF)).astype(np.uint16).view(view)
        )
        for shift in (0, 16)
    ]


def _scaled_encode(name: str, wide: str) -> None:
    small = "fp4" if "fp4" in name else "fp8"

    def build(ins: Instruction) -> Run:
        destination, *sources, scale_operand = ins.operands
        if wide == "f32":
            values = [reader(o, "f32", ins) for o in sources]
        else:
            values = _halves(ins, sources[0], wide)
        if len(values) != 2:
            raise ins.unsupported(f"{len(sources)} sources")
        scale = reader(scale_operand, "f32", ins)
        # op_sel ends with the destination: one bit (half) for FP8, two (byte) for FP4.
        op_sel = ins.take_list("op_sel", 4 if small == "fp4" or wide == "f32" else 3, 0)
        position = op_sel[2] + 2 * op_sel[3] if small == "fp4" else op_sel[-1]
        if any(op_sel[:2] if small == "fp4" else op_sel[:-1]):
            raise ins.unsupported(f"op_sel {op_sel}")

        def run(m: Machine) -> None:
            form = E2M1 if small == "fp4" else _family(name)[m.target]
            divisor = _power_of_two(scale(m))
            low, high = (form.encode(np.asarray(v(m), np.float64) / divisor, m.fp8_saturates) for v in values)
            shift = np.uint32(form.bits)
            packed = low.astype(np.uint32) | (high.astype(np.uint32) << shift)
            (_write_byte if small == "fp4" else _write_half)(m, destination.reg, position, packed)

        return run

    register(name, build, ("gfx950",))


def _scaled_decode(name: str, wide: str) -> None:
    small = "fp4" if name.endswith("fp4") else "fp8"

    def build(ins: Instruction) -> Run:
        destination, source, scale_operand = ins.operands
        _check_source(ins, source)
        scale = reader(scale_operand, "f32", ins)
        op_sel = ins.take_list("op_sel", 4, 0)
        position = op_sel[0] + 2 * op_sel[1] if small == "fp4" else op_sel[0]
        if any(op_sel[2 if small == "fp4" else 1 :]):
            raise ins.unsupported(f"op_sel {op_sel}")
        word = raw32(source, ins)
        bits = 4 if small == "fp4" else 8
        base = position * 2 * bits

        def run(m: Machine) -> None:
            form = E2M1 if small == "fp4" else _family(name)[m.target]
            factor = _power_of_two(scale(m))
            mask = np.uint32((1 << bits) - 1)
            codes = [(word(m) >> np.uint32(base + i * bits)) & mask for i in (0, 1)]
            values = [form.decode(c).astype(np.float64) * factor for c in codes]
            if wide == "f32":
                for i, value in enumerate(values):
                    m.wv(destination.reg + i, value.astype(_F).view(np.uint32))
            elif wide == "f16":
                m.wv(destination.reg, _pack_halves(*(v.astype(np.float16) for v in values)))
            else:
                m.wv(destination.reg, _pack_halves(*(f32_to_bf16(v) for v in values)))

        return run

    register(name, build, ("gfx950",))


for _small in ("fp8", "bf8", "fp4"):
    for _wide in ("f32", "f16", "bf16"):
        _scaled_encode(f"v_cvt_scalef32_pk_{_small}_{_wide}", _wide)
        _scaled_decode(f"v_cvt_scalef32_pk_{_wide}_{_small}", _wide)
