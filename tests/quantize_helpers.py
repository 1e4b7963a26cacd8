"""What the tests of quantization share: formats, bytes of tensors, and comparison with the oracle."""

from __future__ import annotations

import itertools

import numpy as np
import torch

import numerics_oracle as oracle
from octavo.formats import E8M0_ROUNDINGS, ELEMENTS, FLOAT32_ROUNDINGS, GRANULARITIES, Format, ScaledTensor
from octavo.quantize import quantize

FLOAT_FORMATS = [
    Format(element, granularity, rounding)
    for element, granularity, rounding in itertools.product(
        (e for e in ELEMENTS.values() if e.packed == 1),
        (g for g in GRANULARITIES if g != "1x32"),
        FLOAT32_ROUNDINGS,
    )
]
MX_FORMATS = [
    Format(ELEMENTS[name], "1x32", rounding)
    for name, rounding in itertools.product(("e4m3fn", "e5m2", "e2m1"), E8M0_ROUNDINGS)
]
FORMATS = FLOAT_FORMATS + MX_FORMATS
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def raw(x: torch.Tensor) -> torch.Tensor:
    """The bytes (integers of the same width) of a tensor, so that NaN equals NaN and -0 differs from 0."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.detach().cpu().contiguous().view(kinds[x.element_size()])


def canonical(scale: torch.Tensor) -> torch.Tensor:
    """Bytes of a scale with every NaN made the same: its sign and payload mean nothing."""
    return raw(torch.where(scale.isnan(), torch.nan, scale) if scale.dtype == torch.float32 else scale)


def assert_same(actual: ScaledTensor, expected: ScaledTensor) -> None:
    """Equal formats, codes and scales, bit for bit."""
    assert (actual.format, actual.layout) == (expected.format, expected.layout)
    assert actual.data.dtype == expected.data.dtype
    assert actual.scale.dtype == expected.scale.dtype
    torch.testing.assert_close(raw(actual.data), raw(expected.data), rtol=0, atol=0)
    torch.testing.assert_close(canonical(actual.scale), canonical(expected.scale), rtol=0, atol=0)


def codes(x: ScaledTensor) -> np.ndarray:
    """uint8 element codes [..., M, K], packed ones taken apart: the even index is the low nibble."""
    data = raw(x.data).numpy()
    if x.format.element.packed == 1:
        return data
    out = np.empty((*data.shape[:-1], data.shape[-1] * 2), np.uint8)
    out[..., 0::2], out[..., 1::2] = data % 16, data // 16
    return out


def scales(x: ScaledTensor) -> np.ndarray:
    return raw(x.scale).numpy() if x.format.is_mx else x.scale.cpu().numpy()


def assert_matches_oracle(x: torch.Tensor, fmt: Format) -> ScaledTensor:
    """Quantize a matrix and compare with the oracle bit for bit (codes of e2m1 NaN blocks mean nothing)."""
    q = quantize(x, fmt)
    expected, expected_scale = oracle.quantize(
        x.float().numpy(), fmt.element.name, fmt.granularity, fmt.rounding
    )
    got, got_scale = codes(q), scales(q)
    assert got.shape == tuple(x.shape)
    assert got_scale.shape == fmt.scale_shape(x.shape)
    np.testing.assert_array_equal(got_scale, expected_scale)
    if fmt.element.packed > 1:
        dead = oracle.spread(got_scale, x.shape, fmt.granularity) == 255
        got, expected = np.where(dead, 0, got), np.where(dead, 0, expected)
    np.testing.assert_array_equal(got, expected)
    return q
