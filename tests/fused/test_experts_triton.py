"""The expert MLP's producers: the reference against its definition, the Triton kernels against the reference.

Permuting is exact, and so is combining up to a fused multiply-add; SwiGLU may differ in the last bit of exp.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from octavo import dispatch, hardware
from octavo.formats import E4M3FN, E5M2, Format, ScaledTensor
from octavo.fused.experts import combine_rows, permute_quantize, swiglu_backward_rows
from octavo.quantize import alignment, quantize_grouped
from octavo.testing import poisoned_allocations, sqnr
from octavo.training.expert_spanning import route
from quantize_helpers import raw

interpreted = pytest.mark.skipif(not hardware.interpreted(), reason="runs in the interpreter's own process")
ONE, ROW = Format(E5M2, "tensorwise"), Format(E4M3FN, "rowwise", "power_of_two")
B1, MX8 = Format(E4M3FN, "1x128"), Format(E4M3FN, "1x32", "rceil")
FORMATS = [ONE, ROW, B1, MX8]
E = 5
SHAPES = [(23, 2, 40), (20, 3, 136)]
"""Tokens, choices, width; expert 3 gets none, and some choices are of no expert."""


@pytest.mark.slow
@pytest.mark.skipif(hardware.interpreted(), reason="is this very process")
def test_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    pytest.importorskip("ml_dtypes")
    command = [sys.executable, "-m", "pytest", "-x", "-W", "ignore::RuntimeWarning", __file__]
    run = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert " passed" in run.stdout or "100%" in run.stdout


@pytest.fixture(autouse=True)
def _right_conversions() -> None:
    if hardware.interpreted():
        from octavo.check import interpreter

        interpreter.install()


def case(
    tokens: int, choices: int, width: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, ...]:
    """x [T, D], rows [R], offs [E], back [T, k], scores [T, k]."""
    generator = torch.Generator().manual_seed(tokens)
    indices = torch.randint(-1, E, (tokens, choices), generator=generator)
    indices[indices == 3] = 1
    routing = route(indices, E)
    x = torch.randn(tokens, width, generator=generator) * 3
    scores = torch.rand(tokens, choices, generator=generator)
    return x.to(dtype), routing.order // choices, routing.offs, routing.back, scores


def both(op: str, call):
    with dispatch.use_kernels(**{op: "triton"}), poisoned_allocations():
        found = call()
    with dispatch.use_kernels(**{op: "reference"}):
        return found, call()


def assert_same(found: ScaledTensor | None, wanted: ScaledTensor | None, rows: int | None = None) -> None:
    """Codes and scales are equal, of operands as they lie in the first ``rows`` rows."""
    assert (found is None) == (wanted is None)
    if found is not None and wanted is not None:
        assert found.format == wanted.format
        assert torch.equal(raw(found.data)[:rows], raw(wanted.data)[:rows])
        assert torch.equal(raw(found.scale)[:rows], raw(wanted.scale)[:rows])
        if wanted.group_ends is not None:
            assert torch.equal(found.group_ends, wanted.group_ends)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_permuted_rows_are_those_of_quantize_grouped(fmt: Format, shape: tuple[int, int, int]) -> None:
    x, rows, offs, _, _ = case(*shape)
    direct, turned = permute_quantize(x, rows, offs, fmt, fmt, alignment(fmt))
    assert_same(direct, quantize_grouped(x[rows], offs, fmt), int(offs[-1]))
    assert_same(turned, quantize_grouped(x[rows], offs, fmt, transpose=True))
    whole = permute_quantize(x[rows], None, offs, fmt, None, alignment(fmt))
    assert_same(whole[0], direct)
    assert whole[1] is None


@interpreted
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_permutation_is_exact(fmt: Format) -> None:
    x, rows, offs, _, _ = case(*SHAPES[0])
    for direct, turned, indices in ((fmt, fmt, (rows, None)), (fmt, None, (rows,)), (None, fmt, (rows,))):
        for index in indices:
            source = x if index is not None else x[rows]
            found, wanted = both(
                "permute_quantize",
                lambda s=source, i=index, d=direct, t=turned: permute_quantize(
                    s, i, offs, d, t, alignment(fmt)
                ),
            )
            assert_same(found[0], wanted[0], int(offs[-1]))
            assert_same(found[1], wanted[1])


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [SHAPES[0], (3, 1, 600), (1, 4, 8)], ids=str)
@pytest.mark.parametrize("scored", [True, False])
def test_combining(scored: bool, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    x, rows, _, back, scores = case(*shape, dtype)
    y = x[rows]
    for values in (y, torch.cat((y, y), 1)[:, : y.shape[1]], y.T.contiguous().T):
        found, wanted = both(
            "combine_rows", lambda v=values: combine_rows(v, back, scores if scored else None)
        )
        assert found.dtype == dtype
        assert sqnr(found, wanted) > (100 if dtype == torch.float32 else 60)
    if scored:
        exact = (y.double()[back.flatten()].view(*back.shape, -1) * scores.double()[..., None]).sum(1)
        assert sqnr(wanted, exact) > (100 if dtype == torch.float32 else 45)


@interpreted
@pytest.mark.parametrize(
    ("fmt", "width", "dtype"),
    [*((f, 36, torch.bfloat16) for f in FORMATS), (ROW, 36, torch.float32), (ROW, 520, torch.bfloat16)],
    ids=str,
)
def test_swiglu_backward_over_rows(fmt: Format, width: int, dtype: torch.dtype) -> None:
    _, rows, offs, _, scores = case(9, 2, 8)
    generator = torch.Generator().manual_seed(width)
    h = (torch.randn(len(rows), 2 * width, generator=generator) * 2).to(dtype)
    grad = torch.randn(len(rows), width, generator=generator).to(dtype)
    align, last = alignment(fmt), int(offs[-1])
    for s in (scores.flatten(), None):
        found, wanted = both(
            "swiglu_backward_rows",
            lambda s=s: swiglu_backward_rows(h, grad, s, offs, fmt, fmt, fmt, align, keep=True),
        )
        for a, b in zip(found[:3], wanted[:3], strict=True):
            assert a.data.shape == b.data.shape
            assert a.scale.shape == b.scale.shape
            # Past the last end rows hold anything.
            n = last if a.group_ends is None else None
            assert (raw(a.data)[:n] != raw(b.data)[:n]).float().mean() < 0.005
        for a, b in zip(found[3:], wanted[3:], strict=True):
            assert a.dtype == b.dtype
            assert sqnr(a, b) > (100 if a.dtype == torch.float32 else 60)
        parts, _ = both(
            "swiglu_backward_rows",
            lambda s=s: swiglu_backward_rows(h, grad, s, offs, None, fmt, None, align),
        )
        assert parts[0] is None
        assert parts[2] is None
        assert torch.equal(raw(parts[1].data), raw(found[1].data))
        assert parts[4].numel() == parts[5].numel() == 0


@pytest.mark.parametrize("scored", [True, False])
def test_the_backward_is_that_of_autograd(scored: bool) -> None:
    h, s = torch.randn(12, 32).double(), torch.rand(12).double()
    h.requires_grad_(), s.requires_grad_()
    grad = torch.randn(12, 16)
    gate, up = h.chunk(2, -1)
    act = torch.nn.functional.silu(gate) * up * (s[:, None] if scored else 1.0)
    expected = torch.autograd.grad(act, (h, s) if scored else (h,), grad.double())
    offs = torch.tensor([12], dtype=torch.int32)
    out = swiglu_backward_rows(
        h.detach().float(),
        grad,
        s.detach().float() if scored else None,
        offs,
        None,
        None,
        None,
        16,
        keep=True,
    )
    assert sqnr(out[4], expected[0]) > 110
    assert sqnr(out[5], act) > 110
    assert out[3].shape == ((12,) if scored else (0,))
    assert not scored or sqnr(out[3], expected[1]) > 110
