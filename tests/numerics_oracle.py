"""A second, independent statement of the numerics contract, in NumPy float64 and tables.

Nothing here calls the package. An element type is the table of its values, computed from the bit fields;
rounding is a search among them; divisions and products are float64 results rounded once to float32 (right,
since 53 bits are at least 2 * 24 + 2), and powers of two come from ``frexp``.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

EPS = np.float32(1e-12)


@dataclass(frozen=True)
class Type:
    """An element type by its bit fields; ``top`` is the code of the largest finite value."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    top: int
    nan: int
    fnuz: bool = False

    @property
    def sign(self) -> int:
        return 1 << (self.exponent_bits + self.mantissa_bits)

    def magnitude(self, code: int) -> float:
        """Value of a code without sign, by the definition of its fields."""
        exponent, mantissa = code >> self.mantissa_bits, code & ((1 << self.mantissa_bits) - 1)
        fraction = mantissa / (1 << self.mantissa_bits)
        if exponent == 0:
            return math.ldexp(fraction, 1 - self.bias)
        return math.ldexp(1 + fraction, exponent - self.bias)


TYPES = {
    "e4m3fn": Type(4, 3, 7, 0x7E, 0x7F),
    "e4m3fnuz": Type(4, 3, 8, 0x7F, 0x80, fnuz=True),
    "e5m2": Type(5, 2, 15, 0x7B, 0x7F),
    "e5m2fnuz": Type(5, 2, 16, 0x7F, 0x80, fnuz=True),
    "e2m1": Type(2, 1, 1, 0x7, 0),
}
BLOCKS = {
    "tensorwise": (None, None),
    "rowwise": (1, None),
    "columnwise": (None, 1),
    "1x128": (1, 128),
    "128x1": (128, 1),
    "128x128": (128, 128),
    "1x32": (1, 32),
}


@functools.cache
def magnitudes(name: str) -> np.ndarray:
    """float64 values of codes 0 .. top, increasing."""
    kind = TYPES[name]
    return np.array([kind.magnitude(code) for code in range(kind.top + 1)])


def largest(name: str) -> float:
    return float(magnitudes(name)[-1])


@functools.cache
def decode_table(name: str) -> np.ndarray:
    """float64 value of every code; NaN and inf where the type has them."""
    kind, finite = TYPES[name], magnitudes(name)
    half = np.full(kind.sign, np.nan)
    half[: finite.size] = finite
    if name == "e5m2":
        half[0x7C] = np.inf
    table = np.concatenate([half, -half])
    if kind.fnuz:
        table[kind.sign] = np.nan
    return table


def encode(values: np.ndarray, name: str) -> np.ndarray:
    """uint8 codes of float64 ``values``, saturated, nearest, ties to the even code."""
    kind, finite = TYPES[name], magnitudes(name)
    magnitude = np.minimum(np.abs(values), finite[-1])
    midpoints = (finite[:-1] + finite[1:]) / 2
    below = np.searchsorted(midpoints, magnitude, side="left")
    tie = (below < midpoints.size) & (magnitude == midpoints[np.minimum(below, midpoints.size - 1)])
    code = below + (tie & (below % 2 == 1))
    negative = np.signbit(values) & ~((code == 0) & kind.fnuz)
    code = np.where(negative, code + kind.sign, code)
    return np.where(np.isnan(values), kind.nan, code).astype(np.uint8)


def _float32(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        return values.astype(np.float32)


def divide(a: float | np.ndarray, b: float | np.ndarray) -> np.ndarray:
    """float32 division rounded to nearest."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return _float32(np.float64(a) / np.float64(b))


def block_amax(x: np.ndarray, granularity: str) -> np.ndarray:
    """float32 [row blocks, column blocks] of float32 ``x`` [M, K], NaN where a block has one."""
    rows, cols = x.shape
    height, width = (extent or size for extent, size in zip(BLOCKS[granularity], x.shape, strict=True))
    down = 1 if BLOCKS[granularity][0] is None else -(-rows // height)
    across = 1 if BLOCKS[granularity][1] is None else -(-cols // width)
    out = np.zeros((down, across), np.float32)
    for i in range(down):
        for j in range(across):
            block = np.abs(x[i * height : (i + 1) * height, j * width : (j + 1) * width])
            out[i, j] = block.max() if block.size else 0
    return out


def spread(values: np.ndarray, shape: tuple[int, int], granularity: str) -> np.ndarray:
    """One value an element from one a block, by its index."""
    height, width = (extent or max(size, 1) for extent, size in zip(BLOCKS[granularity], shape, strict=True))
    return values[np.arange(shape[0])[:, None] // height, np.arange(shape[1])[None, :] // width]


def _exponent(value: float) -> int:
    """floor(log2(value)) of a positive number, exactly."""
    return math.frexp(value)[1] - 1


def _ceil_exponent(value: float) -> int:
    fraction, exponent = math.frexp(value)
    return exponent - (fraction == 0.5)


def e8m0(amax: float, name: str, rounding: str) -> int:
    """Scale code of one MX block."""
    kind, top = TYPES[name], largest(name)
    if not math.isfinite(amax):
        return 255
    if rounding == "rceil":
        ratio = float(divide(amax, top))
        exponent = _ceil_exponent(ratio) if ratio else -127
    elif amax == 0:
        exponent = -127
    elif rounding == "ceil":
        exponent = _ceil_exponent(amax) - _exponent(top)
    elif rounding == "floor":
        exponent = _exponent(amax) - _exponent(top)
    else:
        fraction, power = math.frexp(amax)
        steps = 2 ** (kind.mantissa_bits + 1)
        exponent = _exponent(math.ldexp(round(fraction * steps) / steps, power)) - _exponent(top)
    return min(max(exponent, -127), 127) + 127


def quantize(x: np.ndarray, name: str, granularity: str, rounding: str) -> tuple[np.ndarray, np.ndarray]:
    """(codes uint8 [M, K], scale) of float32 ``x``; scale float32, or uint8 codes for MX."""
    amax = block_amax(x, granularity)
    if granularity == "1x32":
        codes = np.array([[e8m0(float(a), name, rounding) for a in row] for row in amax], np.uint8)
        codes = codes.reshape(amax.shape)
        factor = np.where(codes == 255, np.nan, np.ldexp(1.0, 127 - codes.astype(int)))
        return encode(x.astype(np.float64) * spread(factor, x.shape, granularity), name), codes
    encodes = divide(largest(name), np.where(amax < EPS, EPS, amax))
    if rounding == "power_of_two":
        exponent = np.frexp(encodes)[1]
        power = np.where((encodes == 0) | np.isnan(encodes), encodes, np.ldexp(1.0, exponent - 1))
        encodes = power.astype(np.float32)
    with np.errstate(invalid="ignore"):
        product = x.astype(np.float64) * spread(encodes, x.shape, granularity).astype(np.float64)
    return encode(_float32(product).astype(np.float64), name), divide(1.0, encodes)


def decode(codes: np.ndarray, scale: np.ndarray, name: str, granularity: str) -> np.ndarray:
    """float64 value of every element; a uint8 ``scale`` is e8m0."""
    if scale.dtype == np.uint8:
        scale = np.where(scale == 255, np.nan, np.ldexp(1.0, scale.astype(int) - 127))
    with np.errstate(invalid="ignore"):
        return decode_table(name)[codes] * spread(scale, codes.shape, granularity).astype(np.float64)
