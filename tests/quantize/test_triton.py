"""The Triton kernels, run in Triton's interpreter, against the reference, bit for bit.

Whether Triton interprets is settled when it is imported, so the tests below run in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from octavo import dispatch, hardware
from octavo.formats import E2M1, E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, Format, ScaledTensor
from octavo.quantize import alignment, quantize, quantize_both, quantize_grouped
from quantize_helpers import FORMATS, assert_same

interpreted = pytest.mark.skipif(not hardware.interpreted(), reason="runs in the interpreter's own process")
MAIN_FORMATS = [
    Format(E4M3FN, "tensorwise"),
    Format(E4M3FN, "rowwise", "power_of_two"),
    Format(E5M2, "columnwise"),
    Format(E4M3FNUZ, "1x128"),
    Format(E5M2FNUZ, "128x1", "power_of_two"),
    Format(E4M3FN, "128x128"),
    Format(E4M3FN, "1x32", "rceil"),
    Format(E5M2, "1x32", "floor"),
    Format(E2M1, "1x32", "rceil"),
    Format(E2M1, "1x32", "even"),
]
SHAPES = [(33, 70), (2, 66, 140), (2, 0), (0, 2)]


@pytest.mark.skipif(hardware.interpreted(), reason="is this very process")
@pytest.mark.parametrize(
    "marks", ["not exhaustive", pytest.param("exhaustive", marks=pytest.mark.exhaustive)]
)
def test_kernels_in_the_interpreter(marks: str) -> None:
    pytest.importorskip("triton")
    pytest.importorskip("ml_dtypes")
    options = ["-x", "-m", marks, "-W", "ignore::RuntimeWarning"]
    command = [sys.executable, "-m", "pytest", *options, __file__]
    run = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert " passed" in run.stdout


@pytest.fixture(autouse=True)
def _right_conversions() -> None:
    if hardware.interpreted():
        from octavo.check import interpreter

        interpreter.install()


def _hard(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Magnitudes over the whole range of float32, ties at a multiplier of one, both zeros, NaN and inf."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    wild = torch.exp2(torch.randint(-148, 127, (*shape[:-1], 1), generator=generator).double())
    ties = torch.randint(-64, 65, shape, generator=generator) * 0.125
    choice = torch.randint(0, 3, (*shape[:-1], 1), generator=generator)
    x = torch.where(choice == 0, x, torch.where(choice == 1, (x.double() * wild).float(), ties)).flatten()
    x[::31] = 448.0
    x[::29], x[::37] = 0.0, -0.0
    if x.numel() > 1000:
        x[x.numel() // 3], x[x.numel() // 2] = float("nan"), -float("inf")
    return x.view(shape).to(dtype)


def _fits(x: torch.Tensor, fmt: Format, transpose: bool) -> bool:
    return x.shape[-2 if transpose else -1] % fmt.element.packed == 0


def _check(x: torch.Tensor, fmt: Format) -> None:
    for transpose in (False, True):
        if _fits(x, fmt, transpose):
            with dispatch.use_kernels(quantize="triton"):
                found = quantize(x, fmt, transpose=transpose)
            with dispatch.use_kernels(quantize="reference"):
                assert_same(found, quantize(x, fmt, transpose=transpose))


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("fmt", MAIN_FORMATS, ids=str)
def test_equals_the_reference(fmt: Format, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        _check(_hard(*shape, dtype=dtype), fmt)


@interpreted
@pytest.mark.exhaustive
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_equals_the_reference_in_every_format(fmt: Format) -> None:
    for seed, dtype in enumerate((torch.float32, torch.float16)):
        _check(_hard(3, 130, 262, dtype=dtype, seed=seed), fmt)


@interpreted
@pytest.mark.case("B08")
@pytest.mark.parametrize("fmt", MAIN_FORMATS[1:7:5], ids=str)
def test_any_strides(fmt: Format) -> None:
    base = _hard(20, 3, 64, dtype=torch.bfloat16)
    views = (
        base.permute(1, 0, 2),
        base.permute(2, 1, 0)[..., ::2],
        base[0].mT,
        base[0][:, 1:63:3],
        base[:, :1].expand(20, 4, 64),
    )
    for view in views:
        before = view.clone()
        _check(view, fmt)
        assert torch.equal(view.contiguous().view(torch.int16), before.contiguous().view(torch.int16))


@interpreted
def test_rows_longer_than_a_program_holds() -> None:
    x = _hard(2, 33000, dtype=torch.bfloat16)
    with dispatch.use_kernels(quantize="triton"):
        found = quantize(x, MAIN_FORMATS[1])
    with dispatch.use_kernels(quantize="reference"):
        assert_same(found, quantize(x, MAIN_FORMATS[1]))


@interpreted
@pytest.mark.parametrize("rows_first", [0, 1])
@pytest.mark.parametrize(
    ("fmt", "transposed"), [(1, 1), (0, 0), (1, 0), (5, 5), (3, 3), (6, 6), (8, 8), (1, 3), (2, 6)]
)
def test_both_layouts(fmt: int, transposed: int, rows_first: int) -> None:
    from octavo.quantize import launch_tables

    formats = MAIN_FORMATS[fmt], MAIN_FORMATS[transposed]
    config = {"enabled": rows_first, "rows": 2, "warps": 4, "programs": 3}
    x = _hard(2, 34, 70, dtype=torch.bfloat16)
    with (
        dispatch.use_kernels(quantize_both="triton"),
        launch_tables.override({"rows_first": {"any": config}}),
    ):
        found = quantize_both(x, *formats)
    with dispatch.use_kernels(quantize_both="reference"):
        for a, b in zip(found, quantize_both(x, *formats), strict=True):
            assert_same(a, b)


@interpreted
@pytest.mark.parametrize(
    ("fmt", "transposed", "apart"),
    [(None, 1, 0), (None, 0, 0), (None, 3, 0), (None, 6, 0), (None, 5, 0), (1, 1, 0), (3, 3, 0), (6, 6, 0), (0, 0, 2),
     (5, 5, 2), (2, 3, 2), (1, 6, 0)],
)  # fmt: skip
@pytest.mark.parametrize("shape", [(2, 36, 38), (36, 0)], ids=str)
def test_quads_of_rows(fmt: int | None, transposed: int, apart: int, shape: tuple[int, ...]) -> None:
    """Four loads of every fourth row give what the tiles give: whole words, partial tiles, no columns."""
    from octavo.quantize import launch_tables, triton_launch

    first, second = None if fmt is None else MAIN_FORMATS[fmt], MAIN_FORMATS[transposed]
    config = {
        "block_m": 32,
        "block_k": 32,
        "warps": 4,
        "group": 2,
        "reverse": 1,
        "evict": 0,
        "quads": 1,
        "apart": apart,
    }
    buckets = {f"{kind}/{f.granularity}": config for kind in ("both", "turned") for f in MAIN_FORMATS}
    x = _hard(*shape, dtype=torch.bfloat16)
    with launch_tables.override({"tiles": buckets, "rows_first": {"any": {"enabled": 0}}}):
        found = triton_launch.quantize_optional(x, first, second)
    with dispatch.use_kernels(quantize="reference"):
        for (data, scale), f, turn in zip(found, (first, second), (False, True), strict=True):
            if f is not None:
                assert_same(ScaledTensor(data, scale, f), quantize(x, f, transpose=turn))


@interpreted
@pytest.mark.case("B21")
@pytest.mark.parametrize("fmt", [MAIN_FORMATS[i] for i in (0, 1, 5, 6, 8)], ids=str)
@pytest.mark.parametrize("sizes", [[5, 0, 9, 0], [44, 20, 0, 64, 1], [0, 0], [70]], ids=str)
def test_ragged_groups(fmt: Format, sizes: list[int]) -> None:
    offs = torch.tensor(sizes).cumsum(0).to(torch.int32)
    x = _hard(sum(sizes) + 3, 38, dtype=torch.bfloat16)
    x[sum(sizes) :] = float("nan")

    def run(kernel: str, transpose: bool) -> ScaledTensor:
        with dispatch.use_kernels(quantize_grouped=kernel):
            return quantize_grouped(
                x, offs, fmt, transpose=transpose, align=alignment(fmt) if transpose else None
            )

    for transpose in (False, True) if fmt.granularity == "tensorwise" else (True,):
        assert_same(run("triton", transpose), run("reference", transpose))


def test_cpu_tensors_get_a_reason_without_the_interpreter() -> None:
    if hardware.interpreted():
        pytest.skip("the interpreter serves CPU tensors")
    verdict = dispatch.explain("quantize", torch.zeros(2, 2), MAIN_FORMATS[0], False)[0]
    assert verdict.kernel == "triton"
    assert verdict.reason
    assert not verdict.chosen
