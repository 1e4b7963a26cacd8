"""Scalar and vector arithmetic against Python integers, exact fractions and NumPy."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from gcn_helpers import both_targets, execute, interesting_floats, scalar, scalar64, vector

pytestmark = pytest.mark.amd
M32 = 0xFFFFFFFF


def signed(x: int, width: int = 32) -> int:
    x &= (1 << width) - 1
    return x - (1 << width) if x >> (width - 1) else x


RNG = np.random.default_rng(5)
A, B, C = (RNG.integers(0, 2**32, 64, dtype=np.uint32) for _ in range(3))
A[:4], B[:4] = [0, M32, 0x80000000, 1], [M32, M32, 0x80000000, 0]
Q = RNG.integers(0, 2**64, 64, dtype=np.uint64)


def perm(a: int, b: int, c: int) -> int:
    pool = list(b.to_bytes(4, "little") + a.to_bytes(4, "little"))
    out = []
    for code in c.to_bytes(4, "little"):
        if code < 8:
            out.append(pool[code])
        elif code < 12:
            sign_of = (1, 3, 5, 7)[code - 8]
            out.append(0xFF if pool[sign_of] & 0x80 else 0)
        else:
            out.append(0 if code == 12 else 0xFF)
    return int.from_bytes(bytes(out), "little")


def truth(table: int, a: int, b: int, c: int) -> int:
    return sum((table >> ((a >> i & 1) * 4 + (b >> i & 1) * 2 + (c >> i & 1)) & 1) << i for i in range(32))


# instruction -> result of Python integers a (v1), b (v2), c (v3)
INTEGER = {
    "v_add_u32_e32 v0, v1, v2": lambda a, b, c: a + b,
    "v_sub_u32_e32 v0, v1, v2": lambda a, b, c: a - b,
    "v_subrev_u32_e32 v0, v1, v2": lambda a, b, c: b - a,
    "v_sub_u32_e64 v0, v1, v2 clamp": lambda a, b, c: max(a - b, 0),
    "v_add_u32_e64 v0, v1, v2 clamp": lambda a, b, c: min(a + b, M32),
    "v_add3_u32 v0, v1, v2, v3": lambda a, b, c: a + b + c,
    "v_xad_u32 v0, v1, v2, v3": lambda a, b, c: (a ^ b) + c,
    "v_mul_lo_u32 v0, v1, v2": lambda a, b, c: a * b,
    "v_mul_hi_u32 v0, v1, v2": lambda a, b, c: a * b >> 32,
    "v_mul_hi_i32 v0, v1, v2": lambda a, b, c: signed(a) * signed(b) >> 32,
    "v_mul_u32_u24_e32 v0, v1, v2": lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF),
    "v_mad_u32_u24 v0, v1, v2, v3": lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c,
    "v_mul_i32_i24_e32 v0, v1, v2": lambda a, b, c: signed(a, 24) * signed(b, 24),
    "v_and_b32_e32 v0, v1, v2": lambda a, b, c: a & b,
    "v_or_b32_e32 v0, 5, v2": lambda a, b, c: 5 | b,
    "v_xor_b32_e32 v0, 0xfffffff0, v2": lambda a, b, c: 0xFFFFFFF0 ^ b,
    "v_not_b32_e32 v0, v1": lambda a, b, c: ~a,
    "v_and_or_b32 v0, v1, v2, v3": lambda a, b, c: a & b | c,
    "v_or3_b32 v0, v1, v2, v3": lambda a, b, c: a | b | c,
    "v_bfi_b32 v0, v1, v2, v3": lambda a, b, c: a & b | ~a & c,
    "v_lshlrev_b32_e32 v0, v1, v2": lambda a, b, c: b << (a & 31),
    "v_lshrrev_b32_e32 v0, v1, v2": lambda a, b, c: b >> (a & 31),
    "v_ashrrev_i32_e32 v0, v1, v2": lambda a, b, c: signed(b) >> (a & 31),
    "v_lshl_add_u32 v0, v1, v2, v3": lambda a, b, c: (a << (b & 31)) + c,
    "v_add_lshl_u32 v0, v1, v2, v3": lambda a, b, c: ((a + b) & M32) << (c & 31),
    "v_lshl_or_b32 v0, v1, v2, v3": lambda a, b, c: (a << (b & 31)) & M32 | c,
    "v_alignbit_b32 v0, v1, v2, v3": lambda a, b, c: (a << 32 | b) >> (c & 31),
    "v_alignbyte_b32 v0, v1, v2, v3": lambda a, b, c: (a << 32 | b) >> 8 * (c & 3),
    "v_bfe_u32 v0, v1, v2, v3": lambda a, b, c: a >> (b & 31) & ((1 << (c & 31)) - 1),
    "v_bfe_u32 v0, v1, 7, 9": lambda a, b, c: a >> 7 & 0x1FF,
    "v_bfe_i32 v0, v1, 7, 9": lambda a, b, c: signed(a >> 7, 9),
    "v_bfrev_b32_e32 v0, v1": lambda a, b, c: int(f"{a:032b}"[::-1], 2),
    "v_bfrev_b32_e32 v0, 1": lambda a, b, c: 0x80000000,
    "v_ffbh_u32_e32 v0, v1": lambda a, b, c: 32 - a.bit_length() if a else -1,
    "v_ffbl_b32_e32 v0, v1": lambda a, b, c: (a & -a).bit_length() - 1 if a else -1,
    "v_bcnt_u32_b32 v0, v1, v2": lambda a, b, c: a.bit_count() + b,
    "v_perm_b32 v0, v1, v2, v3": perm,
    "v_min_i32_e32 v0, v1, v2": lambda a, b, c: min(signed(a), signed(b)),
    "v_max_u32_e32 v0, v1, v2": lambda a, b, c: max(a, b),
    "v_max3_i32 v0, v1, v2, v3": lambda a, b, c: max(map(signed, (a, b, c))),
    "v_med3_u32 v0, v1, v2, v3": lambda a, b, c: sorted((a, b, c))[1],
    "v_sad_u32 v0, v1, v2, v3": lambda a, b, c: abs(a - b) + c,
    "v_add_u16_e32 v0, v1, v2": lambda a, b, c: a + b & 0xFFFF,
    "v_lshlrev_b16_e32 v0, 8, v2": lambda a, b, c: b << 8 & 0xFFFF,
    "v_lshrrev_b16_e32 v0, 8, v2": lambda a, b, c: (b & 0xFFFF) >> 8,
    "v_max_u16_e32 v0, v1, v2": lambda a, b, c: max(a & 0xFFFF, b & 0xFFFF),
    "v_pk_lshlrev_b16 v0, 8, v2 op_sel_hi:[0,1]": lambda a, b, c: (b << 8) & 0xFF00FF00,
    "v_pk_sub_u16 v0, v1, 15 clamp": lambda a, b, c: max((a & 0xFFFF) - 15, 0) | (a & 0xFFFF0000),
    "v_pk_add_u16 v0, v1, -1": lambda a, b, c: ((a - 1) & 0xFFFF) | (((a >> 16) - 1) & 0xFFFF) << 16,
    "v_pk_max_u16 v0, v1, v2": lambda a, b, c: max(a & 0xFFFF, b & 0xFFFF) | max(a >> 16, b >> 16) << 16,
    "v_pk_add_u16 v0, v1, v2 op_sel:[1,0] op_sel_hi:[0,1]": lambda a, b, c: (
        ((a >> 16) + b & 0xFFFF) | (((a & 0xFFFF) + (b >> 16)) & 0xFFFF) << 16
    ),
    "v_mov_b32_e32 v0, 0xc0de": lambda a, b, c: 0xC0DE,
    "v_mov_b32_e32 v0, -3": lambda a, b, c: -3,
    "v_mov_b32_e32 v0, 0.5": lambda a, b, c: 0x3F000000,
    "v_accvgpr_write_b32 a3, v1\n v_accvgpr_read_b32 v0, a3": lambda a, b, c: a,
}


@both_targets
@pytest.mark.parametrize("text", INTEGER)
def test_integer(text: str, target: str) -> None:
    m = execute(text, target, {1: A, 2: B, 3: C})
    expected = [INTEGER[text](int(a), int(b), int(c)) & M32 for a, b, c in zip(A, B, C, strict=True)]
    assert vector(m, 0).tolist() == expected


@pytest.mark.parametrize("table", [0x6C, 0x36, 0xE8, 0x01, 0x80, 0xFE])
def test_bitop3(table: int) -> None:
    m = execute(f"v_bitop3_b32 v0, v1, v2, v3 bitop3:{table:#x}", "gfx950", {1: A, 2: B, 3: C})
    assert vector(m, 0).tolist() == [
        truth(table, int(a), int(b), int(c)) for a, b, c in zip(A, B, C, strict=True)
    ]


WIDE = {
    "v_lshlrev_b64 v[4:5], v1, v[2:3]": lambda n, q, a: q << (n & 63),
    "v_lshrrev_b64 v[4:5], v1, v[2:3]": lambda n, q, a: q >> (n & 63),
    "v_ashrrev_i64 v[4:5], v1, v[2:3]": lambda n, q, a: signed(q, 64) >> (n & 63),
    "v_lshl_add_u64 v[4:5], v[2:3], 3, v[2:3]": lambda n, q, a: (q << 3) + q,
    "v_mov_b64_e32 v[4:5], v[2:3]": lambda n, q, a: q,
    "v_mov_b64_e32 v[4:5], -2": lambda n, q, a: -2,
    "v_mad_u64_u32 v[4:5], s[0:1], v1, v6, v[2:3]": lambda n, q, a: n * a + q,
    "v_mad_i64_i32 v[4:5], s[0:1], v1, v6, v[2:3]": lambda n, q, a: signed(n) * signed(a) + q,
}


@both_targets
@pytest.mark.parametrize("text", WIDE)
def test_64_bit(text: str, target: str) -> None:
    low, high = (Q & np.uint64(M32)).astype(np.uint32), (Q >> np.uint64(32)).astype(np.uint32)
    m = execute(text, target, {1: A, 2: low, 3: high, 6: B})
    got = [int(x) | int(y) << 32 for x, y in zip(vector(m, 4), vector(m, 5), strict=True)]
    assert got == [WIDE[text](int(n), int(q), int(a)) & (2**64 - 1) for n, q, a in zip(A, Q, B, strict=True)]


@both_targets
def test_carry_chain(target: str) -> None:
    text = "v_add_co_u32_e32 v0, vcc, v1, v2\nv_addc_co_u32_e32 v5, vcc, v3, v3, vcc"
    m = execute(text, target, {1: A, 2: B, 3: C})
    total = [int(a) + int(b) + (2 * int(c) << 32) for a, b, c in zip(A, B, C, strict=True)]
    assert [int(x) | int(y) << 32 for x, y in zip(vector(m, 0), vector(m, 5))] == [
        t & (2**64 - 1) for t in total
    ]
    assert scalar64(m, 106) == sum((t >> 64) << i for i, t in enumerate(total))


# --- floats
def nearest(x: Fraction) -> np.float32:
    """float32 nearest to an exact value, by comparison of neighbours: independent of the executor's arithmetic."""
    with np.errstate(over="ignore"):
        guess = np.float32(float(x)) if abs(x) < 2**200 else np.float32(math.inf if x > 0 else -math.inf)
    if not np.isfinite(guess):
        return guess
    candidates = [guess, np.nextafter(guess, np.float32(-np.inf)), np.nextafter(guess, np.float32(np.inf))]
    candidates = [c for c in candidates if np.isfinite(c)]
    best = min(candidates, key=lambda c: (abs(Fraction(float(c)) - x), int(c.view(np.uint32)) & 1))
    limit = Fraction(float(np.finfo(np.float32).max)) + Fraction(2) ** 103
    return np.float32(math.copysign(math.inf, x)) if abs(x) >= limit else best


