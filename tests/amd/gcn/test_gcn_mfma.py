"""Every matrix instruction against a float64 product, with register layouts written here as formulas.

The layouts are AMD's published ones (matrix instruction calculator, CDNA3 and CDNA4 ISA documents), stated apart
from the executor's own: a matrix is put into registers lane by lane and taken out lane by lane.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from gcn_helpers import TARGETS, execute, vector

pytestmark = pytest.mark.amd


def to_xf32(x: np.ndarray) -> np.ndarray:
    """Values with at most 10 mantissa bits, so that the instruction's own rounding changes nothing."""
    return (x.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


FP8 = {"gfx942": ml_dtypes.float8_e4m3fnuz, "gfx950": ml_dtypes.float8_e4m3fn}
BF8 = {"gfx942": ml_dtypes.float8_e5m2fnuz, "gfx950": ml_dtypes.float8_e5m2}


def dtype_of(kind: str, target: str) -> object:
    fixed = {
        "f32": np.float32,
        "xf32": np.float32,
        "f16": np.float16,
        "bf16": ml_dtypes.bfloat16,
        "i8": np.int8,
    }
    return fixed.get(kind) or {"fp8": FP8, "bf8": BF8}[kind][target]


def values(rng: np.random.Generator, shape: tuple[int, int], kind: str, target: str) -> np.ndarray:
    if kind == "i8":
        return rng.integers(-128, 128, shape).astype(np.int8)
    x = rng.standard_normal(shape)
    return to_xf32(x) if kind == "xf32" else x.astype(dtype_of(kind, target))


def load_operand(x: np.ndarray, k_of: Callable[[int, int], int]) -> dict[int, np.ndarray]:
    """Registers (numbered from 0) holding x[row, k]: lane l holds row l % rows at k_of(l // rows, slot)."""
    rows, depth = x.shape
    per_lane = depth * rows // 64
    lanes = np.stack([[x[lane % rows, k_of(lane // rows, j)] for j in range(per_lane)] for lane in range(64)])
    words = np.ascontiguousarray(lanes).view(np.uint32).reshape(64, -1)
    return {i: words[:, i].copy() for i in range(words.shape[1])}


def consecutive(per_lane: int) -> Callable[[int, int], int]:
    return lambda group, j: per_lane * group + j


def result_position(size: int, lane: int, reg: int) -> tuple[int, int]:
    """Row and column of a result register, as the documents' tables give them."""
    if size == 32:
        return 8 * (reg // 4) + 4 * (lane // 32) + reg % 4, lane % 32
    return 4 * (lane // 16) + reg, lane % 16


def result_matrix(m: object, first: int, size: int, dtype: object) -> np.ndarray:
    out = np.zeros((size, size), dtype)
    for reg in range(size * size // 64):
        column = vector(m, first + reg, dtype)
        for lane in range(64):
            out[result_position(size, lane, reg)] = column[lane]
    return out


def accumulator(c: np.ndarray, first: int) -> dict[int, np.ndarray]:
    size = len(c)
    registers = {}
    for reg in range(size * size // 64):
        registers[first + reg] = np.array(
            [c[result_position(size, lane, reg)] for lane in range(64)], c.dtype
        )
    return registers


# name -> (rows, K, type of A, type of B, targets)
PLAIN: dict[str, tuple[int, int, str, str, tuple[str, ...]]] = {}
for _n, _k in ((32, 2), (16, 4)):
    PLAIN[f"v_mfma_f32_{_n}x{_n}x{_k}_f32"] = (_n, _k, "f32", "f32", TARGETS)
for _n, _k in ((32, 4), (16, 8)):
    PLAIN[f"v_mfma_f32_{_n}x{_n}x{_k}_xf32"] = (_n, _k, "xf32", "xf32", ("gfx942",))
for _t in ("f16", "bf16"):
    for _n, _k, _targets in (
        (32, 8, TARGETS),
        (16, 16, TARGETS),
        (32, 16, ("gfx950",)),
        (16, 32, ("gfx950",)),
    ):
        PLAIN[f"v_mfma_f32_{_n}x{_n}x{_k}_{_t}"] = (_n, _k, _t, _t, _targets)
for _n, _k in ((32, 8), (16, 16)):
    PLAIN[f"v_mfma_f32_{_n}x{_n}x{_k}f16"] = (_n, _k, "f16", "f16", TARGETS)
    PLAIN[f"v_mfma_f32_{_n}x{_n}x{_k}bf16_1k"] = (_n, _k, "bf16", "bf16", TARGETS)
for _a in ("fp8", "bf8"):
    for _b in ("fp8", "bf8"):
        for _n, _k in ((32, 16), (16, 32)):
            PLAIN[f"v_mfma_f32_{_n}x{_n}x{_k}_{_a}_{_b}"] = (_n, _k, _a, _b, TARGETS)
for _n, _k, _targets in ((32, 16, TARGETS), (16, 32, TARGETS), (32, 32, ("gfx950",)), (16, 64, ("gfx950",))):
    PLAIN[f"v_mfma_i32_{_n}x{_n}x{_k}_i8"] = (_n, _k, "i8", "i8", _targets)


def span(bank: str, first: int, count: int) -> str:
    return f"{bank}{first}" if count == 1 else f"{bank}[{first}:{first + count - 1}]"


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("bank", ["v", "a"])
def test_plain(name: str, target: str, bank: str) -> None:
    size, depth, a_kind, b_kind, targets = PLAIN[name]
    if target not in targets:
        from octavo.check.gcn import UnsupportedInstruction

        with pytest.raises(UnsupportedInstruction, match=name):
            execute(f"{name} v[0:15], v[0:1], v[2:3], 0", target)
        return
    rng = np.random.default_rng(depth)
    a, b = values(rng, (size, depth), a_kind, target), values(rng, (size, depth), b_kind, target)
    integer = a_kind == "i8"
    c = (
        rng.integers(-1000, 1000, (size, size)).astype(np.int32)
        if integer
        else rng.standard_normal((size, size))
    )
    c = c if integer else c.astype(np.float32)
    per_lane = depth * size // 64
    a_registers, b_registers = load_operand(a, consecutive(per_lane)), load_operand(b, consecutive(per_lane))
    n, regs = len(a_registers), size * size // 64
    first_c = 32 + (256 if bank == "a" else 0)
    registers = a_registers | {8 + r: x for r, x in b_registers.items()}
    d = span(bank, 64, regs)
    m = execute(
        f"{name} {d}, {span('v', 0, n)}, {span('v', 8, n)}, {span(bank, 32, regs)}",
        target,
        registers | accumulator(c, first_c),
    )
    got = result_matrix(m, 64 + (256 if bank == "a" else 0), size, np.int32 if integer else np.float32)
    exact = a.astype(np.float64) @ b.astype(np.float64).T + c
    if integer:
        assert (got == exact).all()
    else:
        scale = np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64)).T + np.abs(c)
        assert (np.abs(got - exact) <= 2.0**-23 * scale).all()


# --- f8f6f4: formats by cbsz and blgp
def small_values(exponent_bits: int, mantissa_bits: int, bias: int) -> np.ndarray:
    """Values of a 6- or 4-bit format without infinities and NaN, by code."""
    out = []
    for code in range(1 << (1 + exponent_bits + mantissa_bits)):
        sign = -1.0 if code >> (exponent_bits + mantissa_bits) else 1.0
        exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1)
        mantissa = code & ((1 << mantissa_bits) - 1)
        fraction = mantissa / 2**mantissa_bits + (1 if exponent else 0)
        out.append(sign * fraction * 2.0 ** (max(exponent, 1) - bias))
    return np.array(out)


def ocp_values(dtype: object) -> np.ndarray:
    return np.arange(256, dtype=np.uint8).view(dtype).astype(np.float64)


FORMATS = [
    (8, ocp_values(ml_dtypes.float8_e4m3fn)),
    (8, ocp_values(ml_dtypes.float8_e5m2)),
    (6, small_values(2, 3, 1)),
    (6, small_values(3, 2, 3)),
    (4, small_values(2, 1, 1)),
]


def f8f6f4_k(bits: int, size: int) -> Callable[[int, int], int]:
    """8-bit: two runs of 16 K, the second half of K away; narrower: 32 consecutive K."""
    groups = 64 // size
    if bits == 8:
        return lambda group, j: (j // 16) * 16 * groups + 16 * group + j % 16
    return lambda group, j: 32 * group + j


def load_codes(codes: np.ndarray, bits: int, first: int) -> tuple[dict[int, np.ndarray], int]:
    """Registers with 32 codes a lane, lowest bits first, and how many registers that takes."""
    rows = len(codes)
    k_of = f8f6f4_k(bits, rows)
    count = bits  # 32 values of `bits` bits fill `bits` registers
    registers = {first + i: np.zeros(64, np.uint32) for i in range(count)}
    for lane in range(64):
        word = 0
        for j in range(32):
            word |= int(codes[lane % rows, k_of(lane // rows, j)]) << bits * j
        for i in range(count):
            registers[first + i][lane] = word >> 32 * i & 0xFFFFFFFF
    return registers, count


def random_codes(rng: np.random.Generator, shape: tuple[int, int], form: int) -> np.ndarray:
    _, table = FORMATS[form]
    usable = np.flatnonzero(np.isfinite(table) & (np.abs(table) < 1000))
    return rng.choice(usable, shape)


SHAPES = [(32, 64), (16, 128)]


@pytest.mark.parametrize(("size", "depth"), SHAPES)
@pytest.mark.parametrize(("cbsz", "blgp"), [(i, j) for i in range(5) for j in range(5)])
def test_f8f6f4(size: int, depth: int, cbsz: int, blgp: int) -> None:
    rng = np.random.default_rng(10 * cbsz + blgp)
    codes = [random_codes(rng, (size, depth), f) for f in (cbsz, blgp)]
    a_registers, n_a = load_codes(codes[0], FORMATS[cbsz][0], 0)
    b_registers, n_b = load_codes(codes[1], FORMATS[blgp][0], 8)
    regs = size * size // 64
    text = f"v_mfma_f32_{size}x{size}x{depth}_f8f6f4 a[0:{regs - 1}], {span('v', 0, n_a)}, {span('v', 8, n_b)}, 0"
    text += (f" cbsz:{cbsz}" if cbsz else "") + (f" blgp:{blgp}" if blgp else "")
    m = execute(text, "gfx950", a_registers | b_registers)
    a, b = FORMATS[cbsz][1][codes[0]], FORMATS[blgp][1][codes[1]]
    exact, scale = a @ b.T, np.abs(a) @ np.abs(b).T
    assert (np.abs(result_matrix(m, 256, size, np.float32) - exact) <= 2.0**-23 * scale).all()


@pytest.mark.parametrize(("size", "depth"), SHAPES)
@pytest.mark.parametrize("form", range(5))
@pytest.mark.parametrize(("byte_a", "byte_b"), [(0, 0), (1, 2), (3, 1), (2, 3)])
def test_scaled(size: int, depth: int, form: int, byte_a: int, byte_b: int) -> None:
    """The scale of block b of row r is in lane r + size * b, in the byte that op_sel (low bit) and op_sel_hi name."""
    rng = np.random.default_rng(form)
    codes = [random_codes(rng, (size, depth), form) for _ in range(2)]
    a_registers, n = load_codes(codes[0], FORMATS[form][0], 0)
    b_registers, _ = load_codes(codes[1], FORMATS[form][0], 8)
    words = rng.integers(100, 150, (2, 64, 4)).astype(np.uint8)
    scale_registers = {20: words[0].copy().view(np.uint32)[:, 0], 21: words[1].copy().view(np.uint32)[:, 0]}
    regs = size * size // 64
    c = rng.standard_normal((size, size)).astype(np.float32)
    text = (
        f"v_mfma_scale_f32_{size}x{size}x{depth}_f8f6f4 v[64:{63 + regs}], {span('v', 0, n)}, {span('v', 8, n)}, "
        f"v[32:{31 + regs}], v20, v21 op_sel:[{byte_a & 1},{byte_b & 1},0] op_sel_hi:[{byte_a >> 1},{byte_b >> 1},0]"
        f" cbsz:{form} blgp:{form}"
    )
    m = execute(text, "gfx950", a_registers | b_registers | scale_registers | accumulator(c, 32))
    sides = []
    for side, byte in ((0, byte_a), (1, byte_b)):
        x = FORMATS[form][1][codes[side]]
        for row in range(size):
            for block in range(depth // 32):
                x[row, 32 * block : 32 * block + 32] *= 2.0 ** (
                    int(words[side, row + size * block, byte]) - 127
                )
        sides.append(x)
    exact, scale = sides[0] @ sides[1].T + c, np.abs(sides[0]) @ np.abs(sides[1]).T + np.abs(c)
    assert (np.abs(result_matrix(m, 64, size, np.float32) - exact) <= 2.0**-23 * scale).all()


def test_nan_scale_gives_nan() -> None:
    registers = {i: np.full(64, 0x38383838, np.uint32) for i in range(16)}
    registers |= {20: np.full(64, 0xFF, np.uint32), 21: np.full(64, 127, np.uint32)}
    text = "v_mfma_scale_f32_32x32x64_f8f6f4 v[64:79], v[0:7], v[8:15], 0, v20, v21 op_sel_hi:[0,0,0]"
    assert np.isnan(result_matrix(execute(text, "gfx950", registers), 64, 32, np.float32)).all()


@pytest.mark.parametrize("size", [32, 16])
def test_one_nonzero_element_lands_where_the_layout_says(size: int) -> None:
    """A single A and B element: the product must appear in exactly one result register and lane."""
    depth = 8 if size == 32 else 16
    name = f"v_mfma_f32_{size}x{size}x{depth}_f16"
    for row, column, k in ((0, 0, 0), (size - 1, 1, depth - 1), (5, size - 2, 3), (size // 2, 7, depth // 2)):
        a, b = np.zeros((2, size, depth), np.float16)
        a[row, k], b[column, k] = 3, 5
        b_registers = {8 + r: x for r, x in load_operand(b, consecutive(4)).items()}
        m = execute(
            f"{name} v[64:{63 + size * size // 64}], v[0:1], v[8:9], 0",
            "gfx942",
            load_operand(a, consecutive(4)) | b_registers,
        )
        got = result_matrix(m, 64, size, np.float32)
        assert got[row, column] == 15
        assert np.count_nonzero(got) == 1


def test_every_matrix_instruction_in_the_table_is_tested() -> None:
    from octavo.check.gcn.launch import TARGETS as _  # noqa: F401  (fills the table)
    from octavo.check.gcn.table import TABLE

    scaled = {f"v_mfma_{s}f32_{n}x{n}x{k}_f8f6f4" for s in ("", "scale_") for n, k in SHAPES}
    assert {n for n in TABLE if re.match(r"v_(s?mfma|dot)", n)} == set(PLAIN) | scaled


def test_refusals() -> None:
    from octavo.check.gcn import UnsupportedInstruction

    with pytest.raises(UnsupportedInstruction, match="inactive lanes"):
        execute("v_mfma_f32_32x32x8_f16 v[64:79], v[0:1], v[8:9], 0", "gfx942", exec_mask=1)
    with pytest.raises(UnsupportedInstruction, match="cbsz"):
        execute("v_mfma_f32_32x32x8_f16 v[64:79], v[0:1], v[8:9], 0 cbsz:1", "gfx942")
    with pytest.raises(UnsupportedInstruction, match="does not hold"):
        execute("v_mfma_f32_32x32x64_f8f6f4 v[64:79], v[0:7], v[8:15], 0 cbsz:4", "gfx950")
