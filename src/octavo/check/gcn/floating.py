"""Floating-point arithmetic and compares of the vector ALU.

Results are rounded to nearest even. fma rounds once: the float64 product of two float32 values is exact, and the
sum is rounded to odd before the final rounding. Reciprocal, square roots, exponential and logarithm are computed
correctly rounded and flush subnormals, as the ISA documents say they may; the hardware's last bit can differ.
NaN payloads are not modelled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .asm import VCC, Instruction
from .operands import flush
from .state import Machine
from .table import Run, Signature, build_valu, instruction, valu

_F = np.float32
_INF = _F(np.inf)


def round_to_odd_sum(p: Any, c: Any) -> Any:
    """p + c in float64, rounded to odd, so that a later rounding to fewer bits is the correct single rounding."""
    s = p + c
    # Two-sum (Knuth): `error` is exactly what the rounding of s lost.
    back = s - p
    error = (p - (s - back)) + (c - back)
    odd = (np.asarray(s).view(np.int64) & 1).astype(bool)
    fix = (error != 0) & ~odd & np.isfinite(s)
    return np.where(fix, np.nextafter(s, np.where(error > 0, np.inf, -np.inf)), s)


def fma32(a: Any, b: Any, c: Any) -> Any:
    """float32 a * b + c with one rounding."""
    return round_to_odd_sum(np.asarray(a, np.float64) * b, np.asarray(c, np.float64)).astype(_F)


def fma16(a: Any, b: Any, c: Any) -> Any:
    """float16 fma: product and sum are exact in float64."""
    return (np.asarray(a, np.float64) * b + c).astype(np.float16)


def maximum(a: Any, b: Any) -> Any:
    """maxNum of IEEE 754-2008: the number when one operand is NaN, and +0 above -0."""
    larger = np.where(np.isnan(a) | (b > a), b, a)
    return np.where((a == 0) & (b == 0) & np.signbit(larger), b, larger)


def minimum(a: Any, b: Any) -> Any:
    """minNum of IEEE 754-2008."""
    smaller = np.where(np.isnan(a) | (b < a), b, a)
    return np.where((a == 0) & (b == 0) & ~np.signbit(smaller), b, smaller)


def _or_nan(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` of three operands, NaN where one of them is."""
    return lambda a, b, c: np.where(
        np.isnan(a) | np.isnan(b) | np.isnan(c), np.float32(np.nan), function(a, b, c)
    )


def median(a: Any, b: Any, c: Any) -> Any:
    """v_med3: the middle value; with a NaN operand, the least of the three (CDNA3 ISA, V_MED3_F32)."""
    middle = maximum(minimum(a, b), minimum(maximum(a, b), c))
    any_nan = np.isnan(a) | np.isnan(b) | np.isnan(c)
    return np.where(any_nan, minimum(minimum(a, b), c), middle)


