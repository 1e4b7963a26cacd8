"""Small floating-point formats as data: decode tables and a correctly rounding encoder.

Written independently of ml_dtypes, which the tests compare with. OCP formats (gfx950) follow the OCP 8-bit
Floating Point and Microscaling specifications; the fnuz ones (gfx942) the CDNA3 ISA: no infinity, no negative
zero, NaN only as 0x80, exponent bias one larger.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class SmallFloat:
    """`special` says what the top of the code space holds: "ieee" (inf and NaN), "one_nan" (only the last code is
    NaN), "fnuz" (NaN is -0) or "none"."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    special: str

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @functools.cached_property
    def values(self) -> np.ndarray:
        """float32 value of every code."""
        codes = np.arange(1 << self.bits)
        sign_bit = 1 << (self.bits - 1)
        magnitude = codes & (sign_bit - 1)
        exponent, mantissa = magnitude >> self.mantissa_bits, magnitude & ((1 << self.mantissa_bits) - 1)
        fraction = np.where(exponent > 0, 1.0, 0.0) + mantissa / (1 << self.mantissa_bits)
        value = np.ldexp(fraction, np.maximum(exponent, 1) - self.bias)
        top = (1 << self.exponent_bits) - 1
        if self.special == "ieee":
            value = np.where(exponent == top, np.where(mantissa == 0, np.inf, np.nan), value)
        elif self.special == "one_nan":
            value = np.where(magnitude == sign_bit - 1, np.nan, value)
        value = np.where(codes & sign_bit, -value, value)
        if self.special == "fnuz":
            value[sign_bit] = np.nan
        return value.astype(np.float32)

    @functools.cached_property
    def magnitudes(self) -> np.ndarray:
        """Finite non-negative values in increasing order; their index is their code."""
        positive = self.values[: 1 << (self.bits - 1)]
        return positive[np.isfinite(positive)].astype(np.float64)

    @property
    def maximum(self) -> float:
        return float(self.magnitudes[-1])

    @property
    def nan_code(self) -> int:
        return {"ieee": 0x7F, "one_nan": 0x7F, "fnuz": 0x80}[self.special]

    def decode(self, codes: Any) -> np.ndarray:
        """float32 of integer codes."""
        return self.values[codes]

    def encode(self, x: Any, saturate: bool) -> np.ndarray:
        """uint8 codes of float values, to nearest even.

        Beyond the largest value: that value when `saturate`; else infinity if the format has it, else NaN. The
        formats without NaN (6 and 4 bits) always saturate, and NaN becomes their largest value.
        """
        x = np.asarray(x, np.float64)
        size = np.abs(x)
        limit = self.maximum
        # Round to the spacing of the binade of x: exact scaling by a power of two, rint is to nearest even.
        exponent = np.maximum(np.frexp(np.where(np.isfinite(size), size, 0))[1] - 1, 1 - self.bias)
        step = np.ldexp(1.0, exponent - self.mantissa_bits)
        rounded = np.rint(size / step) * step
        code = np.searchsorted(self.magnitudes, np.minimum(rounded, limit)).astype(np.uint8)
        sign = np.signbit(x)
        if self.special != "none" and not saturate:
            over = rounded > limit
            code = np.where(over, np.uint8(0x7C) if self.special == "ieee" else np.uint8(self.nan_code), code)
        sign_bit = np.uint8(1 << (self.bits - 1))
        if self.special == "fnuz":
            sign = sign & (code != 0)
        code = np.where(sign, code | sign_bit, code)
        if self.special != "none":
            code = np.where(np.isnan(x), np.uint8(self.nan_code), code)
        return code.astype(np.uint8)


E4M3FN = SmallFloat("e4m3fn", 4, 3, 7, "one_nan")
E5M2 = SmallFloat("e5m2", 5, 2, 15, "ieee")
E4M3FNUZ = SmallFloat("e4m3fnuz", 4, 3, 8, "fnuz")
E5M2FNUZ = SmallFloat("e5m2fnuz", 5, 2, 16, "fnuz")
E2M3 = SmallFloat("e2m3", 2, 3, 1, "none")
E3M2 = SmallFloat("e3m2", 3, 2, 3, "none")
E2M1 = SmallFloat("e2m1", 2, 1, 1, "none")

# What the mnemonics' "fp8" and "bf8" mean on each target.
FP8 = {"gfx942": E4M3FNUZ, "gfx950": E4M3FN}
BF8 = {"gfx942": E5M2FNUZ, "gfx950": E5M2}


def bf16_to_f32(bits: Any) -> np.ndarray:
    """float32 of bfloat16 bit patterns."""
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(x: Any) -> np.ndarray:
    """uint16 bfloat16 patterns, to nearest even; NaN stays NaN (quieted)."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(np.asarray(x, np.float32)), quiet, rounded).astype(np.uint16)


def e8m0_to_f64(codes: Any) -> np.ndarray:
    """float64 of E8M0 scale codes: 2^(code - 127), 255 is NaN (OCP Microscaling specification)."""
    codes = np.asarray(codes).astype(np.int64)
    return np.where(codes == 255, np.nan, np.ldexp(1.0, codes - 127))
