"""Triton pieces of the numerics contract, shared by every quantization kernel.

Magnitudes travel as the bits of float32 in int32: for non-negative floats the integer order is the order of
the values, NaN lies above inf, and integer maxima are exact, associative and never lose a NaN. The rules and
their sources are in :mod:`octavo.quantize.reference`.
"""

from __future__ import annotations

import math

import numpy as np
import triton
import triton.language as tl

from octavo.formats import E8M0_ROUNDINGS, ELEMENTS, EPS


@triton.constexpr_function
def _bits_of(value):
    # int32 bits of a positive float, rounded to nearest even by float32 itself.
    return np.float32(value).view(np.int32).item()


@triton.constexpr_function
def _largest(element):
    return ELEMENTS[element].max


@triton.constexpr_function
def _largest_bits(element):
    return _bits_of(ELEMENTS[element].max)


@triton.constexpr_function
def _eps_bits():
    return _bits_of(EPS)


@triton.constexpr_function
def _mantissa(element):
    return ELEMENTS[element].mantissa_bits


@triton.constexpr_function
def _emax(element):
    return ELEMENTS[element].emax


@triton.constexpr_function
def _bias(element):
    # The smallest subnormal is 2^(1 - bias - mantissa bits).
    return 1 - ELEMENTS[element].mantissa_bits - int(math.log2(ELEMENTS[element].min_subnormal))


@triton.constexpr_function
def _subnormal_magic(element):
    # A float32 whose unit in the last place is the element's smallest subnormal.
    return ELEMENTS[element].min_subnormal * 2.0**23


@triton.constexpr_function
def _subnormal_magic_bits(element):
    return _bits_of(ELEMENTS[element].min_subnormal * 2.0**23)


@triton.constexpr_function
def _sign_shift(element):
    # Moves bit 31 to the top bit of the code.
    return 28 if ELEMENTS[element].packed > 1 else 24


@triton.constexpr_function
def _nan_code(element):
    return 0 if ELEMENTS[element].packed > 1 else 0x80 if element.endswith("fnuz") else 0x7F


@triton.constexpr_function
def _is_fnuz(element):
    return element.endswith("fnuz")


@triton.constexpr_function
def is_packed(element):
    """Whether two elements share a byte."""
    return ELEMENTS[element].packed > 1


@triton.constexpr_function
def code_bits(element):
    """Bits of a code."""
    return 8 // ELEMENTS[element].packed


@triton.constexpr_function
def is_mx(rounding):
    """Whether scales of this rounding are e8m0."""
    return rounding in E8M0_ROUNDINGS


