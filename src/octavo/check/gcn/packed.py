"""Packed instructions: two float32 or two 16-bit results in one instruction, with op_sel and neg for each half."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .asm import Instruction, Operand
from .floating import fma16, fma32, maximum, minimum, round_to_odd_sum
from .operands import DTYPES, Reader, constant_bits, flush, raw32, reader, writer
from .state import Machine
from .table import Run, output_modifier, register


def _half_reader(o: Operand, ins: Instruction, kind: str, select: int, negate: int) -> Reader:
    """Reader of the low (`select` 0) or high (1) half of a packed operand."""
    if o.neg or o.abs or o.sext:
        raise ins.unsupported("source modifiers of packed operands other than neg_lo and neg_hi")
    dtype = DTYPES[kind]
    if o.kind in ("int", "float"):
        # An integer constant of packed 16-bit integers is sign-extended to 32 bits, so that its high half is 0 or -1
        # (LLVM's getInlineEncodingV2I16 encodes just the pairs that this gives). What the high half reads otherwise
        # differs between types and is refused, but for 0.
        if select and kind in ("i16", "u16") and o.kind == "int":
            high = np.asarray(0 if int(o.value) >= 0 else 0xFFFF, np.uint16).view(dtype)[()]
            return lambda m: high
        if select and (o.value != 0 or kind == "f32"):
            raise ins.unsupported(f"constant {o.text} read through the high half")
        value = np.asarray(constant_bits(o, kind, ins), DTYPES["u" + kind[1:]]).view(dtype)[()]
        return lambda m: -value if negate else value
    if kind == "f32":
        if o.count != 2:
            raise ins.unsupported(f"operand {o.text} of a packed float32 instruction")
        word = raw32(o, ins, select)
        return lambda m: -word(m).view(dtype) if negate else word(m).view(dtype)
    word = raw32(o, ins)
    shift = np.uint32(16 * select)

    def read(m: Machine) -> Any:
        value = (word(m) >> shift).astype(np.uint16).view(dtype)
        return -value if negate else value

    return read


def _saturated(function: Callable[..., Any], values: list[Any], kind: str) -> Any:
    limits = np.iinfo(DTYPES[kind])
    wide = function(*(np.asarray(value).astype(np.int64) for value in values))
    return np.clip(wide, limits.min, limits.max).astype(DTYPES[kind])


def packed(name: str, kind: str, sources: int, function: Callable[..., Any]) -> None:
    """Define a packed instruction of element type `kind`."""

    def build(ins: Instruction) -> Run:
        if len(ins.operands) != sources + 1:
            raise ins.unsupported(f"{len(ins.operands)} operands")
        op_sel = ins.take_list("op_sel", sources, 0), ins.take_list("op_sel_hi", sources, 1)
        neg = ins.take_list("neg_lo", sources, 0), ins.take_list("neg_hi", sources, 0)
        if kind not in ("f16", "f32") and any(map(any, neg)):
            raise ins.unsupported("neg on packed integers")
        halves = [
            [_half_reader(o, ins, kind, op_sel[h][i], neg[h][i]) for i, o in enumerate(ins.operands[1:])]
            for h in (0, 1)
        ]
        # clamp saturates an integer result, which takes more bits than it has until then.
        saturate = kind in ("i16", "u16") and ins.take_flag("clamp")
        modify = None if saturate else output_modifier(ins, kind)
        reg = ins.operands[0].reg

        def run(m: Machine) -> None:
            results = []
            for readers in halves:
                values = [r(m) for r in readers]
                if kind == "f32" and m.flush32:
                    values = [flush(v) for v in values]
                result = _saturated(function, values, kind) if saturate else function(*values)
                results.append(modify(result) if modify else result)
            if kind == "f32":
                for i, result in enumerate(results):
                    m.wv(reg + i, (flush(result) if m.flush32 else np.asarray(result)).view(np.uint32))
                return
            low, high = (np.asarray(r).view(np.uint16).astype(np.uint32) for r in results)
            m.wv(reg, low | (high << np.uint32(16)))

        return run

    register(name, build)


for _kind, _fma in (("f32", fma32), ("f16", fma16)):
    packed(f"v_pk_add_{_kind}", _kind, 2, lambda a, b: a + b)
    packed(f"v_pk_mul_{_kind}", _kind, 2, lambda a, b: a * b)
    packed(f"v_pk_fma_{_kind}", _kind, 3, _fma)
packed("v_pk_max_f16", "f16", 2, maximum)
packed("v_pk_min_f16", "f16", 2, minimum)
for _kind in ("u16", "i16"):
    packed(f"v_pk_max_{_kind}", _kind, 2, np.maximum)
    packed(f"v_pk_min_{_kind}", _kind, 2, np.minimum)
packed("v_pk_add_u16", "u16", 2, lambda a, b: a + b)
packed("v_pk_sub_u16", "u16", 2, lambda a, b: a - b)
packed("v_pk_sub_i16", "i16", 2, lambda a, b: a - b)
packed("v_pk_add_i16", "i16", 2, lambda a, b: a + b)
packed("v_pk_mul_lo_u16", "u16", 2, lambda a, b: a * b)
packed("v_pk_mad_u16", "u16", 3, lambda a, b, c: a * b + c)
packed("v_pk_lshlrev_b16", "u16", 2, lambda n, a: a << (n & np.uint16(15)))
packed("v_pk_lshrrev_b16", "u16", 2, lambda n, a: a >> (n & np.uint16(15)))
packed("v_pk_ashrrev_i16", "i16", 2, lambda n, a: a >> (n & np.int16(15)))


def _packed_move(ins: Instruction) -> Run:
    """v_pk_mov_b32: low result from source 0, high result from source 1, each a selected word of a pair."""
    op_sel = ins.take_list("op_sel", 2, 0)
    op_sel_hi = ins.take_list("op_sel_hi", 2, 1)
    reg = ins.operands[0].reg
    # The low result uses op_sel[0] of source 0; the high result op_sel_hi is fixed at 1 and uses op_sel[1].
    if op_sel_hi != (1, 1):
        raise ins.unsupported("op_sel_hi other than [1,1]")
    reads = [raw32(o, ins, op_sel[i] if o.kind in "vs" else 0) for i, o in enumerate(ins.operands[1:])]

    def run(m: Machine) -> None:
        low, high = (np.array(r(m)) for r in reads)
        m.wv(reg, low)
        m.wv(reg + 1, high)

    return run


register("v_pk_mov_b32", _packed_move)


def _mixed_reader(o: Operand, ins: Instruction, half_precision: int, select: int) -> Reader:
    """float64 of a source that is float32, or the selected float16 half when `half_precision`."""
    kind = "f16" if half_precision else "f32"
    bare = Operand(o.kind, o.reg, o.count, o.value, o.text)
    inner = _half_reader(bare, ins, "f16", select, 0) if half_precision else reader(bare, kind, ins)

    def read(m: Machine) -> Any:
        value = np.asarray(inner(m)).astype(np.float64)
        value = np.abs(value) if o.abs else value
        return -value if o.neg else value

    return read


def _mixed_fma(result: str) -> Callable[[Instruction], Run]:
    """v_fma_mix: op_sel_hi marks float16 sources, op_sel their half; the result is float32 or one float16 half."""

    def build(ins: Instruction) -> Run:
        select, precision = ins.take_list("op_sel", 3, 0), ins.take_list("op_sel_hi", 3, 0)
        reads = [_mixed_reader(o, ins, precision[i], select[i]) for i, o in enumerate(ins.operands[1:])]
        write = writer(ins.operands[0], "f32" if result == "f32" else "f16", ins, result == "hi")
        modify = output_modifier(ins, "f32")
        low = ins.operands[0].reg

        def run(m: Machine) -> None:
            a, b, c = (r(m) for r in reads)
            total = round_to_odd_sum(a * b, c)
            value = total.astype(np.float32 if result == "f32" else np.float16)
            value = modify(value) if modify else value
            if result == "lo":  # unlike other 16-bit results, this one keeps the upper half
                half = np.asarray(value).view(np.uint16).astype(np.uint32)
                m.wv(low, (m.rv(low) & np.uint32(0xFFFF0000)) | half)
            else:
                write(m, value)

        return run

    return build


register("v_fma_mix_f32 v_mad_mix_f32", _mixed_fma("f32"))
register("v_fma_mixlo_f16 v_mad_mixlo_f16", _mixed_fma("lo"))
register("v_fma_mixhi_f16 v_mad_mixhi_f16", _mixed_fma("hi"))
