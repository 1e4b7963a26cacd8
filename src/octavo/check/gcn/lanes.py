"""Moving data between lanes and parts of words: DPP, SDWA, readlane, permutes, swaps."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .asm import Instruction, Operand
from .operands import raw32
from .state import LANES, Machine

_LANE = np.arange(LANES)
_ROW = _LANE & 48  # first lane of the row of 16
_IN_ROW = _LANE & 15


# --- data parallel primitives: which lane a lane reads, -1 where there is none
def _shift(delta: int) -> np.ndarray:
    source = _IN_ROW + delta
    return np.where((source >= 0) & (source < 16), _ROW + source, -1)


def _wave_shift(delta: int) -> np.ndarray:
    source = _LANE + delta
    return np.where((source >= 0) & (source < LANES), source, -1)


def _quad_perm(order: tuple[int, ...]) -> np.ndarray:
    return (_LANE & ~3) + np.asarray(order)[_LANE & 3]


DPP_SOURCES: dict[str, Callable[[int], np.ndarray]] = {
    "row_shl": lambda n: _shift(n),
    "row_shr": lambda n: _shift(-n),
    "row_ror": lambda n: _ROW + ((_IN_ROW - n) & 15),
    "wave_shl": lambda n: _wave_shift(1),
    "wave_shr": lambda n: _wave_shift(-1),
    "wave_rol": lambda n: (_LANE + 1) % LANES,
    "wave_ror": lambda n: (_LANE - 1) % LANES,
    "row_mirror": lambda n: _ROW + 15 - _IN_ROW,
    "row_half_mirror": lambda n: (_LANE & 56) + 7 - (_LANE & 7),
    "row_newbcast": lambda n: _ROW + n,
    # Lane 15 of a row goes to the whole next row; lane 31 goes to rows 2 and 3. Other lanes have no source.
    "row_bcast": lambda n: np.where(n < _LANE, (_ROW - 1) if n == 15 else 31, -1),
}


@dataclass(frozen=True)
class DppControl:
    """`source` is the lane each lane reads, `has_source` where it exists, `enabled` the row and bank masks;
    `zero_fill` is bound_ctrl: lanes without a source read 0 instead of keeping their destination."""

    source: np.ndarray
    has_source: np.ndarray
    enabled: np.ndarray
    zero_fill: bool

    def valid(self, m: Machine) -> np.ndarray:
        """bool[count, 64] or [64]: lanes whose source lane exists and is active."""
        return self.has_source if m.full else self.has_source & m.lanes[:, self.source]

    def move(self, m: Machine, word: np.ndarray) -> np.ndarray:
        moved = np.broadcast_to(word, (m.count, LANES))[:, self.source]
        return np.where(self.valid(m), moved, np.uint32(0))

    def written(self, m: Machine) -> np.ndarray | None:
        where = self.enabled if self.zero_fill else self.enabled & self.valid(m)
        return np.broadcast_to(where, (m.count, LANES))


def dpp_control(ins: Instruction) -> DppControl:
    """Take the DPP modifiers of an instruction."""
    order = ins.take("quad_perm")
    if order is not None:
        source = _quad_perm(tuple(int(x) for x in order.strip("[]").split(",")))
    else:
        kinds = [k for k in DPP_SOURCES if k in ins.modifiers]
        if len(kinds) != 1:
            raise ins.unsupported(f"DPP control {kinds or list(ins.modifiers)}")
        amount = ins.take_int(kinds[0])
        if kinds[0] == "row_bcast" and amount not in (15, 31):
            raise ins.unsupported(f"row_bcast:{amount}")
        source = DPP_SOURCES[kinds[0]](amount)
    rows, banks = ins.take_int("row_mask", 15), ins.take_int("bank_mask", 15)
    enabled = ((rows >> (_LANE // 16)) & 1 & (banks >> (_IN_ROW // 4))).astype(bool)
    has_source = source >= 0
    return DppControl(np.maximum(source, 0), has_source, enabled, ins.take_int("bound_ctrl") == 1)


# --- sub-dword addressing
_PARTS = (
    {"DWORD": (0, 32)}
    | {f"WORD_{i}": (16 * i, 16) for i in range(2)}
    | {f"BYTE_{i}": (8 * i, 8) for i in range(4)}
)


def _part(ins: Instruction, name: str) -> tuple[int, int]:
    text = ins.take(name, "DWORD") or ""
    if text not in _PARTS:
        raise ins.unsupported(f"{name}:{text}")
    return _PARTS[text]


def sdwa_select(ins: Instruction, o: Operand, index: int) -> Callable[[Machine], Any]:
    """Reader of the selected part of a source, zero- or sign-extended to 32 bits."""
    shift, bits = _part(ins, f"src{index}_sel") if index < 2 else (0, 32)
    word = raw32(o, ins)
    if bits == 32:
        return word
    if o.sext:
        up, down = np.uint32(32 - bits - shift), np.int32(32 - bits)
        return lambda m: ((word(m) << up).view(np.int32) >> down).view(np.uint32)
    low = np.uint32((1 << bits) - 1)
    return lambda m: (word(m) >> np.uint32(shift)) & low


def sdwa_writer(ins: Instruction, o: Operand, result_bits: int) -> Callable[..., None]:
    """Writer of a result into the selected part; dst_unused says what happens to the rest."""
    # v_cvt_pk_f32_fp8 has a 64-bit result and selects only its source.
    shift, bits = _part(ins, "dst_sel")
    unused = ins.take("dst_unused", "UNUSED_PAD")
    if unused not in ("UNUSED_PAD", "UNUSED_PRESERVE", "UNUSED_SEXT"):
        raise ins.unsupported(f"dst_unused:{unused}")
    reg = o.reg
    if o.kind != "v":
        raise ins.unsupported(f"SDWA destination {o.text}")
    if result_bits == 64:
        if bits != 32:
            raise ins.unsupported("dst_sel on a 64-bit result")
        return lambda m, x, where=None: m.wv64(reg, np.asarray(x).view(np.uint64), where)
    unsigned = np.uint16 if result_bits == 16 else np.uint32
    field = np.uint32((1 << bits) - 1)

    def write(m: Machine, x: Any, where: np.ndarray | None = None) -> None:
        value = (np.asarray(x).view(unsigned).astype(np.uint32) & field) << np.uint32(shift)
        if unused == "UNUSED_PRESERVE":
            value = value | (m.rv(reg) & ~np.uint32(field << np.uint32(shift)))
        elif unused == "UNUSED_SEXT" and bits < 32:
            up = np.uint32(32 - bits - shift)
            value = ((value << up).view(np.int32) >> np.int32(up)).view(np.uint32)
        m.wv(reg, value, where)

    return write


def swizzle_source(pattern: int) -> np.ndarray:
    """Source lane of each lane for ds_swizzle_b32's 16-bit pattern (CDNA3 ISA, DS_SWIZZLE_B32)."""
    if pattern & 0x8000:
        order = tuple((pattern >> (2 * i)) & 3 for i in range(4))
        return _quad_perm(order)
    and_mask, or_mask, xor_mask = pattern & 31, (pattern >> 5) & 31, (pattern >> 10) & 31
    return (_LANE & 32) + ((((_LANE & 31) & and_mask) | or_mask) ^ xor_mask)


def parse_swizzle(text: str) -> int | None:
    """LLVM's symbolic swizzle(...) operand as the 16-bit pattern; None when the text is not one."""
    match = re.match(r"swizzle\(\s*(\w+)\s*,\s*(.*)\)$", text)
    if match is None:
        return None
    mode, rest = match[1], [x.strip() for x in match[2].split(",")]
    if mode == "QUAD_PERM":
        return 0x8000 | sum(int(x) << (2 * i) for i, x in enumerate(rest))
    if mode == "SWAP":
        return int(rest[0]) << 10 | 31
    if mode == "REVERSE":
        return (int(rest[0]) - 1) << 10 | 31
    if mode == "BROADCAST":
        size, lane = int(rest[0]), int(rest[1])
        return lane << 5 | (31 & ~(size - 1))
    return None
