"""Format constants against two other sources of the same facts, and the errors of formats that make no sense."""

from __future__ import annotations

import dataclasses
import itertools

import ml_dtypes
import pytest
import torch

import numerics_oracle as oracle
from octavo.formats import (
    E2M1,
    E4M3FN,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    E8M0_ROUNDINGS,
    ELEMENTS,
    FLOAT32_ROUNDINGS,
    GRANULARITIES,
    MXFP4,
    MXFP8,
    MXFP8_E5M2,
    Element,
    Format,
    ScaledTensor,
    ScaleLayout,
)

ML_DTYPES = {
    "e4m3fn": ml_dtypes.float8_e4m3fn,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e5m2": ml_dtypes.float8_e5m2,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "e2m1": ml_dtypes.float4_e2m1fn,
}
VALID = [
    Format(element, granularity, rounding)
    for element, granularity, rounding in itertools.product(
        ELEMENTS.values(), GRANULARITIES, FLOAT32_ROUNDINGS + E8M0_ROUNDINGS
    )
    if (rounding in E8M0_ROUNDINGS) == (granularity == "1x32")
    and (element.packed == 1 or granularity == "1x32")
]


@pytest.mark.parametrize("element", ELEMENTS.values(), ids=lambda e: e.name)
def test_element_facts(element: Element) -> None:
    info, table = ml_dtypes.finfo(ML_DTYPES[element.name]), oracle.magnitudes(element.name)
    assert element.max == float(info.max) == table[-1]
    assert element.min_subnormal == float(info.smallest_subnormal) == table[1]
    assert element.mantissa_bits == info.nmant
    assert 2.0**element.emax <= element.max < 2.0 ** (element.emax + 1)
    if element.packed == 1:
        assert element.max == torch.finfo(element.dtype).max


@pytest.mark.parametrize("name", ELEMENTS)
def test_oracle_decodes_as_ml_dtypes(name: str) -> None:
    import numpy as np

    count = 16 if name == "e2m1" else 256
    values = np.arange(count, dtype=np.uint8).view(ML_DTYPES[name]).astype(np.float64)
    np.testing.assert_array_equal(oracle.decode_table(name), values)


@pytest.mark.parametrize("fmt", VALID, ids=str)
def test_key_round_trip(fmt: Format) -> None:
    assert Format.from_key(fmt.key) == fmt
    assert str(fmt) == fmt.key
    assert fmt.scale_dtype == (torch.float8_e8m0fnu if fmt.granularity == "1x32" else torch.float32)


@pytest.mark.parametrize("key", ["", "e4m3fn", "e4m3fn:rowwise", "e4m3:rowwise:exact", "e4m3fn:a:b:c"])
def test_bad_key_is_explained(key: str) -> None:
    with pytest.raises(ValueError, match=r"no format key: need element:granularity:rounding"):
        Format.from_key(key)


@pytest.mark.parametrize(
    ("granularity", "rounding", "text"),
    [
        ("row", "exact", "unknown granularity 'row'; use one of"),
        ("rowwise", "nearest", "unknown scale rounding 'nearest'; use one of"),
        ("rowwise", "rceil", "e8m0 scales .* go with 1x32 blocks and with nothing else"),
        ("1x32", "exact", "e8m0 scales .* go with 1x32 blocks and with nothing else"),
    ],
)
def test_impossible_format_is_explained(granularity: str, rounding: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Format(E4M3FN, granularity, rounding)


def test_packed_elements_need_mx_blocks() -> None:
    with pytest.raises(ValueError, match="e2m1 needs 1x32 blocks"):
        Format(E2M1, "rowwise")


def test_families() -> None:
    for ocp, fnuz in ((E4M3FN, E4M3FNUZ), (E5M2, E5M2FNUZ)):
        one, other = Format(ocp, "rowwise", "power_of_two"), Format(fnuz, "rowwise", "power_of_two")
        assert one.with_family("fnuz") == other.with_family("fnuz") == other
        assert one.with_family("ocp") == other.with_family("ocp") == one
    for mx in (MXFP8, MXFP8_E5M2, MXFP4):
        assert mx.with_family("fnuz") == mx.with_family("ocp") == mx


@pytest.mark.parametrize(
    ("granularity", "shape", "expected"),
    [
        ("tensorwise", (5, 7), (1, 1)),
        ("tensorwise", (3, 5, 7), (3, 1, 1)),
        ("tensorwise", (0, 0), (1, 1)),
        ("rowwise", (5, 7), (5, 1)),
        ("rowwise", (5, 0), (5, 1)),
        ("columnwise", (5, 7), (1, 7)),
        ("1x128", (5, 129), (5, 2)),
        ("1x128", (5, 0), (5, 0)),
        ("128x1", (129, 5), (2, 5)),
        ("128x128", (2, 4, 128, 257), (2, 4, 1, 3)),
        ("1x32", (3, 33), (3, 2)),
    ],
)
def test_scale_shape(granularity: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    fmt = MXFP8 if granularity == "1x32" else Format(E4M3FN, granularity)
    assert fmt.scale_shape(shape) == expected


def test_data_shape_counts_packed_bytes() -> None:
    assert MXFP4.data_shape((3, 64)) == (3, 32)
    assert MXFP8.data_shape((3, 64)) == (3, 64)


def test_formats_and_scaled_tensors_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        MXFP8.rounding = "floor"  # type: ignore[misc]
    tensor = ScaledTensor(torch.zeros(2, 4), torch.ones(2, 1), Format(E4M3FN, "rowwise"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        tensor.scale = torch.ones(2, 1)  # type: ignore[misc]


def test_scaled_tensor_speaks_of_the_unpacked_shape() -> None:
    data = torch.zeros(3, 32, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    tensor = ScaledTensor(data, torch.zeros(3, 2, dtype=torch.uint8).view(torch.float8_e8m0fnu), MXFP4)
    assert tensor.shape == (3, 64)
    assert tensor.ndim == 2
    assert tensor.layout is ScaleLayout.PLAIN
    assert repr(tensor) == "ScaledTensor((3, 64), e2m1:1x32:rceil, plain, cpu)"