def same(got: np.ndarray, want: np.ndarray) -> None:
    both_nan = np.isnan(got) & np.isnan(want)
    equal = (got.view(np.uint32) == want.view(np.uint32)) | both_nan
    assert equal.all(), (got[~equal][:4], want[~equal][:4])


@both_targets
@pytest.mark.parametrize("name", ["v_fma_f32", "v_fmac_f32_e32", "v_pk_fma_f32"])
def test_fma_rounds_once(name: str, target: str) -> None:
    rng = np.random.default_rng(1)
    a, b = (np.ldexp(rng.uniform(1, 2, 64), rng.integers(-60, 60, 64)).astype(np.float32) for _ in range(2))
    # Addends close to the product, and ties: -a*b rounded, so that the exact remainder must come out.
    c = -(a.astype(np.float64) * b).astype(np.float32)
    c[::3] *= np.float32(2.0**-24)
    c[::5] = np.ldexp(rng.uniform(1, 2, c[::5].size), -148).astype(np.float32)
    forms = {
        "v_fma_f32": "v_fma_f32 v0, v1, v2, v3",
        "v_fmac_f32_e32": "v_mov_b32_e32 v0, v3\nv_fmac_f32_e32 v0, v1, v2",
        "v_pk_fma_f32": "v_pk_fma_f32 v[8:9], v[4:5], v[6:7], v[10:11]\nv_mov_b32_e32 v0, v9",
    }
    m = execute(forms[name], target, {1: a, 2: b, 3: c, 4: b, 5: a, 6: a, 7: b, 10: a, 11: c})
    exact = [Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)) for x, y, z in zip(a, b, c)]
    same(vector(m, 0, np.float32), np.array([nearest(e) for e in exact], np.float32))


