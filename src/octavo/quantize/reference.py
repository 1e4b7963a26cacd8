"""The numerics of quantization, written once and plainly; every kernel must equal it bit for bit.

For a block with ``amax`` in float32 (NaN counts as the largest value):

    encode = div_rn(MAX, max(amax, 1e-12))      mantissa bits cleared for power-of-two scales
    q      = RNE(clamp(float32(x) * encode, -MAX, MAX))
    scale  = div_rn(1, encode)

so a block that holds NaN or inf decodes to NaN throughout (inf: encode 0, scale inf, 0 * inf). MX blocks
(OCP MX specification 1.0) take a power of two by the chosen rounding, 255 for a block with NaN or inf:

    floor  2^(floor(log2 amax) - emax)
    ceil   2^(ceil(log2 amax) - emax)
    even   2^(floor(log2 of amax rounded to the element's mantissa) - emax)
    rceil  2^ceil(log2(div_rn(amax, MAX)))      the default: never clips

Source of floor and even: OCP MX 1.0 section 6.3 and its common implementations; rceil: PTX ISA
``cvt.rp.satfinite.ue8m0``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from octavo.formats import ALL, EPS, Element, Format

E8M0_NAN = 255
E8M0_BIAS = 127
_FLOAT_MANTISSA = 0x7FFFFF
_FLOAT_EXPONENT = 0xFF


def quantize(x: torch.Tensor, fmt: Format, transpose: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """(data, scale) of ``x`` [..., M, K], or of its transpose, both contiguous."""
    if transpose:
        x = x.mT
    amax = block_amax(x, fmt.block)
    if fmt.is_mx:
        code = e8m0_code(amax, fmt)
        encode, scale = _inverse_power_of_two(code), code.view(torch.float8_e8m0fnu)
    else:
        encode, scale = float32_scales(amax, fmt)
    return cast(x.float() * expand_blocks(encode, x.shape, fmt.block), fmt.element), scale


def quantize_both(
    x: torch.Tensor, fmt: Format, transposed_fmt: Format
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(data, scale) of ``x`` and (data, scale) of its transpose."""
    return *quantize(x, fmt), *quantize(x, transposed_fmt, transpose=True)


def dequantize(data: torch.Tensor, scale: torch.Tensor, fmt: Format, dtype: torch.dtype) -> torch.Tensor:
    """``data * scale`` computed in float32 and rounded once to ``dtype``."""
    values = unpack_e2m1(data) if fmt.element.packed > 1 else data.float()
    scales = decode_e8m0(scale) if fmt.is_mx else scale
    return (values * expand_blocks(scales, values.shape, fmt.block)).to(dtype)


