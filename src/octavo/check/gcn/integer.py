"""Integer, bit and move instructions of the vector ALU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .asm import Instruction
from .operands import DTYPES, raw32, reader, writer
from .scalar import leading_zeros, population, reverse_bits, trailing_zeros
from .state import Machine
from .table import Run, Signature, build_valu, instruction, register, valu

_U64 = np.uint64


def _u64(x: Any) -> Any:
    return np.asarray(x).astype(_U64)


# --- moves and bits
valu("v_mov_b32", "b32", "b32", lambda a: a)
valu("v_mov_b64", "b64", "b64", lambda a: a)
valu("v_accvgpr_read_b32 v_accvgpr_write_b32 v_accvgpr_mov_b32", "b32", "b32", lambda a: a)
valu("v_not_b32", "b32", "b32", lambda a: ~np.asarray(a))
valu("v_and_b32", "b32", "b32 b32", lambda a, b: a & b)
valu("v_or_b32", "b32", "b32 b32", lambda a, b: a | b)
valu("v_xor_b32", "b32", "b32 b32", lambda a, b: a ^ b)
valu("v_xnor_b32", "b32", "b32 b32", lambda a, b: ~(a ^ b))
valu("v_and_or_b32", "b32", "b32 b32 b32", lambda a, b, c: (a & b) | c)
valu("v_or3_b32", "b32", "b32 b32 b32", lambda a, b, c: a | b | c)
valu("v_bfi_b32", "b32", "b32 b32 b32", lambda a, b, c: (a & b) | (~a & c))
valu("v_bfrev_b32", "b32", "b32", reverse_bits)
valu("v_ffbh_u32", "i32", "u32", leading_zeros)
valu("v_ffbl_b32", "i32", "u32", trailing_zeros)
valu("v_bcnt_u32_b32", "u32", "u32 u32", lambda a, b: population(a).view(np.uint32) + b)
valu("v_cndmask_b32", "b32", "b32 b32 mask", lambda a, b, s: np.where(s, b, a))

# --- shifts
valu("v_lshlrev_b32", "b32", "u32 b32", lambda n, a: a << (n & np.uint32(31)))
valu("v_lshrrev_b32", "b32", "u32 b32", lambda n, a: a >> (n & np.uint32(31)))
valu("v_ashrrev_i32", "i32", "u32 i32", lambda n, a: a >> (n & np.uint32(31)).astype(np.int32))
valu("v_lshlrev_b16", "u16", "u16 u16", lambda n, a: a << (n & np.uint16(15)))
valu("v_lshrrev_b16", "u16", "u16 u16", lambda n, a: a >> (n & np.uint16(15)))
valu("v_ashrrev_i16", "i16", "u16 i16", lambda n, a: a >> (n & np.uint16(15)).astype(np.int16))
valu("v_lshlrev_b64", "b64", "u32 b64", lambda n, a: a << _u64(n & np.uint32(63)))
valu("v_lshrrev_b64", "b64", "u32 b64", lambda n, a: a >> _u64(n & np.uint32(63)))
valu("v_ashrrev_i64", "i64", "u32 i64", lambda n, a: a >> (n & np.uint32(63)).astype(np.int64))
valu("v_lshl_or_b32", "b32", "b32 u32 b32", lambda a, n, c: (a << (n & np.uint32(31))) | c)
valu("v_lshl_add_u32", "u32", "u32 u32 u32", lambda a, n, c: (a << (n & np.uint32(31))) + c)
valu("v_add_lshl_u32", "u32", "u32 u32 u32", lambda a, b, n: (a + b) << (n & np.uint32(31)))
valu("v_lshl_add_u64", "u64", "u64 u32 u64", lambda a, n, c: (a << _u64(n & np.uint32(7))) + c)
valu("v_alignbit_b32", "b32", "b32 b32 u32", lambda hi, lo, n: _align(hi, lo, n & np.uint32(31)))
valu(
    "v_alignbyte_b32",
    "b32",
    "b32 b32 u32",
    lambda hi, lo, n: _align(hi, lo, (n & np.uint32(3)) * np.uint32(8)),
)


def _align(high: Any, low: Any, n: Any) -> Any:
    return (((_u64(high) << _U64(32)) | low) >> _u64(n)).astype(np.uint32)


# --- bit fields
def _field_unsigned(a: Any, offset: Any, size: Any) -> Any:
    size = size & np.uint32(31)
    return (a >> (offset & np.uint32(31))) & ((np.uint32(1) << size) - np.uint32(1))


def _field_signed(a: Any, offset: Any, size: Any) -> Any:
    size = np.asarray(size & np.uint32(31))
    up = (np.uint32(32) - np.maximum(size, np.uint32(1))).astype(np.uint32)
    value = (_field_unsigned(a, offset, size) << up).view(np.int32) >> up.view(np.int32)
    return np.where(size == 0, np.int32(0), value)


valu("v_bfe_u32", "u32", "u32 u32 u32", _field_unsigned)
valu("v_bfe_i32", "i32", "u32 u32 u32", _field_signed)
valu(
    "v_bfm_b32",
    "b32",
    "u32 u32",
    lambda n, at: ((np.uint32(1) << (n & 31)) - np.uint32(1)) << (at & np.uint32(31)),
)


def _permute_bytes(a: Any, b: Any, selector: Any) -> Any:
    """v_perm_b32: selector bytes 0-3 take a byte of b, 4-7 of a, 8-11 repeat a sign bit, 12 is 0x00, above 0xFF."""
    both = (_u64(a) << _U64(32)) | b
    result = np.zeros(np.broadcast(a, b, selector).shape, np.uint32)
    for i in range(4):
        code = (selector >> np.uint32(8 * i)) & np.uint32(0xFF)
        byte = (both >> (_u64(np.minimum(code, 7)) * _U64(8))) & _U64(0xFF)
        if np.any(code > 7):
            sign = (both >> (_u64(code & np.uint32(3)) * _U64(16) + _U64(15))) & _U64(1)
            byte = np.where(
                code > 7, np.where(code < 12, sign * _U64(0xFF), np.where(code == 12, 0, 0xFF)), byte
            )
        result |= byte.astype(np.uint32) << np.uint32(8 * i)
    return result


valu("v_perm_b32", "b32", "b32 b32 b32", _permute_bytes)


@instruction("v_bitop3_b32 v_bitop3_b16", targets=("gfx950",))
def _bitop3(ins: Instruction) -> Run:
    """Any function of three bits: bit 4a + 2b + c of the table is the result."""
    table = ins.take_int("bitop3")
    kind = ins.name[-3:]

    def function(a: Any, b: Any, c: Any) -> Any:
        result = DTYPES[kind](0)
        for row in range(8):
            if table >> row & 1:
                result = result | (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
        return np.broadcast_to(result, np.broadcast(a, b, c).shape)

    return build_valu(ins, Signature((kind,), (kind, kind, kind)), function)


# --- arithmetic modulo 2^32
def _clamping(kind: str, function: Callable[[Any, Any], Any]) -> Callable[[Instruction], Run]:
    """Sum or difference modulo 2^n, or held at the ends of the type's range with the clamp modifier."""
    dtype = DTYPES[kind]
    info = np.iinfo(dtype)

    def saturate(a: Any, b: Any) -> Any:
        wide = function(np.asarray(a).astype(np.int64), np.asarray(b).astype(np.int64))
        return np.clip(wide, info.min, info.max).astype(dtype)

    def build(ins: Instruction) -> Run:
        clamp = ins.take_flag("clamp")
        return build_valu(ins, Signature((kind,), (kind, kind)), saturate if clamp else function)

    return build