@both_targets
@pytest.mark.parametrize("ulps", [0, 1, -1])
def test_division_sequence(target: str, ulps: int) -> None:
    """The instruction sequence LLVM emits for IEEE division, on values whose quotients leave the normal range. The
    result must not depend on the last bit of v_rcp, which hardware does not round correctly."""
    sequence = f"""
    v_div_scale_f32 v2, s[0:1], v1, v1, v0
    v_rcp_f32_e32 v3, v2
    v_add_u32_e32 v3, {ulps}, v3
    v_div_scale_f32 v4, vcc, v0, v1, v0
    v_fma_f32 v5, -v2, v3, 1.0
    v_fmac_f32_e32 v3, v5, v3
    v_mul_f32_e32 v5, v4, v3
    v_fma_f32 v6, -v2, v5, v4
    v_fmac_f32_e32 v5, v6, v3
    v_fma_f32 v2, -v2, v5, v4
    v_div_fmas_f32 v2, v2, v3, v5
    v_div_fixup_f32 v7, v2, v1, v0
    """
    rng = np.random.default_rng(2)
    for _ in range(100):
        n, d = interesting_floats(rng), interesting_floats(rng)
        m = execute(sequence, target, {0: n, 1: d})
        with np.errstate(all="ignore"):
            same(vector(m, 7, np.float32), n / d)


