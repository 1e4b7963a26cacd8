"""Scalar ALU, program control and mode registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .asm import EXEC, VCC, Instruction
from .operands import DTYPES, scalar_reader, scalar_writer
from .state import Machine
from .table import Run, instruction, register

_U64 = np.uint64


def salu(name: str, dst: str, src: str, function: Callable[..., Any], scc: str = "") -> None:
    """Define a scalar instruction. `scc`: "" keeps SCC, "nonzero" sets it to result != 0, "pair" means that the
    function returns (result, scc)."""
    sources = src.split()

    def build(ins: Instruction) -> Run:
        operands = list(ins.operands)
        write = scalar_writer(operands.pop(0), dst, ins)
        if len(operands) != len(sources):
            raise ins.unsupported(f"{len(operands)} sources")
        readers = [scalar_reader(o, t, ins) for o, t in zip(operands, sources, strict=True)]

        def run(m: Machine) -> None:
            result = function(*[r(m) for r in readers])
            flag = None
            if scc == "pair":
                result, flag = result
            elif scc == "nonzero":
                flag = np.asarray(result) != 0
            result = np.broadcast_to(np.asarray(result, DTYPES[dst]), m.count)
            write(m, result)
            if flag is not None:
                set_scc(m, flag)

        return run

    register(name, build)


def set_scc(m: Machine, flag: Any) -> None:
    if m.idx is None:
        m.scc[:] = flag
    else:
        m.scc[m.idx] = flag


def get_scc(m: Machine) -> np.ndarray:
    return m.scc if m.idx is None else m.scc[m.idx]


def _signed_add(a: Any, b: Any) -> Any:
    wide = a.astype(np.int64) + b
    result = wide.astype(np.int32)
    return result, result != wide


def _signed_sub(a: Any, b: Any) -> Any:
    wide = a.astype(np.int64) - b
    result = wide.astype(np.int32)
    return result, result != wide


def _carry_add(a: Any, b: Any, carry: Any = 0) -> Any:
    wide = a.astype(_U64) + b + _U64(0) + np.asarray(carry).astype(_U64)
    return wide.astype(np.uint32), wide >> _U64(32) != 0


def _shift_add(k: int) -> Callable[..., Any]:
    def f(a: Any, b: Any) -> Any:
        wide = (a.astype(_U64) << _U64(k)) + b
        return wide.astype(np.uint32), wide >> _U64(32) != 0

    return f


def _extract(a: Any, control: Any, bits: int) -> Any:
    """Bit field: offset in control[4:0] (or [5:0]), width in control[22:16]."""
    one = a.dtype.type(1)
    offset = (control & (bits - 1)).astype(a.dtype)
    size = np.minimum((control >> 16) & 127, bits).astype(a.dtype)
    shifted = a >> offset
    mask = np.where(size >= bits, ~a.dtype.type(0), (one << np.minimum(size, a.dtype.type(bits - 1))) - one)
    return shifted & mask, size


def _extract_signed(a: Any, control: Any, bits: int) -> Any:
    field, size = _extract(a, control, bits)
    signed = np.int64 if bits == 64 else np.int32
    up = (bits - np.maximum(size, 1)).astype(a.dtype)
    value = (field << up).view(signed) >> up.astype(signed)
    return np.where(size == 0, signed(0), value)


def leading_zeros(x: Any, bits: int = 32) -> Any:
    """Number of zeros above the highest set bit; -1 (all ones) for 0."""
    wide = np.asarray(x).astype(np.float64)  # exact below 2^53, and only the exponent is used
    high = (np.asarray(x).astype(_U64) >> _U64(32)).astype(np.float64)
    top = np.where(high > 0, np.frexp(high)[1] + 32, np.frexp(np.where(high > 0, 0, wide))[1])
    return np.where(np.asarray(x) == 0, -1, bits - top).astype(np.int32)


def trailing_zeros(x: Any) -> Any:
    x = np.asarray(x)
    isolated = x & (~x + x.dtype.type(1))
    return np.where(x == 0, -1, np.frexp(isolated.astype(np.float64))[1] - 1).astype(np.int32)


def population(x: Any) -> Any:
    return np.bitwise_count(np.asarray(x)).astype(np.int32)


def reverse_bits(x: Any) -> Any:
    x = np.asarray(x)
    size = x.dtype.itemsize
    data = np.ascontiguousarray(x).view(np.uint8).reshape(*x.shape, size)
    bits = np.unpackbits(data, axis=-1, bitorder="little")[..., ::-1]
    return np.packbits(bits, axis=-1, bitorder="little").view(x.dtype).reshape(x.shape)


for _bits, _b, _u, _i in ((32, "b32", "u32", "i32"), (64, "b64", "u64", "i64")):
    _amount = _bits - 1
    salu(f"s_mov_{_b}", _b, _b, lambda a: a)
    salu(f"s_and_{_b}", _b, f"{_b} {_b}", lambda a, b: a & b, "nonzero")
    salu(f"s_or_{_b}", _b, f"{_b} {_b}", lambda a, b: a | b, "nonzero")
    salu(f"s_xor_{_b}", _b, f"{_b} {_b}", lambda a, b: a ^ b, "nonzero")
    salu(f"s_andn2_{_b}", _b, f"{_b} {_b}", lambda a, b: a & ~b, "nonzero")
    salu(f"s_orn2_{_b}", _b, f"{_b} {_b}", lambda a, b: a | ~b, "nonzero")
    salu(f"s_nand_{_b}", _b, f"{_b} {_b}", lambda a, b: ~(a & b), "nonzero")
    salu(f"s_nor_{_b}", _b, f"{_b} {_b}", lambda a, b: ~(a | b), "nonzero")
    salu(f"s_xnor_{_b}", _b, f"{_b} {_b}", lambda a, b: ~(a ^ b), "nonzero")
    salu(f"s_not_{_b}", _b, _b, lambda a: ~a, "nonzero")
    salu(f"s_brev_{_b}", _b, _b, reverse_bits)
    salu(f"s_lshl_{_b}", _b, f"{_b} u32", lambda a, n, k=_amount: a << (n & k).astype(a.dtype), "nonzero")
    salu(f"s_lshr_{_b}", _b, f"{_b} u32", lambda a, n, k=_amount: a >> (n & k).astype(a.dtype), "nonzero")
    salu(f"s_ashr_{_i}", _i, f"{_i} u32", lambda a, n, k=_amount: a >> (n & k).astype(a.dtype), "nonzero")
    salu(f"s_bfe_{_u}", _u, f"{_u} u32", lambda a, c, k=_bits: _extract(a, c, k)[0], "nonzero")
    salu(f"s_bfe_{_i}", _i, f"{_u} u32", lambda a, c, k=_bits: _extract_signed(a, c, k), "nonzero")
    salu(f"s_bcnt1_i32_{_b}", "i32", _b, population, "nonzero")
    salu(f"s_ff1_i32_{_b}", "i32", _b, trailing_zeros)
    salu(f"s_flbit_i32_{_b}", "i32", _b, lambda a, k=_bits: leading_zeros(a, k))

salu("s_bfm_b32", "b32", "u32 u32", lambda n, at: ((np.uint32(1) << (n & 31)) - np.uint32(1)) << (at & 31))
salu("s_add_i32", "i32", "i32 i32", _signed_add, "pair")
salu("s_sub_i32", "i32", "i32 i32", _signed_sub, "pair")
salu("s_add_u32", "u32", "u32 u32", _carry_add, "pair")
salu("s_sub_u32", "u32", "u32 u32", lambda a, b: (a - b, b > a), "pair")
salu("s_mul_i32", "u32", "u32 u32", lambda a, b: a * b)
salu("s_mul_hi_u32", "u32", "u32 u32", lambda a, b: ((a.astype(_U64) * b) >> _U64(32)).astype(np.uint32))
salu("s_mul_hi_i32", "i32", "i32 i32", lambda a, b: ((a.astype(np.int64) * b) >> 32).astype(np.int32))
salu("s_min_i32", "i32", "i32 i32", lambda a, b: (np.minimum(a, b), a < b), "pair")
salu("s_max_i32", "i32", "i32 i32", lambda a, b: (np.maximum(a, b), a > b), "pair")
salu("s_min_u32", "u32", "u32 u32", lambda a, b: (np.minimum(a, b), a < b), "pair")
salu("s_max_u32", "u32", "u32 u32", lambda a, b: (np.maximum(a, b), a > b), "pair")
salu("s_abs_i32", "i32", "i32", np.abs, "nonzero")
salu("s_sext_i32_i8", "i32", "i32", lambda a: (a << 24) >> 24)
salu("s_sext_i32_i16", "i32", "i32", lambda a: (a << 16) >> 16)
salu("s_pack_ll_b32_b16", "b32", "b32 b32", lambda a, b: (a & 0xFFFF) | (b << 16))
salu("s_pack_lh_b32_b16", "b32", "b32 b32", lambda a, b: (a & 0xFFFF) | (b & 0xFFFF0000))
salu("s_pack_hh_b32_b16", "b32", "b32 b32", lambda a, b: (a >> 16) | (b & 0xFFFF0000))
for _k in (1, 2, 3, 4):
    salu(f"s_lshl{_k}_add_u32", "u32", "u32 u32", _shift_add(_k), "pair")


def _with_scc(name: str, dst: str, src: str, function: Callable[..., Any], scc: bool) -> None:
    """Instructions that read SCC; the function takes it first and returns (result, new scc) when `scc`."""

    def build(ins: Instruction) -> Run:
        write = scalar_writer(ins.operands[0], dst, ins)
        readers = [scalar_reader(o, t, ins) for o, t in zip(ins.operands[1:], src.split(), strict=True)]

        def run(m: Machine) -> None:
            result = function(get_scc(m), *[r(m) for r in readers])
            result, flag = result if scc else (result, None)
            write(m, np.broadcast_to(np.asarray(result, DTYPES[dst]), m.count))
            if scc:
                set_scc(m, flag)

        return run

    register(name, build)


_with_scc("s_cselect_b32", "b32", "b32 b32", np.where, False)
_with_scc("s_cselect_b64", "b64", "b64 b64", np.where, False)
_with_scc("s_addc_u32", "u32", "u32 u32", lambda c, a, b: _carry_add(a, b, c), True)
_with_scc(
    "s_subb_u32",
    "u32",
    "u32 u32",
    lambda c, a, b: (a - b - c.astype(np.uint32), b.astype(_U64) + c.astype(_U64) > a),
    True,
)


# --- 16-bit immediates: the destination is also the first source
def _immediate(name: str, function: Callable[[Any, np.int32], Any], scc: bool) -> None:
    def build(ins: Instruction) -> Run:
        o, immediate = ins.operands
        write, read = scalar_writer(o, "i32", ins), scalar_reader(o, "i32", ins)
        value = np.int32(np.int16((int(immediate.value) & 0xFFFF) - ((int(immediate.value) & 0x8000) << 1)))

        def run(m: Machine) -> None:
            result = function(read(m), value)
            if scc:
                result, flag = result
                set_scc(m, flag)
            write(m, np.broadcast_to(np.asarray(result, np.int32), m.count))

        return run

    register(name, build)


_immediate("s_movk_i32", lambda d, k: k, False)
_immediate("s_addk_i32", _signed_add, True)
_immediate("s_mulk_i32", lambda d, k: (d.view(np.uint32) * np.int32(k).view(np.uint32)).view(np.int32), False)


# --- compares
_COMPARES: dict[str, Callable[[Any, Any], Any]] = {
    "eq": np.equal,
    "lg": np.not_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lt": np.less,
    "le": np.less_equal,
}


def _compare(name: str, kind: str, function: Callable[[Any, Any], Any], immediate: bool) -> None:
    def build(ins: Instruction) -> Run:
        a = scalar_reader(ins.operands[0], kind, ins)
        if immediate:
            raw = int(ins.operands[1].value) & 0xFFFF
            constant = DTYPES[kind](raw - ((raw & 0x8000) << 1 if kind == "i32" else 0))
            return lambda m: set_scc(m, function(a(m), constant))
        b = scalar_reader(ins.operands[1], kind, ins)
        return lambda m: set_scc(m, function(a(m), b(m)))

    register(name, build)


for _name, _function in _COMPARES.items():
    for _kind in ("i32", "u32"):
        _compare(f"s_cmp_{_name}_{_kind}", _kind, _function, False)
        _compare(f"s_cmpk_{_name}_{_kind}", _kind, _function, True)
_compare("s_cmp_eq_u64", "u64", np.equal, False)
_compare("s_cmp_lg_u64", "u64", np.not_equal, False)
_compare("s_bitcmp1_b32", "u32", lambda a, b: (a >> (b & 31)) & 1 == 1, False)
_compare("s_bitcmp0_b32", "u32", lambda a, b: (a >> (b & 31)) & 1 == 0, False)


# --- EXEC
_SAVEEXEC: dict[str, Callable[[Any, Any], Any]] = {
    "and": lambda s, e: s & e,
    "or": lambda s, e: s | e,
    "xor": lambda s, e: s ^ e,
    "andn2": lambda s, e: s & ~e,
    "andn1": lambda s, e: ~s & e,
}


def _saveexec(name: str, function: Callable[[Any, Any], Any]) -> None:
    def build(ins: Instruction) -> Run:
        write = scalar_writer(ins.operands[0], "b64", ins)
        read = scalar_reader(ins.operands[1], "b64", ins)

        def run(m: Machine) -> None:
            old, source = m.rs64(EXEC), read(m)
            write(m, old)
            new = np.broadcast_to(function(source, old), m.count)
            m.ws64(EXEC, new)
            set_scc(m, new != 0)

        return run

    register(f"s_{name}_saveexec_b64", build)


for _name, _function in _SAVEEXEC.items():
    _saveexec(_name, _function)


# --- branches: they set the program counters of the selected waves; the loop in launch.py advances the others
def _branch(name: str, taken: Callable[[Machine], Any]) -> None:
    def build(ins: Instruction) -> Run:
        label = ins.operands[0].text

        def run(m: Machine) -> None:
            m.branch(label, np.broadcast_to(taken(m), m.count))

        return run

    register(name, build)


_branch("s_branch", lambda m: np.True_)
_branch("s_cbranch_scc0", lambda m: ~get_scc(m))
_branch("s_cbranch_scc1", get_scc)
_branch("s_cbranch_vccz", lambda m: m.rs64(VCC) == 0)
_branch("s_cbranch_vccnz", lambda m: m.rs64(VCC) != 0)
_branch("s_cbranch_execz", lambda m: m.rs64(EXEC) == 0)
_branch("s_cbranch_execnz", lambda m: m.rs64(EXEC) != 0)


@instruction("s_endpgm")
def _end(ins: Instruction) -> Run:
    return lambda m: m.end()


@instruction("s_barrier")
def _barrier(ins: Instruction) -> Run:
    return lambda m: m.barrier()


@instruction("s_nop s_setprio s_sleep s_sethalt s_inst_prefetch s_icache_inv s_dcache_wb s_clause")
def _no_effect(ins: Instruction) -> Run:
    """Timing and cache hints: no effect on results. Hazards that need s_nop are not modelled."""
    return lambda m: None


@instruction("buffer_wbl2 buffer_inv buffer_wbinvl1 buffer_wbinvl1_vol")
def _cache_control(ins: Instruction) -> Run:
    """Cache write-back and invalidate: memory here is one coherent array."""
    for flag in ("sc0", "sc1", "nt"):
        ins.take(flag)
    return lambda m: None


def _field(ins: Instruction, text: str) -> tuple[int, int]:
    parts = [x.strip() for x in text.removeprefix("hwreg(").rstrip(")").split(",")]
    if not text.startswith("hwreg(") or parts[0] != "HW_REG_MODE":
        raise ins.unsupported(f"only HW_REG_MODE is modelled, not {text}")
    offset, size = (int(parts[1]), int(parts[2])) if len(parts) == 3 else (0, 32)
    return offset, size


def _set_mode(m: Machine, offset: int, size: int, value: Any) -> None:
    mask = np.uint32(((1 << size) - 1) << offset)
    old = m.mode if m.idx is None else m.mode[m.idx]
    new = (old & ~mask) | ((np.asarray(value, np.uint32) << np.uint32(offset)) & mask)
    if m.idx is None:
        m.mode[:] = new
    else:
        m.mode[m.idx] = new


@instruction("s_setreg_imm32_b32")
def _setreg_immediate(ins: Instruction) -> Run:
    offset, size = _field(ins, ins.operands[0].text)
    value = int(ins.operands[1].value)
    if offset < 4:
        raise ins.unsupported("rounding modes other than nearest even are not modelled")
    return lambda m: _set_mode(m, offset, size, value)


@instruction("s_setreg_b32")
def _setreg(ins: Instruction) -> Run:
    offset, size = _field(ins, ins.operands[0].text)
    read = scalar_reader(ins.operands[1], "u32", ins)
    if offset < 4:
        raise ins.unsupported("rounding modes other than nearest even are not modelled")
    return lambda m: _set_mode(m, offset, size, read(m))


@instruction("s_getreg_b32")
def _getreg(ins: Instruction) -> Run:
    offset, size = _field(ins, ins.operands[1].text)
    write = scalar_writer(ins.operands[0], "u32", ins)
    low = np.uint32((1 << size) - 1)
    return lambda m: write(m, ((m.mode if m.idx is None else m.mode[m.idx]) >> np.uint32(offset)) & low)
