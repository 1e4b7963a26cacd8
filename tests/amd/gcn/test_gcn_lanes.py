"""DPP, SDWA, permutes and swaps against loops over lanes written from the ISA documents' descriptions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from gcn_helpers import both_targets, execute, scalar, vector

pytestmark = pytest.mark.amd
SOURCE = np.random.default_rng(0).integers(0, 2**32, 64, dtype=np.uint32)
OLD = np.arange(64, dtype=np.uint32) + 1000


def row(lane: int) -> int:
    return lane // 16 * 16


def shifted(lane: int, by: int) -> int | None:
    """Lane `by` to the right within the row of 16."""
    return lane + by if row(lane) <= lane + by < row(lane) + 16 else None


# control -> lane that each lane reads, None where there is none
DPP: dict[str, Callable[[int], int | None]] = {
    "row_shl:1": lambda i: shifted(i, 1),
    "row_shl:15": lambda i: shifted(i, 15),
    "row_shr:1": lambda i: shifted(i, -1),
    "row_shr:8": lambda i: shifted(i, -8),
    "row_ror:3": lambda i: row(i) + (i - 3) % 16,
    "row_mirror": lambda i: row(i) + 15 - i % 16,
    "row_half_mirror": lambda i: i // 8 * 8 + 7 - i % 8,
    "row_newbcast:5": lambda i: row(i) + 5,
    "row_bcast:15": lambda i: row(i) - 1 if i >= 16 else None,
    "row_bcast:31": lambda i: 31 if i >= 32 else None,
    "wave_shl:1": lambda i: i + 1 if i < 63 else None,
    "wave_shr:1": lambda i: i - 1 if i > 0 else None,
    "wave_rol:1": lambda i: (i + 1) % 64,
    "wave_ror:1": lambda i: (i - 1) % 64,
    "quad_perm:[2,3,0,1]": lambda i: i // 4 * 4 + [2, 3, 0, 1][i % 4],
    "quad_perm:[0,0,3,1]": lambda i: i // 4 * 4 + [0, 0, 3, 1][i % 4],
}


@both_targets
@pytest.mark.parametrize("control", DPP)
@pytest.mark.parametrize("bound", ["", " bound_ctrl:1"])
@pytest.mark.parametrize("active", [2**64 - 1, 0xFFFE_7FFF_0FF0_FFFB])
def test_dpp_move(control: str, bound: str, active: int, target: str) -> None:
    """Without a source lane (or with an inactive one) bound_ctrl reads 0; otherwise the destination stays."""
    text = f"v_mov_b32_dpp v0, v1 {control} row_mask:0xf bank_mask:0xf{bound}"
    m = execute(text, target, {0: OLD, 1: SOURCE}, exec_mask=active)
    for lane in range(64):
        source = DPP[control](lane)
        valid = source is not None and active >> source & 1
        want = SOURCE[source] if valid else 0 if bound else OLD[lane]
        assert vector(m, 0)[lane] == (want if active >> lane & 1 else OLD[lane]), lane


@both_targets
def test_dpp_masks_disable_rows_and_banks(target: str) -> None:
    m = execute("v_mov_b32_dpp v0, v1 row_ror:1 row_mask:0xa bank_mask:0x5", target, {0: OLD, 1: SOURCE})
    for lane in range(64):
        written = lane // 16 in (1, 3) and lane % 16 // 4 in (0, 2)
        assert vector(m, 0)[lane] == (SOURCE[row(lane) + (lane - 1) % 16] if written else OLD[lane])


@both_targets
def test_dpp_reduction_sums_the_wave(target: str) -> None:
    """The sequence compilers use to add 64 lanes; the total appears in lane 63."""
    steps = ["row_shr:8", "row_shr:4", "row_shr:2", "row_shr:1", "row_bcast:15", "row_bcast:31"]
    lines = [
        f"v_add_f32_dpp v1, v1, v1 {s} row_mask:0x{'a' if 'bcast:15' in s else 'f'} bank_mask:0xf"
        for s in steps
    ]
    lines = [line.replace("row_mask:0xf", "row_mask:0xc") if "bcast:31" in line else line for line in lines]
    x = np.arange(64, dtype=np.float32)
    assert vector(execute("\n".join(lines), target, {1: x}), 1, np.float32)[63] == x.sum()


PARTS = {
    "BYTE_0": (0, 8),
    "BYTE_1": (8, 8),
    "BYTE_2": (16, 8),
    "BYTE_3": (24, 8),
    "WORD_0": (0, 16),
    "WORD_1": (16, 16),
}
PARTS["DWORD"] = (0, 32)


@both_targets
@pytest.mark.parametrize("select", PARTS)
@pytest.mark.parametrize("place", PARTS)
@pytest.mark.parametrize("unused", ["UNUSED_PAD", "UNUSED_PRESERVE", "UNUSED_SEXT"])
def test_sdwa(select: str, place: str, unused: str, target: str) -> None:
    text = f"v_or_b32_sdwa v0, v1, v2 dst_sel:{place} dst_unused:{unused} src0_sel:{select} src1_sel:DWORD"
    m = execute(text, target, {0: OLD, 1: SOURCE, 2: np.uint32(0x01020304)})
    (shift, size), (to, width) = PARTS[select], PARTS[place]
    for lane in range(64):
        value = (int(SOURCE[lane]) >> shift & ((1 << size) - 1) | 0x01020304) & ((1 << width) - 1)
        mask = ((1 << width) - 1) << to
        want = value << to
        if unused == "UNUSED_PRESERVE":
            want |= int(OLD[lane]) & ~mask
        elif unused == "UNUSED_SEXT" and value >> (width - 1):
            want |= 0xFFFFFFFF << (to + width)
        assert vector(m, 0)[lane] == want & 0xFFFFFFFF


@both_targets
def test_sdwa_sign_extension_and_compare(target: str) -> None:
    text = (
        "v_add_u32_sdwa v0, sext(v1), v2 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_2 src1_sel:WORD_1"
    )
    m = execute(text, target, {1: SOURCE, 2: SOURCE})
    want = (SOURCE >> 16).astype(np.uint8).view(np.int8).astype(np.int64) + (SOURCE >> 16)
    assert vector(m, 0).tolist() == (want & 0xFFFFFFFF).tolist()
    text = "v_cmp_eq_u16_sdwa s[0:1], v1, s4 src0_sel:BYTE_1 src1_sel:DWORD"
    m = execute(text, target, {1: SOURCE}, {4: int(SOURCE[9]) >> 8 & 255})
    assert [scalar(m, i // 32) >> i % 32 & 1 for i in range(64)] == [
        int(x >> 8 & 255 == SOURCE[9] >> 8 & 255) for x in SOURCE.astype(np.int64)
    ]


@both_targets
def test_bpermute_and_permute(target: str) -> None:
    rng = np.random.default_rng(4)
    lanes = rng.integers(0, 64, 64).astype(np.uint32)
    active = 0xFFFFFFFFFFFFFF0F
    text = "ds_bpermute_b32 v0, v1, v2\ns_waitcnt lgkmcnt(0)"
    m = execute(text, target, {0: OLD, 1: lanes * 4, 2: SOURCE}, exec_mask=active)
    for lane in range(64):
        source = int(lanes[lane])
        want = (SOURCE[source] if active >> source & 1 else 0) if active >> lane & 1 else OLD[lane]
        assert vector(m, 0)[lane] == want
    order = rng.permutation(64).astype(np.uint32)
    m = execute("ds_permute_b32 v0, v1, v2\ns_waitcnt lgkmcnt(0)", target, {0: OLD, 1: order * 4, 2: SOURCE})
    assert vector(m, 0)[order].tolist() == SOURCE.tolist()


@both_targets
@pytest.mark.parametrize(
    ("offset", "source"),
    [
        ("swizzle(SWAP,16)", lambda i: i ^ 16),
        ("swizzle(REVERSE,8)", lambda i: i // 8 * 8 + 7 - i % 8),
        ("swizzle(BROADCAST,8,3)", lambda i: i // 8 * 8 + 3),
        ("swizzle(QUAD_PERM,1,0,3,2)", lambda i: i ^ 1),
        ("0x041f", lambda i: i ^ 1),  # and 31, or 0, xor 1
        ("0x80b1", lambda i: i // 4 * 4 + [1, 0, 3, 2][i % 4]),
    ],
)
def test_swizzle(offset: str, source: Callable[[int], int], target: str) -> None:
    m = execute(f"ds_swizzle_b32 v0, v1 offset:{offset}\ns_waitcnt lgkmcnt(0)", target, {1: SOURCE})
    assert vector(m, 0).tolist() == [SOURCE[source(i)] for i in range(64)]


@pytest.mark.parametrize(
    ("name", "size"), [("v_permlane32_swap_b32_e32", 32), ("v_permlane16_swap_b32_e32", 16)]
)
def test_permlane_swap(name: str, size: int) -> None:
    """Odd rows of the first register change places with even rows of the second."""
    m = execute(f"{name} v0, v1", "gfx950", {0: OLD, 1: SOURCE})
    for lane in range(64):
        odd = lane // size % 2
        assert vector(m, 0)[lane] == (SOURCE[lane - size] if odd else OLD[lane])
        assert vector(m, 1)[lane] == (SOURCE[lane] if odd else OLD[lane + size])


@both_targets
def test_scalar_and_lane_exchange(target: str) -> None:
    text = "v_readfirstlane_b32 s0, v1\nv_readlane_b32 s1, v1, 63\nv_readlane_b32 s2, v1, s4\nv_writelane_b32 v0, s1, 7"
    m = execute(text, target, {0: OLD, 1: SOURCE}, {4: 33}, exec_mask=0xFF00)
    assert [scalar(m, i) for i in range(3)] == [SOURCE[8], SOURCE[63], SOURCE[33]]
    want = OLD.copy()
    want[7] = SOURCE[63]
    assert vector(m, 0).tolist() == want.tolist()


@both_targets
def test_lane_count_below(target: str) -> None:
    mask = 0xF0F0_1234_0000_FFFF
    text = "v_mbcnt_lo_u32_b32 v0, s0, 3\nv_mbcnt_hi_u32_b32 v0, s1, v0"
    m = execute(text, target, s={0: mask & 0xFFFFFFFF, 1: mask >> 32})
    assert vector(m, 0).tolist() == [3 + (mask & ((1 << i) - 1)).bit_count() for i in range(64)]


def transposed(memory: np.ndarray, bits: int) -> Callable[[int, int], int]:
    """element(lane, j): 16 lanes together read rows of 16 elements; lane i takes element i of row j."""

    def element(lane: int, j: int) -> int:
        first = lane // 16 * 16
        index = j * 16 + lane % 16  # in the elements of the group, row by row
        per_lane = 64 // bits
        owner, at = first + index // per_lane, index % per_lane
        word = int(memory[8 * owner : 8 * owner + 8].view(np.uint64)[0])
        return word >> bits * at & ((1 << bits) - 1)

    return element


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_transposing_read(bits: int) -> None:
    memory = np.random.default_rng(1).integers(0, 256, 512).astype(np.uint8)
    address = np.arange(64, dtype=np.uint32) * 8
    text = f"ds_read_b64_tr_b{bits} v[2:3], v1\ns_waitcnt lgkmcnt(0)"
    m = execute(text, "gfx950", {1: address}, lds=memory)
    element = transposed(memory, bits)
    for lane in range(64):
        got = int(vector(m, 2)[lane]) | int(vector(m, 3)[lane]) << 32
        assert got == sum(element(lane, j) << bits * j for j in range(64 // bits))