FLOAT = {
    "v_add_f32_e32 v0, v1, v2": lambda a, b, c: a + b,
    "v_sub_f32_e64 v0, -v1, |v2|": lambda a, b, c: -a - np.abs(b),
    "v_subrev_f32_e32 v0, v1, v2": lambda a, b, c: b - a,
    "v_mul_f32_e32 v0, v1, v2": lambda a, b, c: a * b,
    "v_mul_f32_e64 v0, v1, -2.0 mul:2": lambda a, b, c: a * np.float32(-2) * np.float32(2),
    "v_max_f32_e32 v0, v1, v2": lambda a, b, c: np.where(
        (a == 0) & (b == 0),
        np.where(np.signbit(a) & np.signbit(b), np.float32(-0.0), np.float32(0)),
        np.fmax(a, b),
    ),
    "v_min_f32_e64 v0, |v1|, v2": lambda a, b, c: np.where(
        (a == 0) & (b == 0), np.where(np.signbit(b), np.float32(-0.0), np.float32(0)), np.fmin(np.abs(a), b)
    ),
    "v_max3_f32 v0, v1, |v2|, v3": lambda a, b, c: np.fmax(np.fmax(a, np.abs(b)), c),
    "v_med3_f32 v0, v1, s1, v4": lambda a, b, c: np.where(
        np.isnan(a), np.float32(-448), np.clip(a, -448, 448)
    ),
    "v_cndmask_b32_e64 v0, -v1, |v2|, s[2:3]": lambda a, b, c: np.where(np.arange(64) % 2, np.abs(b), -a),
    "v_floor_f32_e32 v0, v1": lambda a, b, c: np.floor(a),
    "v_rndne_f32_e32 v0, v1": lambda a, b, c: np.rint(a),
    "v_ldexp_f32 v0, v1, 5": lambda a, b, c: np.ldexp(a, 5),
    "v_mul_f32_e64 v0, v1, v2 clamp": lambda a, b, c: np.where(
        np.isnan(a * b), np.float32(0), np.clip(a * b, np.float32(0), np.float32(1))
    ),
}