@triton.jit
def magnitude_bits(x):
    """Bits of |float32(x)| as int32."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def encode_and_scale(bits, ELEMENT: tl.constexpr, ROUNDING: tl.constexpr):
    """(float32 multiplier, scale to store: float32 or uint8 e8m0) of blocks with these amax bits."""
    if is_mx(ROUNDING):
        code = _e8m0_code(bits, ELEMENT, ROUNDING)
        inverse = tl.where(code == 255, 0x7FC00000, (254 - code) << 23)
        return inverse.to(tl.float32, bitcast=True), code.to(tl.uint8)
    else:
        amax = tl.maximum(bits, _eps_bits()).to(tl.float32, bitcast=True)
        encode = tl.div_rn(tl.full(amax.shape, _largest(ELEMENT), tl.float32), amax)
        if ROUNDING == "power_of_two":
            # The inverse of a power of two mirrors its exponent; 0 (of an infinite amax) has inf, NaN has NaN.
            cleared = encode.to(tl.int32, bitcast=True) & ~0x7FFFFF
            mirrored = tl.where(cleared == 0, 0x7F800000, (254 << 23) - cleared)
            inverse = tl.where(encode != encode, encode, mirrored.to(tl.float32, bitcast=True))
            encode = tl.where(encode != encode, encode, cleared.to(tl.float32, bitcast=True))
            return encode, inverse
        return encode, tl.div_rn(tl.full(encode.shape, 1.0, tl.float32), encode)


@triton.jit
def _e8m0_code(bits, ELEMENT: tl.constexpr, ROUNDING: tl.constexpr):
    # No element has emax below 2, so a finite amax never reaches code 254.
    if ROUNDING == "rceil":
        # amax / MAX passes a power of two where the mantissa of amax passes that of MAX, and the rounding of
        # the division never hides it, save one float above the half of the smallest normal scale.
        fraction: tl.constexpr = _largest_bits(ELEMENT) & 0x7FFFFF
        code = ((bits + (0x7FFFFF - fraction)) >> 23) - _emax(ELEMENT)
        code -= (bits == _largest_bits(ELEMENT) - (127 << 23) + 1).to(tl.int32)
    elif ROUNDING == "ceil":
        # Subnormals count from their own top bit; with emax above 1 they all take code 0.
        code = ((bits + 0x7FFFFF) >> 23) - _emax(ELEMENT)
    elif ROUNDING == "even":
        code = ((bits + (1 << (22 - _mantissa(ELEMENT)))) >> 23) - _emax(ELEMENT)
    else:
        code = (bits >> 23) - _emax(ELEMENT)
    return tl.where(bits >= 0x7F800000, 255, tl.maximum(code, 0))


@triton.jit
def to_codes(value, ELEMENT: tl.constexpr, CAST: tl.constexpr):
    """uint8 codes of float32 ``value``: clamped, to nearest even, NaN as the one positive code.

    ``CAST`` says what the hardware's conversion does by itself: ``"saturates"`` (PTX
    ``cvt.rn.satfinite``: clamps, and NaN is the positive code), ``"rounds"`` (clamp and NaN are done here),
    or ``"none"`` (no conversion of this element: integer arithmetic).
    """
    if CAST == "none":
        return _to_codes_by_integers(value, ELEMENT)
    else:
        if CAST == "rounds":
            limit: tl.constexpr = _largest(ELEMENT)
            clamped = tl.minimum(tl.maximum(value, -limit), limit)
            value = tl.where(value != value, float("nan"), clamped)
        if ELEMENT == "e4m3fn":
            return value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        elif ELEMENT == "e4m3fnuz":
            return value.to(tl.float8e4b8).to(tl.uint8, bitcast=True)
        elif ELEMENT == "e5m2":
            return value.to(tl.float8e5).to(tl.uint8, bitcast=True)
        else:
            return value.to(tl.float8e5b16).to(tl.uint8, bitcast=True)


@triton.jit
def _to_codes_by_integers(value, ELEMENT: tl.constexpr):
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    clamped = tl.minimum(magnitude, _largest_bits(ELEMENT))
    mantissa: tl.constexpr = _mantissa(ELEMENT)
    drop: tl.constexpr = 23 - mantissa
    rounded = (clamped + (((1 << (drop - 1)) - 1) + ((clamped >> drop) & 1))) >> drop
    normal = rounded - ((127 - _bias(ELEMENT)) << mantissa)
    # Below the smallest normal the float32 adder rounds to nearest even at the smallest subnormal.
    shifted = clamped.to(tl.float32, bitcast=True) + _subnormal_magic(ELEMENT)
    subnormal = shifted.to(tl.int32, bitcast=True) - _subnormal_magic_bits(ELEMENT)
    code = tl.where(clamped < ((128 - _bias(ELEMENT)) << 23), subnormal, normal)
    sign = ((bits >> _sign_shift(ELEMENT)) & (1 << (31 - _sign_shift(ELEMENT)))).to(tl.int32)
    if _is_fnuz(ELEMENT):
        sign = tl.where(code == 0, 0, sign)
    return tl.where(magnitude > 0x7F800000, _nan_code(ELEMENT), code | sign).to(tl.uint8)


@triton.jit
def scaled_codes(x, encode, ELEMENT: tl.constexpr, CAST: tl.constexpr):
    """uint8 codes of ``x`` (any float dtype) times the float32 multipliers of its blocks."""
    if is_packed(ELEMENT) and x.dtype != tl.float32:
        return _e2m1_codes(x.to(tl.float32) * encode, encode)
    else:
        return to_codes(x.to(tl.float32) * encode, ELEMENT, CAST)


@triton.jit
def _e2m1_codes(value, encode):
    # 16-bit inputs times a power of two: times 2^-126 more, 1.0 is float32's smallest normal, and its bits from
    # the 22nd on are the code of e2m1, subnormals included. No bit that could decide a tie is lost on the way.
    dead = encode != encode
    limit = tl.where(dead, 0.0, 6.0)
    signs = tl.where(dead, 0, 8).to(tl.uint32)
    small = tl.minimum(tl.abs(value), limit) * 1.1754943508222875e-38
    bits = small.to(tl.uint32, bitcast=True)
    code = (bits + (0x1FFFFF + ((bits >> 22) & 1))) >> 22
    return (((value.to(tl.uint32, bitcast=True) >> 28) & signs) | code).to(tl.uint8)
