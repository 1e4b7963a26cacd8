"""The package's own quantization launches, executed as gfx942 and gfx950 code, against the reference, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gcn_helpers import both_targets

triton = pytest.importorskip("triton", reason="compiling kernels needs Triton")

from octavo.check.gcn.torch_launch import executing  # noqa: E402
from octavo.formats import E2M1, E4M3FN, E5M2, Format  # noqa: E402
from octavo.quantize import reference, triton_launch  # noqa: E402

pytestmark = pytest.mark.amd

FORMATS = [
    ("rowwise", E4M3FN, "power_of_two"),
    ("rowwise", E5M2, "exact"),
    ("tensorwise", E4M3FN, "exact"),
    ("columnwise", E4M3FN, "exact"),
    ("1x128", E4M3FN, "exact"),
    ("128x1", E4M3FN, "exact"),
    ("128x128", E4M3FN, "exact"),
    ("1x32", E4M3FN, "rceil"),
    ("1x32", E4M3FN, "even"),
    ("1x32", E5M2, "floor"),
    ("1x32", E2M1, "rceil"),
]
formats = pytest.mark.parametrize(
    ("granularity", "element", "rounding"), FORMATS, ids=[f"{g}-{e.name}-{r}" for g, e, r in FORMATS]
)


def make_format(granularity: str, element: Any, rounding: str, target: str) -> Format:
    fmt = Format(element, granularity, rounding)
    return fmt.with_family("fnuz" if target == "gfx942" else "ocp")


def every_tie(fmt: Format) -> torch.Tensor:
    """float32: the element's values, the midpoints between them and the neighbours of those."""
    codes = torch.arange(256, dtype=torch.uint8)
    if fmt.element.packed == 2:
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float32)
    else:
        values = codes.view(fmt.element.dtype).float()
    values = torch.unique(torch.cat((values, -values))[torch.cat((values, -values)).isfinite()])
    ties = (values[1:] + values[:-1]) / 2
    inf = torch.tensor(float("inf"))
    return torch.cat((values, ties, ties.nextafter(inf), ties.nextafter(-inf)))


def inputs(fmt: Format, dtype: torch.dtype, rows: int, columns: int, specials: bool) -> torch.Tensor:
    """Magnitudes over the whole range by row; rows of ties whose amax is the element's maximum (scale 1); zeros,
    subnormals; with `specials`, every bfloat16 pattern, NaN and infinity among them."""
    gen = torch.Generator().manual_seed(0)
    spread = torch.randn(rows, 1, generator=gen) * 20
    x = torch.randn(rows, columns, generator=gen) * spread.exp()
    ties = every_tie(fmt)
    hard = ties.repeat(-(-4 * columns // len(ties)))[: 4 * columns].reshape(4, columns).clone()
    hard[:, ::32] = fmt.element.max
    x[:4] = hard[:rows]
    x[4] = 0
    x[5, ::2] = -0.0
    x[6] = 1e-40
    x = x.clamp(-3e38, 3e38).to(dtype)
    if specials:
        patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
        x[-(2**16 // columns) :] = (
            patterns[: x.shape[0] * columns].reshape(-1, columns)[: x.shape[0]].to(dtype)
        )
    return x


def same_bits(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...], fmt: Format) -> None:
    data, scale, want_data, want_scale = (t.contiguous() for t in (*got, *want))
    assert data.shape == want_data.shape
    assert scale.shape == want_scale.shape
    scale_bits, want_bits = (s.view(torch.uint8).numpy() for s in (scale, want_scale))
    if not fmt.is_mx:  # the payload of a NaN scale is not part of the contract
        nan = torch.isnan(want_scale)
        assert (torch.isnan(scale) == nan).all()
        scale_bits, want_bits = (torch.nan_to_num(s, nan=0.0).numpy() for s in (scale, want_scale))
    np.testing.assert_array_equal(scale_bits, want_bits)
    np.testing.assert_array_equal(data.view(torch.uint8).numpy(), want_data.view(torch.uint8).numpy())


@both_targets
@formats
def test_both_directions(target: str, granularity: str, element: Any, rounding: str) -> None:
    """Direct and transposed outputs of one input, 128 x 512, by the launch that `octavo::quantize` uses."""
    fmt = make_format(granularity, element, rounding, target)
    x = inputs(fmt, torch.bfloat16, 128, 512, specials=False)
    for transpose in (False, True):
        with executing(target) as reports:
            got = triton_launch.quantize(x, fmt, transpose)
        assert reports
        same_bits(got, reference.quantize(x, fmt, transpose), fmt)


@both_targets
@formats
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_a_million_values(
    target: str, granularity: str, element: Any, rounding: str, dtype: torch.dtype
) -> None:
    """2^20 values with every bfloat16 pattern among them."""
    fmt = make_format(granularity, element, rounding, target)
    x = inputs(
        fmt, dtype, 1024, 1024, specials=granularity not in ("tensorwise", "columnwise", "128x1", "128x128")
    )
    with executing(target):
        got = triton_launch.quantize(x, fmt, False)
    same_bits(got, reference.quantize(x, fmt, False), fmt)


@both_targets
def test_both_outputs_in_one_pass(target: str) -> None:
    fmt = make_format("1x128", E4M3FN, "exact", target)
    x = inputs(fmt, torch.bfloat16, 256, 256, specials=False)
    with executing(target) as reports:
        got = triton_launch.quantize_both(x, fmt, fmt)
    assert len(reports) == 1
    want = reference.quantize_both(x, fmt, fmt)
    same_bits(got[:2], want[:2], fmt)
    same_bits(got[2:], want[2:], fmt)


@both_targets
def test_strided_input(target: str) -> None:
    """A slice of a larger tensor and a transposed view are read as they lie."""
    fmt = make_format("rowwise", E4M3FN, "power_of_two", target)
    large = inputs(fmt, torch.bfloat16, 96, 640, specials=False)
    for x in (large[:, 64:320], large[:64].t()):
        with executing(target):
            got = triton_launch.quantize(x, fmt, False)
        same_bits(got, reference.quantize(x.contiguous(), fmt), fmt)


def test_the_wrong_family_is_caught() -> None:
    """gfx942 with OCP's maximum: the reference of the right family must disagree."""
    right = make_format("rowwise", E4M3FN, "exact", "gfx942")
    wrong = make_format("rowwise", E4M3FN, "exact", "gfx950")
    x = inputs(right, torch.bfloat16, 32, 512, specials=False)
    with executing("gfx942"):
        got = triton_launch.quantize(x, wrong, False)
    with pytest.raises(AssertionError):
        same_bits(got, reference.quantize(x, right), right)


def test_executing_refuses_other_targets() -> None:
    with pytest.raises(ValueError, match="sm_90"), executing("sm_90"):
        pass