@both_targets
@pytest.mark.parametrize("text", FLOAT)
def test_float(text: str, target: str) -> None:
    rng = np.random.default_rng(7)
    a, b = interesting_floats(rng), interesting_floats(rng)
    c = rng.standard_normal(64).astype(np.float32)
    lanes = 0xAAAAAAAAAAAAAAAA
    s = {1: 0xC3E00000, 2: lanes & M32, 3: lanes >> 32}
    m = execute(text, target, {1: a, 2: b, 3: c, 4: np.float32(448)}, s)
    with np.errstate(all="ignore"):
        same(vector(m, 0, np.float32), FLOAT[text](a, b, c).astype(np.float32))


@pytest.mark.parametrize(("name", "ufunc"), [("maximum", np.maximum), ("minimum", np.minimum)])
def test_maximum_and_minimum_keep_a_nan(name: str, ufunc: np.ufunc) -> None:
    rng = np.random.default_rng(8)
    a, b = interesting_floats(rng), interesting_floats(rng)
    got = vector(execute(f"v_{name}3_f32 v0, v1, -v2, v1", "gfx950", {1: a, 2: b}), 0, np.float32)
    want = ufunc(a, -b)
    assert np.isnan(want).any()
    np.testing.assert_array_equal(got, want)  # equal, NaN in the same places
    zeros = {1: np.float32(0), 2: np.float32(-0.0)}
    for order in ("v1, v2, v1", "v2, v1, v2"):
        zero = vector(execute(f"v_{name}3_f32 v0, {order}", "gfx950", zeros), 0, np.float32)
        assert (np.signbit(zero) == (name == "minimum")).all()


@both_targets
@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("rcp", lambda x: 1 / x),
        ("rsq", lambda x: 1 / np.sqrt(x)),
        ("sqrt", np.sqrt),
        ("exp", np.exp2),
        ("log", np.log2),
    ],
)
def test_transcendental_is_within_an_ulp(name: str, function: object, target: str) -> None:
    x = np.linspace(0.01, 30, 64).astype(np.float32)
    got = vector(execute(f"v_{name}_f32_e32 v0, v1", target, {1: x}), 0, np.float32)
    np.testing.assert_array_max_ulp(got, function(x.astype(np.float64)).astype(np.float32), 1)  # type: ignore[operator]


@both_targets
def test_packed_float_selects_halves(target: str) -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((4, 64)).astype(np.float32)
    registers = {2: x[0], 3: x[1], 4: x[2], 5: x[3]}
    m = execute("v_pk_mul_f32 v[0:1], v[2:3], v[4:5] op_sel_hi:[0,1]", target, registers)
    same(vector(m, 0, np.float32), x[0] * x[2])
    same(vector(m, 1, np.float32), x[0] * x[3])
    m = execute("v_pk_add_f32 v[0:1], v[2:3], v[4:5] op_sel:[1,0] neg_lo:[0,1]", target, registers)
    same(vector(m, 0, np.float32), x[1] - x[2])
    same(vector(m, 1, np.float32), x[1] + x[3])


@both_targets
def test_fma_mix(target: str) -> None:
    rng = np.random.default_rng(4)
    a, c = rng.standard_normal((2, 64)).astype(np.float32)
    halves = rng.standard_normal((64, 2)).astype(np.float16)
    packed = np.ascontiguousarray(halves).view(np.uint32)[:, 0]
    m = execute(
        "v_fma_mix_f32 v0, v1, v2, -v3 op_sel:[0,1,0] op_sel_hi:[0,1,0]", target, {1: a, 2: packed, 3: c}
    )
    exact = [
        Fraction(float(x)) * Fraction(float(h)) - Fraction(float(z)) for x, h, z in zip(a, halves[:, 1], c)
    ]
    same(vector(m, 0, np.float32), np.array([nearest(e) for e in exact], np.float32))