def _transcendental(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: flush(function(flush(x).astype(np.float64)).astype(_F))


def _log2(x: Any) -> Any:
    return np.where(x < 0, np.nan, np.log2(np.abs(x)))


for _name, _function in {
    "v_rcp_f32": lambda x: 1.0 / x,
    "v_rcp_iflag_f32": lambda x: 1.0 / x,
    "v_rsq_f32": lambda x: 1.0 / np.sqrt(x),
    "v_sqrt_f32": np.sqrt,
    "v_exp_f32": np.exp2,
    "v_log_f32": _log2,
    "v_sin_f32": lambda x: np.sin(2 * np.pi * x),
    "v_cos_f32": lambda x: np.cos(2 * np.pi * x),
}.items():
    valu(_name, "f32", "f32", _transcendental(_function))

for _t in ("f32", "f16", "f64"):
    valu(f"v_add_{_t}", _t, f"{_t} {_t}", lambda a, b: a + b)
    valu(f"v_mul_{_t}", _t, f"{_t} {_t}", lambda a, b: a * b)
    for _k, _f in (("max", maximum), ("min", minimum)):
        valu(f"v_{_k}_{_t}", _t, f"{_t} {_t}", _f)
for _t in ("f32", "f16"):
    valu(f"v_sub_{_t}", _t, f"{_t} {_t}", lambda a, b: a - b)
    valu(f"v_subrev_{_t}", _t, f"{_t} {_t}", lambda a, b: b - a)
    for _k, _f in (("max", maximum), ("min", minimum)):
        valu(f"v_{_k}3_{_t}", _t, f"{_t} {_t} {_t}", lambda a, b, c, f=_f: f(f(a, b), c))
    valu(f"v_med3_{_t}", _t, f"{_t} {_t} {_t}", median)

# IEEE 754-2019's maximum and minimum, which keep a NaN (CDNA4 ISA, V_MAXIMUM3_F32 and V_MINIMUM3_F32).
for _k, _f in (("maximum", maximum), ("minimum", minimum)):
    valu(
        f"v_{_k}3_f32",
        "f32",
        "f32 f32 f32",
        _or_nan(lambda a, b, c, f=_f: f(f(a, b), c)),
        targets=("gfx950",),
    )

for _t, _fma in (("f32", fma32), ("f16", fma16)):
    valu(f"v_fma_{_t}", _t, f"{_t} {_t} {_t}", _fma)
    valu(f"v_fmac_{_t}", _t, f"{_t} {_t} {_t}", _fma, accumulate=True)
    for _op, _g in (("rndne", np.rint), ("floor", np.floor), ("ceil", np.ceil), ("trunc", np.trunc)):
        valu(f"v_{_op}_{_t}", _t, _t, _g)
    valu(f"v_fract_{_t}", _t, _t, lambda x: x - np.floor(x))


@instruction("v_fmamk_f32 v_madmk_f32")
def _fma_multiply_constant(ins: Instruction) -> Run:
    return build_valu(
        ins, Signature(("f32",), ("f32", "f32", "f32")), fma32
    )  # d = a * K + c, operands in that order


@instruction("v_fmaak_f32 v_madak_f32")
def _fma_add_constant(ins: Instruction) -> Run:
    return build_valu(ins, Signature(("f32",), ("f32", "f32", "f32")), fma32)  # d = a * b + K


def _ldexp(x: Any, n: Any) -> Any:
    return np.ldexp(np.asarray(x, np.float64), np.clip(n, -600, 600)).astype(_F)


valu("v_ldexp_f32", "f32", "f32 i32", _ldexp)
valu("v_frexp_mant_f32", "f32", "f32", lambda x: np.where(np.isfinite(x), np.frexp(x)[0], x))
valu(
    "v_frexp_exp_i32_f32",
    "i32",
    "f32",
    lambda x: np.where(np.isfinite(x), np.frexp(x)[1], 0).astype(np.int32),
)
valu("v_mul_legacy_f32", "f32", "f32 f32", lambda a, b: np.where((a == 0) | (b == 0), _F(0), a * b))


# --- division (CDNA3 ISA: V_DIV_SCALE_F32, V_DIV_FMAS_F32, V_DIV_FIXUP_F32)
def _exponent(x: Any) -> Any:
    return ((np.asarray(x).view(np.uint32) >> np.uint32(23)) & np.uint32(255)).astype(np.int32)


def _subnormal(x: Any) -> Any:
    return (x != 0) & (np.abs(x) < 2.0**-126)


def _div_scale(value: Any, denominator: Any, numerator: Any) -> Any:
    """Scale operands whose quotient or reciprocal would leave the normal range; VCC asks v_div_fmas to undo it."""
    value, d, n = np.broadcast_arrays(value, denominator, numerator)
    wide_d, wide_n = d.astype(np.float64), n.astype(np.float64)
    gap = _exponent(n) - _exponent(d)
    is_d, is_n = value == d, value == n
    reciprocal_tiny, quotient_tiny = _subnormal(1.0 / wide_d), _subnormal(wide_n / wide_d)
    up, down, keep = 64, -64, 0
    cases = [
        (gap >= 96, np.where(is_d, up, keep), True),
        (_subnormal(wide_d), np.full(d.shape, up), False),
        (reciprocal_tiny & quotient_tiny, np.where(is_d, down, keep), True),
        (reciprocal_tiny, np.full(d.shape, down), False),
        (quotient_tiny, np.where(is_n, up, keep), True),
        (_exponent(n) <= 23, np.full(d.shape, up), False),
    ]
    conditions = [c for c, _, _ in cases]
    shift = np.select(conditions, [s for _, s, _ in cases], keep)
    flag = np.select(conditions, [np.full(d.shape, f) for _, _, f in cases], False)
    scaled = np.ldexp(value.astype(np.float64), shift).astype(_F)
    zero = (wide_d == 0) | (wide_n == 0)
    return np.where(zero, _F(np.nan), scaled), flag & ~zero


valu("v_div_scale_f32", "f32 mask", "f32 f32 f32", _div_scale)


@instruction("v_div_fmas_f32")
def _div_fmas(ins: Instruction) -> Run:
    """fma, times 2^64 or 2^-64 in lanes that v_div_scale marked in VCC, rounded once."""

    def run_for(m: Machine) -> Callable[..., Any]:
        scaled = m.mask(VCC)

        def function(a: Any, b: Any, c: Any) -> Any:
            total = round_to_odd_sum(np.asarray(a, np.float64) * b, np.asarray(c, np.float64))
            shift = np.where(scaled, np.where(_exponent(c) > 127, 64, -64), 0)
            return np.ldexp(total, shift).astype(_F)

        return function

    current: list[Callable[..., Any]] = []
    inner = build_valu(ins, Signature(("f32",), ("f32", "f32", "f32")), lambda a, b, c: current[0](a, b, c))

    def run(m: Machine) -> None:
        current[:] = [run_for(m)]
        inner(m)

    return run


def _div_fixup(quotient: Any, denominator: Any, numerator: Any) -> Any:
    q, d, n = np.broadcast_arrays(quotient, denominator, numerator)
    sign = np.where(np.signbit(d) ^ np.signbit(n), _F(-1), _F(1))
    gap = _exponent(n) - _exponent(d)
    nan = np.isnan(n) | np.isnan(d) | ((d == 0) & (n == 0)) | (np.isinf(d) & np.isinf(n))
    return np.select(
        [nan, (d == 0) | np.isinf(n), np.isinf(d) | (n == 0), gap < -150, np.isnan(q)],
        [_F(np.nan), sign * _INF, sign * _F(0), sign * _F(0), sign * _INF],
        sign * np.abs(q),
    ).astype(_F)


valu("v_div_fixup_f32", "f32", "f32 f32 f32", _div_fixup)


# --- compares: every predicate of every type, to a lane mask
_FLOAT_PREDICATES: dict[str, Callable[[Any, Any], Any]] = {
    "lt": np.less,
    "eq": np.equal,
    "le": np.less_equal,
    "gt": np.greater,
    "lg": lambda a, b: (a < b) | (a > b),
    "ge": np.greater_equal,
    "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "u": lambda a, b: np.isnan(a) | np.isnan(b),
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
    "ngt": lambda a, b: ~(a > b),
    "nle": lambda a, b: ~(a <= b),
    "neq": lambda a, b: ~(a == b),
    "nlt": lambda a, b: ~(a < b),
    "f": lambda a, b: np.False_,
    "tru": lambda a, b: np.True_,
}
_INTEGER_PREDICATES: dict[str, Callable[[Any, Any], Any]] = {
    "lt": np.less,
    "eq": np.equal,
    "le": np.less_equal,
    "gt": np.greater,
    "ne": np.not_equal,
    "ge": np.greater_equal,
    "f": lambda a, b: np.False_,
    "t": lambda a, b: np.True_,
}
for _t in ("f16", "f32", "f64"):
    for _p, _f in _FLOAT_PREDICATES.items():
        valu(f"v_cmp_{_p}_{_t}", "mask", f"{_t} {_t}", _f)
for _t in ("i16", "u16", "i32", "u32", "i64", "u64"):
    for _p, _f in _INTEGER_PREDICATES.items():
        valu(f"v_cmp_{_p}_{_t}", "mask", f"{_t} {_t}", _f)


@instruction("v_cmp_class_f32")
def _classify(ins: Instruction) -> Run:
    """Mask bits: 0-1 NaN, 2 -inf, 3 -normal, 4 -subnormal, 5 -0, 6 +0, 7 +subnormal, 8 +normal, 9 +inf."""

    def function(x: Any, wanted: Any) -> Any:
        x = np.asarray(x)
        quiet = (x.view(np.uint32) >> np.uint32(22)) & np.uint32(1)
        size = np.select([np.isinf(x), x == 0, _subnormal(x)], [3, 0, 1], 2)
        kind = np.where(np.isnan(x), quiet, np.where(np.signbit(x), 5 - size, 6 + size)).astype(np.uint32)
        return (wanted >> kind) & np.uint32(1) != 0

    return build_valu(ins, Signature(("mask",), ("f32", "u32")), function)
