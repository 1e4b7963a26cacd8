"""Situations of public reports about quantization, by their ids."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

import numerics_oracle as oracle
from octavo import dequantize, quantize, quantize_both, use_kernels
from octavo.formats import (
    E4M3FN,
    E4M3FNUZ,
    E5M2,
    E8M0_ROUNDINGS,
    ELEMENTS,
    MXFP4,
    MXFP8,
    Element,
    Format,
    ScaledTensor,
)
from octavo.quantize import reference
from octavo.testing import outlier_matrix
from quantize_helpers import (
    FORMATS,
    assert_matches_oracle,
    assert_same,
    raw,
)

BYTE_ELEMENTS = [e for e in ELEMENTS.values() if e.packed == 1]


@pytest.fixture(autouse=True)
def _reference() -> object:
    with use_kernels(quantize="reference", quantize_both="reference"):
        yield


def _views() -> dict[str, Callable[[], torch.Tensor]]:
    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.bfloat16)

    return {
        "sliced columns": lambda: noise(128, 768)[:, 256:512],
        "transposed": lambda: noise(128, 256).t(),
        "permuted": lambda: noise(2, 5, 256).permute(1, 0, 2),
        "permuted back to front": lambda: noise(6, 5, 34).permute(2, 1, 0),
        "expanded rows": lambda: noise(1, 256).expand(64, 256),
        "expanded columns": lambda: noise(64, 1).expand(64, 256),
        "expanded scalar": lambda: noise(1, 1).expand(34, 66),
        "expanded lead": lambda: noise(64, 66).expand(3, 64, 66),
        "every other column": lambda: noise(64, 300)[:, ::2],
        "every third row, offset": lambda: noise(64, 130)[1::3, 2:],
        "unaligned start": lambda: noise(4097)[1:].view(64, 64),
    }


@pytest.mark.case("B08")
@pytest.mark.parametrize("view", _views())
@pytest.mark.parametrize("fmt", [f for f in FORMATS if f.rounding in ("exact", "rceil")], ids=str)
def test_B08_any_strides(fmt: Format, view: str) -> None:
    x = _views()[view]()
    before = raw(x).clone()
    expected = quantize(x.contiguous(), fmt)
    assert_same(quantize(x, fmt), expected)
    assert quantize(x, fmt).data.is_contiguous()
    both, both_t = quantize_both(x, fmt) if x.shape[-2] % fmt.element.packed == 0 else (expected, None)
    assert_same(both, expected)
    if both_t is not None:
        assert_same(quantize(x, fmt, transpose=True), quantize(x.mT.contiguous(), fmt))
        assert_same(both_t, quantize(x.mT.contiguous(), fmt))
    assert torch.equal(raw(x), before)


B02_VALUES = [448.0, 464.0, 465.0, 1000.0, -1000.0, math.nan, math.inf, -math.inf]


@pytest.mark.case("B02")
@pytest.mark.parametrize("element", BYTE_ELEMENTS, ids=lambda e: e.name)
@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_B02_the_cast_saturates_on_every_torch(element: Element, mode: str) -> None:
    def cast(x: torch.Tensor) -> torch.Tensor:
        return reference.cast(x, element)

    torch._dynamo.reset()
    run = torch.compile(cast, backend="aot_eager", fullgraph=True) if mode == "compiled" else cast
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.tensor([B02_VALUES], dtype=dtype)
        got = raw(run(x.float()))[0].tolist()
        assert got == oracle.encode(x.double().numpy(), element.name)[0].tolist()
    if element is E4M3FN:
        assert got == [0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7F, 0x7E, 0xFE]


@pytest.mark.case("B02")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_B02_quantize_gives_the_same_bits_compiled(dtype: torch.dtype) -> None:
    finite = torch.tensor([B02_VALUES[:5]], dtype=dtype).repeat(1, 4)
    special = torch.tensor([B02_VALUES], dtype=dtype).repeat(1, 4)
    formats = {
        Format(E4M3FN, "rowwise"): 1000.0,
        Format(E4M3FNUZ, "rowwise", "power_of_two"): 1024.0,  # scale 8: 125 rounds to 128
        Format(E4M3FN, "1x32", "floor"): 896.0,
    }
    torch._dynamo.reset()
    for fmt, expected in formats.items():

        def both(x: torch.Tensor, fmt: Format = fmt) -> tuple[torch.Tensor, torch.Tensor]:
            q = quantize(x, fmt)
            return q.data, q.scale

        compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
        for x in (finite, special):
            assert_same(ScaledTensor(*compiled(x), fmt), assert_matches_oracle(x, fmt))
        largest = dequantize(quantize(finite, fmt)).abs().max().item()
        assert largest == pytest.approx(expected, rel=1e-6)
        assert dequantize(quantize(special, fmt)).isnan().all()


@pytest.mark.case("B03")
@pytest.mark.parametrize(
    ("rounding", "scale", "value"),
    [("floor", 2.0, 896.0), ("even", 2.0, 896.0), ("ceil", 4.0, 960.0), ("rceil", 4.0, 960.0)],
)
def test_B03_a_largest_value_in_an_e4m3_block(rounding: str, scale: float, value: float) -> None:
    x = torch.linspace(-500, 500, 32)[None].clone()
    x[0, 3], x[0, 9] = 960.0, 957.0
    q = quantize(x, Format(E4M3FN, "1x32", rounding))
    assert q.scale.float().item() == scale
    assert dequantize(q)[0, [3, 9]].tolist() == [value, value]


@pytest.mark.case("B03")
@pytest.mark.parametrize("rounding", E8M0_ROUNDINGS)
def test_B03_b_rounding_past_the_element_maximum_clamps(rounding: str) -> None:
    x = torch.cat([torch.arange(1.0, 32.0), torch.tensor([127.99999])])[None]
    q = quantize(x, Format(E5M2, "1x32", rounding))
    scale, value = {"floor": (2.0**-9, 112.0)}.get(rounding, (2.0**-8, 128.0))
    assert q.scale.float().item() == scale
    assert dequantize(q)[0, 31].item() == value
    assert dequantize(q).isfinite().all()


@pytest.mark.case("B03")
def test_B03_the_default_rounding_is_rceil_and_never_clips() -> None:
    assert MXFP8.rounding == MXFP4.rounding == "rceil"
    x = outlier_matrix((64, 320), seed=7)
    for fmt in (MXFP8, MXFP4, Format(E5M2, "1x32", "rceil")):
        q = quantize(x, fmt)
        top = x.abs().unflatten(1, (-1, 32)).amax(-1)
        assert (reference.decode_e8m0(q.scale) * fmt.element.max >= top).all()
        assert (reference.decode_e8m0(q.scale) * fmt.element.max < 2 * top * (1 + 2**-22)).all()


@pytest.mark.case("B07")
def test_B07_even_index_in_the_low_nibble() -> None:
    values = [0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0, 0.0, 6.0]
    x = torch.tensor([values * 2])
    q = quantize(x, MXFP4)
    assert q.scale.float().item() == 1.0
    assert raw(q.data)[0, :8].tolist() == [0x21, 0x43, 0x65, 0x97, 0xBA, 0xDC, 0xFE, 0x70]
    assert torch.equal(dequantize(q), x)
    assert q.data.dtype == torch.float4_e2m1fn_x2
    assert q.data.shape == (1, 16)


@pytest.mark.case("B07")
def test_B07_packing_and_unpacking_are_inverse_for_every_byte() -> None:
    every = torch.arange(256, dtype=torch.uint8)[None].view(torch.float4_e2m1fn_x2)
    values = reference.unpack_e2m1(every)
    assert torch.equal(raw(reference.pack_e2m1(values)), raw(every))


@pytest.mark.case("B07")
def test_B07_odd_lengths_are_refused_and_partial_blocks_are_not() -> None:
    message = (
        r"e2m1 packs two elements to a byte and the last dimension is 31, which is odd: pad it with zeros"
    )
    with pytest.raises(ValueError, match=message):
        quantize(torch.ones(2, 31), MXFP4)
    with pytest.raises(ValueError, match=message):
        quantize(torch.ones(31, 2), MXFP4, transpose=True)
    with pytest.raises(ValueError, match=message):
        quantize_both(torch.ones(31, 2), MXFP4)
    q = quantize(torch.full((2, 34), 3.0), MXFP4)
    assert q.scale.shape == (2, 2)
    assert dequantize(q).eq(3.0).all()


@pytest.fixture
def _deterministic() -> object:
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


@pytest.mark.case("B10")
@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_B10_deterministic_mode(fmt: Format) -> None:
    x = outlier_matrix((64, 96))
    first, first_t = quantize_both(x, fmt)
    again, again_t = quantize_both(x, fmt)
    assert_same(first, again)
    assert_same(first_t, again_t)
    assert_same(first, quantize(x, fmt))
    assert torch.equal(raw(dequantize(first)), raw(dequantize(again)))


@pytest.mark.case("B10")
@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("fmt", [Format(E4M3FN, "rowwise"), MXFP8, MXFP4], ids=str)
def test_B10_deterministic_mode_compiled(fmt: Format) -> None:
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q = quantize(x, fmt)
        return q.data, q.scale

    x = outlier_matrix((64, 96))
    assert_same(ScaledTensor(*compiled(x), fmt), quantize(x, fmt))