# --- compares
@both_targets
@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("v_cmp_gt_i32_e32 vcc, v1, v2", lambda a, b: signed(a) > signed(b)),
        ("v_cmp_lt_u32_e32 vcc, v1, v2", lambda a, b: a < b),
        ("v_cmp_ne_u32_e64 vcc, v1, 5", lambda a, b: a != 5),
        ("v_cmp_eq_u16_e32 vcc, v1, v2", lambda a, b: a & 0xFFFF == b & 0xFFFF),
        ("v_cmp_le_i16_e32 vcc, v1, v2", lambda a, b: signed(a, 16) <= signed(b, 16)),
    ],
)
def test_integer_compare_clears_inactive_lanes(text: str, holds: object, target: str) -> None:
    active = 0xFFFF0000FFFF00FF
    m = execute(text, target, {1: A, 2: B}, exec_mask=active, vcc=2**64 - 1)
    want = sum(
        1 << i
        for i in range(64)
        if active >> i & 1 and holds(int(A[i]), int(B[i]))  # type: ignore[operator]
    )
    assert scalar64(m, 106) == want


@both_targets
@pytest.mark.parametrize(
    "predicate", ["lt", "eq", "le", "gt", "lg", "ge", "o", "u", "nge", "nlg", "ngt", "nle", "neq", "nlt"]
)
def test_float_compare(predicate: str, target: str) -> None:
    def holds(a: float, b: float) -> bool:
        unordered = math.isnan(a) or math.isnan(b)
        ordered = {
            "lt": a < b,
            "eq": a == b,
            "le": a <= b,
            "gt": a > b,
            "lg": a != b and not unordered,
            "ge": a >= b,
            "o": not unordered,
        }
        if predicate in ordered:
            return ordered[predicate]
        return (
            unordered
            if predicate == "u"
            else not ordered[predicate.removeprefix("n") if predicate != "neq" else "eq"]
        )

    rng = np.random.default_rng(9)
    a, b = interesting_floats(rng), interesting_floats(rng)
    b[:16] = a[:16]
    m = execute(f"v_cmp_{predicate}_f32_e64 s[4:5], v1, v2", target, {1: a, 2: b})
    assert scalar64(m, 4) == sum(1 << i for i in range(64) if holds(float(a[i]), float(b[i])))


@both_targets
def test_classify(target: str) -> None:
    x = np.array([np.nan, -np.inf, -1, -1e-40, -0.0, 0.0, 1e-40, 1, np.inf] + [1] * 55, np.float32)
    for bit, lane in ((2, 1), (3, 2), (4, 3), (5, 4), (6, 5), (7, 6), (9, 8)):
        assert (
            scalar64(execute(f"v_cmp_class_f32_e64 s[4:5], v1, {1 << bit:#x}", target, {1: x}), 4)
            == 1 << lane
        )
    assert scalar64(execute("v_cmp_class_f32_e64 s[4:5], v1, 3", target, {1: x}), 4) == 1


@both_targets
def test_denormals_follow_mode(target: str) -> None:
    x = np.float32(1e-40)
    keep = execute("v_add_f32_e32 v0, v1, v1", target, {1: x})
    drop = execute("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 0\nv_add_f32_e32 v0, v1, v1", target, {1: x})
    assert vector(keep, 0, np.float32)[0] == x + x
    assert vector(drop, 0, np.float32)[0] == 0