for _t in ("u32", "i32", "u16", "i16"):
    register(f"v_add_{_t}", _clamping(_t, lambda a, b: a + b))
    register(f"v_sub_{_t}", _clamping(_t, lambda a, b: a - b))
for _t in ("u32", "u16"):
    register(f"v_subrev_{_t}", _clamping(_t, lambda a, b: b - a))
valu("v_add3_u32", "u32", "u32 u32 u32", lambda a, b, c: a + b + c)
valu("v_xad_u32", "u32", "u32 u32 u32", lambda a, b, c: (a ^ b) + c)
valu("v_mul_lo_u32", "u32", "u32 u32", lambda a, b: a * b)
valu("v_mul_hi_u32", "u32", "u32 u32", lambda a, b: ((_u64(a) * b) >> _U64(32)).astype(np.uint32))
valu("v_mul_hi_i32", "i32", "i32 i32", lambda a, b: ((a.astype(np.int64) * b) >> 32).astype(np.int32))
_24 = np.uint32(0xFFFFFF)
valu("v_mul_u32_u24", "u32", "u32 u32", lambda a, b: (a & _24) * (b & _24))
valu("v_mad_u32_u24", "u32", "u32 u32 u32", lambda a, b, c: (a & _24) * (b & _24) + c)
valu("v_mul_i32_i24", "i32", "i32 i32", lambda a, b: ((a << 8) >> 8) * ((b << 8) >> 8))
valu("v_mad_i32_i24", "i32", "i32 i32 i32", lambda a, b, c: ((a << 8) >> 8) * ((b << 8) >> 8) + c)
valu("v_mad_u64_u32", "u64 mask", "u32 u32 u64", lambda a, b, c: _multiply_add(a, b, c))
valu("v_mad_i64_i32", "i64 mask", "i32 i32 i64", lambda a, b, c: _multiply_add_signed(a, b, c))
for _k, _f in (("min", np.minimum), ("max", np.maximum)):
    for _t in ("i32", "u32", "i16", "u16"):
        valu(f"v_{_k}_{_t}", _t, f"{_t} {_t}", _f)
    for _t in ("i32", "u32"):
        valu(f"v_{_k}3_{_t}", _t, f"{_t} {_t} {_t}", lambda a, b, c, f=_f: f(f(a, b), c))
for _t in ("i32", "u32"):
    valu(
        f"v_med3_{_t}",
        _t,
        f"{_t} {_t} {_t}",
        lambda a, b, c: np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c)),
    )
valu("v_mul_lo_u16", "u16", "u16 u16", lambda a, b: a * b)
valu("v_sad_u32", "u32", "u32 u32 u32", lambda a, b, c: np.where(a > b, a - b, b - a) + c)