def block_amax(x: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Largest magnitude of each block of ``x`` [..., M, K], float32, NaN if the block holds one."""
    for dim, extent in ((-1, block[1]), (-2, block[0])):
        x = _amax_along(x.abs(), dim, extent)
    return x.float().contiguous()


def _amax_along(x: torch.Tensor, dim: int, extent: int) -> torch.Tensor:
    size = x.shape[dim]
    if extent == 1:
        return x
    if size == 0:
        shape = list(x.shape)
        shape[dim] = 1 if extent == ALL else 0
        return x.new_zeros(shape)
    if extent == ALL:
        return x.amax(dim, keepdim=True)
    x = x.movedim(dim, -1)
    x = F.pad(x, (0, -size % extent)).unflatten(-1, (-1, extent)).amax(-1)
    return x.movedim(-1, dim)


def expand_blocks(values: torch.Tensor, shape: torch.Size, block: tuple[int, int]) -> torch.Tensor:
    """Repeat one value a block so that it broadcasts against ``shape`` [..., M, K]."""
    for dim, extent in ((-2, block[0]), (-1, block[1])):
        if extent > 1:
            values = values.repeat_interleave(extent, dim).narrow(dim, 0, shape[dim])
    return values


def float32_scales(amax: torch.Tensor, fmt: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """(encode, scale) of float32 ``amax``: what elements are multiplied by, and what decodes them."""
    # Tensor by tensor: a Python scalar over a tensor is a reciprocal and a product, one ulp off.
    encode = torch.div(torch.full_like(amax, fmt.element.max), amax.clamp(min=EPS))
    if fmt.rounding == "power_of_two":
        cleared = (encode.view(torch.int32) & ~_FLOAT_MANTISSA).view(torch.float32)
        encode = torch.where(encode.isnan(), encode, cleared)
    return encode, torch.div(torch.ones_like(encode), encode)


def e8m0_code(amax: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Biased exponent of the scale of each MX block, uint8; 255 where ``amax`` is NaN or inf."""
    if fmt.rounding == "rceil":
        exponent = _ceil_exponent(torch.div(amax, torch.full_like(amax, fmt.element.max)))
    else:
        bits = amax.view(torch.int32)
        if fmt.rounding == "even":
            bits = bits + (1 << (23 - fmt.element.mantissa_bits - 1))
        if fmt.rounding == "ceil":
            exponent = _ceil_exponent(amax) - fmt.element.emax
        else:
            exponent = (bits >> 23) - E8M0_BIAS - fmt.element.emax
    code = (exponent + E8M0_BIAS).clamp(0, 254)
    return torch.where(amax.isfinite(), code, E8M0_NAN).to(torch.uint8)


def _ceil_exponent(value: torch.Tensor) -> torch.Tensor:
    """ceil(log2(value)) of non-negative float32, at least -127."""
    bits = value.view(torch.int32)
    mantissa, biased = bits & _FLOAT_MANTISSA, (bits >> 23) & _FLOAT_EXPONENT
    # Subnormals up to 2^-127 fit the smallest scale; the ones above need 2^-126.
    up = torch.where(biased > 0, mantissa > 0, mantissa > 0x400000)
    return biased + up.int() - E8M0_BIAS


def _inverse_power_of_two(code: torch.Tensor) -> torch.Tensor:
    """2^(127 - code) as float32; NaN for 255, so that every element of such a block becomes NaN."""
    biased = (254 - code.int()).clamp(min=0)
    bits = torch.where(biased == 0, 0x400000, biased << 23)
    return torch.where(code == E8M0_NAN, torch.nan, bits.to(torch.int32).view(torch.float32))


def decode_e8m0(scale: torch.Tensor) -> torch.Tensor:
    """2^(code - 127) as float32; NaN for code 255."""
    code = scale.view(torch.uint8).int()
    bits = torch.where(code == 0, 0x400000, code << 23)
    return torch.where(code == E8M0_NAN, torch.nan, bits.to(torch.int32).view(torch.float32))


def cast(x: torch.Tensor, element: Element) -> torch.Tensor:
    """Clamp to the element's range, round to nearest even, NaN to the one positive NaN code."""
    # The clamp comes first: PyTorch's own cast saturates e4m3fn alone, fnuz gives NaN and e5m2 gives inf.
    x = x.clamp(-element.max, element.max)
    if element.packed > 1:
        return pack_e2m1(x)
    return torch.where(x.isnan(), torch.nan, x).to(element.dtype, memory_format=torch.contiguous_format)


# Midpoints between neighbouring e2m1 magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6; code i lies below midpoint i.
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def pack_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Round float32 [..., K] in [-6, 6] to e2m1 and pack two to a byte, the even index in the low nibble."""
    magnitude = x.abs().nan_to_num(0.0)
    code = torch.zeros_like(magnitude, dtype=torch.uint8)
    for index, midpoint in enumerate(_E2M1_MIDPOINTS):
        # A tie goes to the even code: up when the code below is odd, down when it is even.
        code += (magnitude >= midpoint) if index % 2 else (magnitude > midpoint)
    code |= (torch.signbit(x) & ~x.isnan()).to(torch.uint8) << 3
    low, high = code[..., 0::2], code[..., 1::2]
    return (low | (high << 4)).contiguous().view(torch.float4_e2m1fn_x2)


def unpack_e2m1(data: torch.Tensor) -> torch.Tensor:
    """float32 [..., K] of packed e2m1 [..., K / 2]."""
    packed = data.view(torch.uint8)
    codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
    values = torch.tensor(_E2M1_VALUES, device=data.device)[(codes & 7).long()]
    return torch.where(codes >= 8, -values, values)
