"""Every conversion instruction against ml_dtypes, NumPy or a float64 decode written here."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from gcn_helpers import both_targets, execute, interesting_floats, vector

pytestmark = pytest.mark.amd

FP8 = {"gfx942": ml_dtypes.float8_e4m3fnuz, "gfx950": ml_dtypes.float8_e4m3fn}
BF8 = {"gfx942": ml_dtypes.float8_e5m2fnuz, "gfx950": ml_dtypes.float8_e5m2}
SMALL = {"fp8": FP8, "bf8": BF8}
SATURATE = "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1\n"
families = pytest.mark.parametrize("family", ["fp8", "bf8"])


def finite_max(dtype: object) -> float:
    return float(ml_dtypes.finfo(dtype).max)


def encoded(x: np.ndarray, dtype: object, saturate: bool) -> np.ndarray:
    """uint8 codes by ml_dtypes, with the hardware's saturation applied first where it is on."""
    if saturate:
        top = finite_max(dtype)
        x = np.where(np.isnan(x), x, np.clip(x, -top, top))
    with np.errstate(all="ignore"):
        return np.asarray(x, np.float32).astype(dtype).view(np.uint8)


def difficult(dtype: object) -> np.ndarray:
    """float32: every value of the format, every midpoint (tie), the float32 on both sides of it, and specials."""
    values = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float64)
    values = np.unique(values[np.isfinite(values)])
    ties = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    near = [np.nextafter(ties, np.float32(s)) for s in (-np.inf, np.inf)]
    top = finite_max(dtype)
    special = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, top * 1.01, -top * 1.5, 1e38, 1e-40], np.float32)
    x = np.concatenate((values.astype(np.float32), ties, *near, special))
    return np.resize(x, -(-len(x) // 64) * 64)


def same_codes(got: np.ndarray, want: np.ndarray, dtype: object) -> None:
    """Equal bits, except that any NaN code stands for NaN."""
    nan = np.isnan(got.view(dtype).astype(np.float32)) & np.isnan(want.view(dtype).astype(np.float32))
    assert ((got == want) | nan).all(), (got[(got != want) & ~nan][:5], want[(got != want) & ~nan][:5])


@both_targets
@families
@pytest.mark.parametrize("saturate", [False, True])
def test_encode_pair(family: str, target: str, saturate: bool) -> None:
    dtype = SMALL[family][target]
    text = (SATURATE if saturate else "") + (
        f"v_mov_b32_e32 v0, -1\nv_cvt_pk_{family}_f32 v0, v1, v2 op_sel:[0,0,1]\nv_cvt_pk_{family}_f32 v0, v2, -v1"
    )
    x = difficult(dtype)
    for part in x.reshape(-1, 64):
        other = np.roll(part, 7)
        got = vector(execute(text, target, {1: part, 2: other}), 0)
        codes = np.ascontiguousarray(got).view(np.uint8).reshape(64, 4)
        for column, value in enumerate((other, -part, part, other)):
            same_codes(codes[:, column].copy(), encoded(value, dtype, saturate), dtype)


@both_targets
@families
def test_encode_pair_keeps_the_other_half(family: str, target: str) -> None:
    m = execute(
        f"v_cvt_pk_{family}_f32 v0, v1, v1 op_sel:[0,0,1]", target, {0: np.uint32(0xABCD1234), 1: 1.0 + 0 * A}
    )
    assert (vector(m, 0) & 0xFFFF == 0x1234).all()


A = np.zeros(64, np.float32)
CODES = np.arange(256, dtype=np.uint8).reshape(64, 4)


def decoded(column: int, dtype: object) -> np.ndarray:
    return CODES[:, column].copy().view(dtype).astype(np.float32)


def same_values(got: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_array_equal(got, want)  # NaN equals NaN, and -0 must match below
    assert (np.signbit(got) == np.signbit(want))[~np.isnan(want)].all()


@both_targets
@families
def test_decode_every_code(family: str, target: str) -> None:
    dtype, words = SMALL[family][target], CODES.view(np.uint32)[:, 0]
    for byte in range(4):
        text = f"v_cvt_f32_{family}_sdwa v0, v1 src0_sel:BYTE_{byte}"
        same_values(vector(execute(text, target, {1: words}), 0, np.float32), decoded(byte, dtype))
    plain = execute(
        f"v_cvt_f32_{family}_e32 v0, v1\nv_cvt_pk_f32_{family}_e32 v[2:3], v1", target, {1: words}
    )
    same_values(vector(plain, 0, np.float32), decoded(0, dtype))
    same_values(vector(plain, 3, np.float32), decoded(1, dtype))
    upper = execute(f"v_cvt_pk_f32_{family}_sdwa v[2:3], v1 src0_sel:WORD_1", target, {1: words})
    same_values(vector(upper, 2, np.float32), decoded(2, dtype))
    same_values(vector(upper, 3, np.float32), decoded(3, dtype))


# --- gfx950's scaled conversions
SCALES = np.resize(np.ldexp(np.float32(1), [0, 3, -4, 20, -20]), 64).astype(np.float32)
WIDE = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}


def packed_source(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return low.view(np.uint16).astype(np.uint32) | high.view(np.uint16).astype(np.uint32) << 16


@families
@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("saturate", [False, True])
def test_scaled_encode(family: str, wide: str, saturate: bool) -> None:
    """The value is divided by the scale's power of two; the scale's mantissa does not count."""
    dtype = SMALL[family]["gfx950"]
    sources = "v1, v2" if wide == "f32" else "v1"
    op_sel = "[0,0,0,1]" if wide == "f32" else "[0,0,1]"
    name = f"v_cvt_scalef32_pk_{family}_{wide}"
    text = (
        SATURATE if saturate else ""
    ) + f"{name} v0, {sources}, v3\n{name} v0, {sources}, v3 op_sel:{op_sel}"
    for part in difficult(dtype).reshape(-1, 64):
        with np.errstate(all="ignore"):
            a = (part * SCALES).astype(WIDE[wide])
            b = np.roll(part, 5).astype(WIDE[wide])
        registers = {1: a, 2: b} if wide == "f32" else {1: packed_source(a, b)}
        m = execute(text, "gfx950", {**registers, 0: A, 3: SCALES * np.float32(1.75)})
        codes = np.ascontiguousarray(vector(m, 0)).view(np.uint8).reshape(64, 4)
        with np.errstate(all="ignore"):
            want = [encoded(x.astype(np.float64) / SCALES, dtype, saturate) for x in (a, b)]
        for column in range(4):
            same_codes(codes[:, column].copy(), want[column % 2], dtype)


@families
@pytest.mark.parametrize("wide", WIDE)
def test_scaled_decode(family: str, wide: str) -> None:
    dtype, words = SMALL[family]["gfx950"], CODES.view(np.uint32)[:, 0]
    destination = "v[2:3]" if wide == "f32" else "v2"
    for half in (0, 1):
        text = f"v_cvt_scalef32_pk_{wide}_{family} {destination}, v1, v4 op_sel:[{half},0,0]"
        m = execute(text, "gfx950", {1: words, 4: SCALES})
        with np.errstate(all="ignore"):
            want = [(decoded(2 * half + i, dtype) * SCALES).astype(WIDE[wide]) for i in (0, 1)]
        if wide == "f32":
            got = [vector(m, 2, np.float32), vector(m, 3, np.float32)]
        else:
            pair = np.ascontiguousarray(vector(m, 2)).view(WIDE[wide]).reshape(64, 2)
            got = [pair[:, 0], pair[:, 1]]
        for g, w in zip(got, want, strict=True):
            same_values(g.astype(np.float32), w.astype(np.float32))


FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def nearest_fp4(x: float) -> int:
    """Code of the nearest value; ties go to the even code; beyond 6 is 6."""
    size = min(abs(x), 6.0)
    best = min(range(8), key=lambda c: (abs(float(FP4[c]) - size), c & 1))
    return best | (8 if np.signbit(x) else 0)


@pytest.mark.parametrize("wide", WIDE)
def test_fp4_encode(wide: str) -> None:
    values = np.concatenate(
        (FP4, [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -5, 7, 100, -100, 0.26, 0.24, 5.01])
    )
    x = np.resize(values, 64).astype(WIDE[wide])
    y = np.roll(x, 3)
    sources, registers = ("v1, v2", {1: x, 2: y}) if wide == "f32" else ("v1", {1: packed_source(x, y)})
    want = [(nearest_fp4(float(a)) | nearest_fp4(float(b)) << 4) for a, b in zip(x, y, strict=True)]
    for byte in range(4):
        text = f"v_cvt_scalef32_pk_fp4_{wide} v0, {sources}, 1.0 op_sel:[0,0,{byte & 1},{byte >> 1}]"
        m = execute(text, "gfx950", {**registers, 0: A})
        assert vector(m, 0).tolist() == [w << 8 * byte for w in want]


@pytest.mark.parametrize("wide", WIDE)
def test_fp4_decode(wide: str) -> None:
    words = CODES.view(np.uint32)[:, 0]
    destination = "v[2:3]" if wide == "f32" else "v2"
    for byte in range(4):
        text = f"v_cvt_scalef32_pk_{wide}_fp4 {destination}, v1, v4 op_sel:[{byte & 1},{byte >> 1},0]"
        m = execute(text, "gfx950", {1: words, 4: SCALES})
        with np.errstate(all="ignore"):
            want = [FP4[CODES[:, byte] >> 4 * i & 15] * SCALES for i in (0, 1)]
            want = [w.astype(WIDE[wide]).astype(np.float32) for w in want]
        if wide == "f32":
            got = [vector(m, 2, np.float32), vector(m, 3, np.float32)]
        else:
            pair = np.ascontiguousarray(vector(m, 2)).view(WIDE[wide]).reshape(64, 2)
            got = [pair[:, i].astype(np.float32) for i in (0, 1)]
        for g, w in zip(got, want, strict=True):
            same_values(g, w)


# --- bf16, f16, integers
def test_bf16_pair() -> None:
    rng = np.random.default_rng(0)
    a, b = interesting_floats(rng), interesting_floats(rng)
    a[:8] = np.array([0x3F808000, 0x3F818000, 0x3F807FFF, 0x7F7FFFFF] * 2, np.uint32).view(
        np.float32
    )  # ties, overflow
    got = vector(execute("v_cvt_pk_bf16_f32 v0, v1, v2", "gfx950", {1: a, 2: b}), 0)
    with np.errstate(all="ignore"):
        want = np.stack((a, b), 1).astype(ml_dtypes.bfloat16).astype(np.float32)
    pair = np.ascontiguousarray(got).view(ml_dtypes.bfloat16).reshape(64, 2).astype(np.float32)
    same_values(pair, want)


@both_targets
def test_f16(target: str) -> None:
    rng = np.random.default_rng(1)
    x = (rng.standard_normal(64) * np.exp2(rng.integers(-26, 17, 64))).astype(np.float32)
    x[:4] = [65520, 65519.99, 2.0**-25, -(2.0**-25) * 1.0001]
    m = execute("v_cvt_f16_f32_e32 v0, v1\nv_cvt_f32_f16_e32 v2, v0", target, {1: x})
    with np.errstate(all="ignore"):
        half = x.astype(np.float16)
    assert vector(m, 0).tolist() == half.view(np.uint16).tolist()
    same_values(vector(m, 2, np.float32), half.astype(np.float32))
    packed = packed_source(half, np.roll(half, 1))
    upper = execute(
        "v_cvt_f32_f16_sdwa v0, v1 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1", target, {1: packed}
    )
    same_values(vector(upper, 0, np.float32), np.roll(half, 1).astype(np.float32))
    toward_zero = execute("v_cvt_pkrtz_f16_f32 v0, v1, v1", target, {1: x})
    got = (
        np.ascontiguousarray(vector(toward_zero, 0)).view(np.float16).reshape(64, 2)[:, 0].astype(np.float64)
    )
    assert (np.abs(got) <= np.abs(x)).all()
    finite = np.abs(x) < 65504
    with np.errstate(all="ignore"):
        step = np.spacing(half).astype(np.float64)
    assert (np.abs(got - x) < np.abs(step))[finite].all()
    if target == "gfx950":
        both = execute("v_cvt_pk_f16_f32 v0, v1, v1", target, {1: x})
        assert vector(both, 0).tolist() == (half.view(np.uint16).astype(np.uint32) * 0x10001).tolist()


@both_targets
def test_integers(target: str) -> None:
    x = np.resize(
        np.array([0.5, -0.5, 1.5, -1.99, 2147483647.0, -3e9, 5e9, np.nan, np.inf, -np.inf], np.float32), 64
    )
    m = execute("v_cvt_i32_f32_e32 v0, v1\nv_cvt_u32_f32_e32 v2, v1", target, {1: x})
    as_int = [0, 0, 1, -1, 2**31 - 1, -(2**31), 2**31 - 1, 0, 2**31 - 1, -(2**31)]
    as_unsigned = [0, 0, 1, 0, 2**31, 0, 2**32 - 1, 0, 2**32 - 1, 0]
    assert vector(m, 0, np.int32).tolist() == np.resize(as_int, 64).tolist()
    assert vector(m, 2).tolist() == np.resize(as_unsigned, 64).tolist()
    n = np.random.default_rng(2).integers(0, 2**32, 64, dtype=np.uint32)
    text = "v_cvt_f32_u32_e32 v0, v1\nv_cvt_f32_i32_e32 v2, v1\nv_cvt_f32_ubyte2_e32 v3, v1"
    m = execute(text, target, {1: n})
    assert (vector(m, 0, np.float32) == n.astype(np.float32)).all()
    assert (vector(m, 2, np.float32) == n.view(np.int32).astype(np.float32)).all()
    assert vector(m, 3, np.float32).tolist() == (n >> 16 & 255).tolist()


def test_every_conversion_in_the_table_is_tested() -> None:
    """A conversion added to the executor must get its oracle test here (or be listed as covered elsewhere)."""
    from octavo.check.gcn.launch import TARGETS  # noqa: F401  (fills the table)
    from octavo.check.gcn.table import TABLE

    scaled = {f"v_cvt_scalef32_pk_{s}_{w}" for s in ("fp8", "bf8", "fp4") for w in WIDE}
    scaled |= {f"v_cvt_scalef32_pk_{w}_{s}" for s in ("fp8", "bf8", "fp4") for w in WIDE}
    plain = {f"v_cvt_{x}" for f in SMALL for x in (f"pk_{f}_f32", f"f32_{f}", f"pk_f32_{f}")}
    others = {f"v_cvt_{x}" for x in OTHERS} | {f"v_cvt_{x}" for x in SIMPLE}
    assert {n for n in TABLE if n.startswith("v_cvt_")} == scaled | plain | others


OTHERS = [
    *("pk_bf16_f32", "pk_f16_f32", "pkrtz_f16_f32", "f16_f32", "f32_f16"),
    *("i32_f32", "u32_f32", "f32_u32", "f32_i32", "f32_ubyte2"),
]
F64 = np.array([0.1, -3.7, 1e300, 2.0**-149, np.pi, -0.0, 65504.0, 123456789.0])
# name -> (source dtype, destination dtype, function): conversions with one operand of its own width each
SIMPLE = {
    "f64_f32": (np.float32, np.float64, lambda x: x.astype(np.float64)),
    "f32_f64": (np.float64, np.float32, lambda x: x.astype(np.float32)),
    "f64_i32": (np.int32, np.float64, lambda x: x.astype(np.float64)),
    "f64_u32": (np.uint32, np.float64, lambda x: x.astype(np.float64)),
    "f16_u16": (np.uint16, np.float16, lambda x: x.astype(np.float16)),
    "f16_i16": (np.int16, np.float16, lambda x: x.astype(np.float16)),
    "u16_f16": (
        np.float16,
        np.uint16,
        lambda x: np.clip(np.trunc(x.astype(np.float64)), 0, 65535).astype(np.uint16),
    ),
    "i16_f16": (
        np.float16,
        np.int16,
        lambda x: np.clip(np.trunc(x.astype(np.float64)), -32768, 32767).astype(np.int16),
    ),
    "rpi_i32_f32": (np.float32, np.int32, lambda x: np.floor(x.astype(np.float64) + 0.5).astype(np.int32)),
    "flr_i32_f32": (np.float32, np.int32, lambda x: np.floor(x).astype(np.int32)),
    "f32_ubyte0": (np.uint32, np.float32, lambda x: (x & 255).astype(np.float32)),
    "f32_ubyte1": (np.uint32, np.float32, lambda x: (x >> 8 & 255).astype(np.float32)),
    "f32_ubyte3": (np.uint32, np.float32, lambda x: (x >> 24).astype(np.float32)),
}


@both_targets
@pytest.mark.parametrize("name", SIMPLE)
def test_simple(name: str, target: str) -> None:
    source, result, function = SIMPLE[name]
    rng = np.random.default_rng(11)
    if np.dtype(source).kind == "f":
        x = (rng.standard_normal(64) * 1000).astype(source)
        if source is np.float64:
            x[: len(F64)] = F64
    else:
        info = np.iinfo(source)
        x = rng.integers(info.min, info.max, 64, dtype=source, endpoint=True)
    with np.errstate(all="ignore"):
        want = np.asarray(function(x), result)
    words = {2: np.uint16, 4: np.uint32, 8: np.uint64}
    raw = x.view(words[x.dtype.itemsize])
    registers = {1: raw.astype(np.uint32)}
    if x.dtype.itemsize == 8:
        registers = {
            2: (raw & np.uint64(0xFFFFFFFF)).astype(np.uint32),
            3: (raw >> np.uint64(32)).astype(np.uint32),
        }
    destination = "v[4:5]" if want.dtype.itemsize == 8 else "v4"
    m = execute(
        f"v_cvt_{name} {destination}, {'v[2:3]' if x.dtype.itemsize == 8 else 'v1'}", target, registers
    )
    got = vector(m, 4).astype(np.uint64)
    if want.dtype.itemsize == 8:
        got |= vector(m, 5).astype(np.uint64) << np.uint64(32)
    assert got.tolist() == want.view(words[want.dtype.itemsize]).tolist()