def _multiply_add(a: Any, b: Any, c: Any) -> Any:
    product = _u64(a) * b
    total = product + c
    return total, total < product


def _multiply_add_signed(a: Any, b: Any, c: Any) -> Any:
    product = np.asarray(a).astype(np.int64) * b
    total = product + c
    return total, (total < product) != (c < 0)


# --- carries: e32 encodings name vcc in the text, so the operands are always explicit
def _add_carry(a: Any, b: Any, carry: Any = False) -> Any:
    wide = _u64(a) + b + np.asarray(carry).astype(_U64)
    return wide.astype(np.uint32), wide >> _U64(32) != 0


def _sub_borrow(a: Any, b: Any, borrow: Any = False) -> Any:
    wide = a.astype(np.int64) - b - np.asarray(borrow).astype(np.int64)
    return wide.astype(np.uint32), wide < 0


valu("v_add_co_u32", "u32 mask", "u32 u32", _add_carry)
valu("v_sub_co_u32", "u32 mask", "u32 u32", _sub_borrow)
valu("v_subrev_co_u32", "u32 mask", "u32 u32", lambda a, b: _sub_borrow(b, a))
valu("v_addc_co_u32", "u32 mask", "u32 u32 mask", _add_carry)
valu("v_subb_co_u32", "u32 mask", "u32 u32 mask", _sub_borrow)
valu("v_subbrev_co_u32", "u32 mask", "u32 u32 mask", lambda a, b, c: _sub_borrow(b, a, c))


# --- lanes
@instruction("v_readfirstlane_b32")
def _read_first_lane(ins: Instruction) -> Run:
    destination, source = ins.operands
    read, reg = raw32(source, ins), destination.reg

    def run(m: Machine) -> None:
        first = np.argmax(m.lanes, axis=1)  # lane 0 when no lane is active, as documented
        values = np.broadcast_to(read(m), m.lanes.shape)
        m.ws(reg, values[np.arange(m.count), first])

    return run


def _lane_reader(ins: Instruction, index: int) -> Any:
    read = raw32(ins.operands[index], ins)

    def lane(m: Machine) -> np.ndarray:
        value = np.asarray(read(m))
        return np.broadcast_to(value.reshape(-1), m.count).astype(np.int64) & 63

    return lane


@instruction("v_readlane_b32")
def _read_lane(ins: Instruction) -> Run:
    read, lane, reg = raw32(ins.operands[1], ins), _lane_reader(ins, 2), ins.operands[0].reg
    return lambda m: m.ws(reg, read(m)[np.arange(m.count), lane(m)])


@instruction("v_writelane_b32")
def _write_lane(ins: Instruction) -> Run:
    """Writes one lane whether or not it is active."""
    source, lane, reg = raw32(ins.operands[1], ins), _lane_reader(ins, 2), ins.operands[0].reg

    def run(m: Machine) -> None:
        value = np.broadcast_to(np.asarray(source(m)).reshape(-1), m.count)
        array = m.v[reg]
        assert array is not None
        array[m.selected, lane(m)] = value

    return run


def _lanes_below(word: int) -> Any:
    """v_mbcnt: bits of a mask below the own lane, counted."""
    below = np.array([((1 << lane) - 1) >> (32 * word) & 0xFFFFFFFF for lane in range(64)], np.uint32)
    return lambda mask, add: population(mask & below).view(np.uint32) + add


valu("v_mbcnt_lo_u32_b32", "u32", "u32 u32", _lanes_below(0))
valu("v_mbcnt_hi_u32_b32", "u32", "u32 u32", _lanes_below(1))


def _swap_rows(name: str, upper: np.ndarray, lower: np.ndarray) -> None:
    """v_permlane*_swap: exchange the `upper` lanes of the first register with the `lower` lanes of the second."""

    def build(ins: Instruction) -> Run:
        a, b = ins.operands
        if a.kind != "v" or b.kind != "v":
            raise ins.unsupported("swap of anything but vector registers")

        def run(m: Machine) -> None:
            if not m.full:
                raise ins.unsupported("swap with inactive lanes")
            x, y = m.rv(a.reg).copy(), m.rv(b.reg).copy()
            x[:, upper], y[:, lower] = y[:, lower], x[:, upper]
            m.wv(a.reg, x)
            m.wv(b.reg, y)

        return run

    register(name, build, ("gfx950",))


_LANES = np.arange(64)
_swap_rows("v_permlane32_swap_b32", _LANES[32:], _LANES[:32])
_swap_rows("v_permlane16_swap_b32", _LANES[(_LANES & 16) != 0], _LANES[(_LANES & 16) == 0])


@instruction("v_swap_b32")
def _swap(ins: Instruction) -> Run:
    a, b = ins.operands
    ra, rb = reader(a, "b32", ins), reader(b, "b32", ins)
    wa, wb = writer(a, "b32", ins), writer(b, "b32", ins)

    def run(m: Machine) -> None:
        x, y = ra(m).copy(), rb(m).copy()
        wa(m, y)
        wb(m, x)

    return run