# --- scalar
SCALAR = [
    ("s_add_u32 s0, s1, s2", lambda a, b: a + b, lambda a, b: a + b > M32),
    ("s_sub_u32 s0, s1, s2", lambda a, b: a - b, lambda a, b: b > a),
    ("s_add_i32 s0, s1, s2", lambda a, b: a + b, lambda a, b: not -(2**31) <= signed(a) + signed(b) < 2**31),
    ("s_mul_i32 s0, s1, s2", lambda a, b: a * b, None),
    ("s_mul_hi_u32 s0, s1, s2", lambda a, b: a * b >> 32, None),
    ("s_and_b32 s0, s1, s2", lambda a, b: a & b, lambda a, b: a & b != 0),
    ("s_andn2_b32 s0, s1, s2", lambda a, b: a & ~b, lambda a, b: a & ~b != 0),
    ("s_lshl_b32 s0, s1, s2", lambda a, b: a << (b & 31), lambda a, b: a << (b & 31) & M32 != 0),
    ("s_ashr_i32 s0, s1, s2", lambda a, b: signed(a) >> (b & 31), lambda a, b: signed(a) >> (b & 31) != 0),
    ("s_lshl2_add_u32 s0, s1, s2", lambda a, b: (a << 2) + b, lambda a, b: (a << 2) + b > M32),
    ("s_bfe_u32 s0, s1, 0x80010", lambda a, b: a >> 16 & 0xFF, lambda a, b: a >> 16 & 0xFF != 0),
    ("s_bfe_i32 s0, s1, 0x80010", lambda a, b: signed(a >> 16, 8), lambda a, b: a >> 16 & 0xFF != 0),
    ("s_max_i32 s0, s1, s2", lambda a, b: max(signed(a), signed(b)), lambda a, b: signed(a) > signed(b)),
    ("s_min_u32 s0, s1, s2", lambda a, b: min(a, b), lambda a, b: a < b),
    (
        "s_addk_i32 s1, 0x8000\ns_mov_b32 s0, s1",
        lambda a, b: a - 0x8000,
        lambda a, b: signed(a) - 0x8000 < -(2**31),
    ),
    ("s_movk_i32 s0, 0xff80", lambda a, b: -128, None),
    ("s_brev_b32 s0, s1", lambda a, b: int(f"{a:032b}"[::-1], 2), None),
    ("s_bcnt1_i32_b32 s0, s1", lambda a, b: a.bit_count(), lambda a, b: a != 0),
    ("s_ff1_i32_b32 s0, s1", lambda a, b: (a & -a).bit_length() - 1 if a else -1, None),
    ("s_flbit_i32_b32 s0, s1", lambda a, b: 32 - a.bit_length() if a else -1, None),
    ("s_pack_ll_b32_b16 s0, s1, s2", lambda a, b: a & 0xFFFF | b << 16, None),
]


@pytest.mark.parametrize(("text", "value", "flag"), SCALAR, ids=[x[0].split()[0] for x in SCALAR])
def test_scalar(text: str, value: object, flag: object) -> None:
    for a, b in [
        (0, 0),
        (M32, 1),
        (0x80000000, 0x7FFFFFFF),
        (0x12345678, 0x9ABCDEF0),
        (5, 37),
        (0x80000010, M32),
    ]:
        m = execute(text, "gfx942", s={1: a, 2: b})
        assert scalar(m, 0) == value(a, b) & M32, (a, b)  # type: ignore[operator]
        if flag is not None:
            assert bool(m.scc[0]) == flag(a, b), (a, b)  # type: ignore[operator]


def test_scalar_carry_select_and_64_bit() -> None:
    m = execute("s_add_u32 s0, s2, s4\ns_addc_u32 s1, s3, s5", "gfx950", s={2: M32, 3: 1, 4: 2, 5: 3})
    assert scalar64(m, 0) == (M32 | 1 << 32) + (2 | 3 << 32)
    m = execute(
        "s_cmp_lt_i32 s0, 0\ns_cselect_b32 s1, 7, -1\ns_cselect_b64 s[2:3], -1, 0", "gfx942", s={0: M32}
    )
    assert scalar(m, 1) == 7
    assert scalar64(m, 2) == 2**64 - 1
    m = execute("s_lshl_b64 s[0:1], s[2:3], 4", "gfx942", s={2: 0xF0000001, 3: 2})
    assert scalar64(m, 0) == 0x2F0000001 << 4


def test_saveexec_and_masked_write() -> None:
    text = "s_and_saveexec_b64 s[0:1], vcc\nv_mov_b32_e32 v0, 1\ns_or_b64 exec, exec, s[0:1]"
    m = execute(text, "gfx942", {0: np.zeros(64, np.uint32)}, vcc=0xF0F0)
    assert vector(m, 0).tolist() == [0xF0F0 >> i & 1 for i in range(64)]
    assert scalar64(m, 126) == 2**64 - 1


def test_branches_and_loop() -> None:
    text = """
    s_mov_b32 s0, 0
    s_mov_b32 s1, 0
    again:
    s_add_i32 s1, s1, s0
    s_add_i32 s0, s0, 1
    s_cmp_lt_i32 s0, 10
    s_cbranch_scc1 again
    """
    assert scalar(execute(text, "gfx942"), 1) == 45
