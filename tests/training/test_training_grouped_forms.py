"""Grouped products in both forms of ``torch._grouped_mm``: floors, no look at the sizes, no recompilation."""

from __future__ import annotations

import pytest
import torch
from test_training_grouped import assert_near, offsets, run_grouped, tensors
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from training_support import ALL_RECIPES, QUANTIZED_RECIPES, assert_all_equal

import octavo
from octavo.testing import poisoned_allocations, sqnr

FLOORS = {
    "rowwise": (27.0, 25.0, 24.0),
    "rowwise_block_weight": (27.0, 25.0, 24.0),
    "blockwise": (27.0, 26.0, 26.0),
    "mxfp8": (27.0, 26.0, 26.0),
}
"""Least SQNR in dB of output, grad_input and grad_weight against float64."""
SIZES = [300, 0, 41, 1, 170]


def wide(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    """Output, dx, dw in float64."""
    x, weight, grad = x.double(), weight.double(), grad.double()
    out, dx, dw = torch.zeros_like(grad), torch.zeros_like(x), torch.zeros_like(weight)
    ends = offs.tolist()
    for group, (start, end) in enumerate(zip([0, *ends], ends)):
        rows = slice(start, end)
        out[rows], dx[rows] = x[rows] @ weight[group].T, grad[rows] @ weight[group]
        dw[group] = grad[rows].T @ x[rows]
    return [out, dx, dw]


def run_outer(
    g: torch.Tensor, x: torch.Tensor, offs: torch.Tensor, grad: torch.Tensor, recipe: str
) -> list[torch.Tensor]:
    """``g[rows].T @ x[rows]`` [G, N, K] and the gradients of g and x."""
    g, x = g.detach().requires_grad_(), x.detach().requires_grad_()
    out = octavo.grouped_mm(g.T, x, offs, recipe=recipe)
    return [out.detach(), *torch.autograd.grad(out, (g, x), grad)]


@pytest.mark.parametrize("recipe", FLOORS)
def test_floors_against_float64(recipe: str) -> None:
    x, weight, _, grad = tensors(sum(SIZES) + 9, 5, 256, 384, torch.bfloat16)
    offs = offsets(SIZES)
    found = run_grouped(x, weight, None, offs, grad, recipe)
    for actual, expected, floor in zip(found, wide(x, weight, offs, grad), FLOORS[recipe], strict=True):
        assert sqnr(actual, expected) >= floor


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_over_groups_is_the_weight_gradient_by_rows(recipe: str, dtype: torch.dtype) -> None:
    sizes = [44, 0, 20, 1]
    x, weight, _, g = tensors(sum(sizes) + 3, 4, 64, 32, dtype)
    offs = offsets(sizes)
    with poisoned_allocations():
        by_rows = run_grouped(x, weight, None, offs, g, recipe)
        found = run_outer(g, x, offs, weight, recipe)
    # The three products again: grad_weight, then output and grad_input with the gradient in place of the weight.
    assert_all_equal(found, [by_rows[2], by_rows[0], by_rows[1]])
    assert not found[0][1].any()
    assert not found[1][65:].any()
    assert not found[2][65:].any()


def test_over_groups_in_high_precision_is_pytorchs_own() -> None:
    x, _, _, g = tensors(48, 2, 64, 32, torch.bfloat16)
    offs = offsets([16, 32])
    expected = torch._grouped_mm(g.T.contiguous(), x, offs=offs)
    assert sqnr(octavo.grouped_mm(g.T, x, offs, recipe="bf16"), expected) > 50


@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_the_tail_of_a_product_over_groups_adds_nothing(recipe: str) -> None:
    x, weight, _, g = tensors(12, 2, 16, 24)
    offs = torch.tensor([3, 8], dtype=torch.int32)
    expected = None
    for tail in (0.0, float("nan"), float("inf")):
        x[8:], g[8:] = tail, tail
        found = run_outer(g, x, offs, weight, recipe)
        expected = expected or found
        assert_all_equal(found, expected)
    assert all(t.isfinite().all() for t in expected)


@pytest.mark.parametrize("recipe", QUANTIZED_RECIPES)
def test_over_groups_under_autocast(recipe: str) -> None:
    x, weight, _, g = tensors(20, 2, 48, 32)
    offs = offsets([12, 5])
    leaves = [t.detach().requires_grad_() for t in (g, x)]
    with torch.autocast("cpu", torch.bfloat16):
        out = octavo.grouped_mm(leaves[0].T, leaves[1], offs, recipe=recipe)
    out.backward(weight.bfloat16())
    low = run_outer(g.bfloat16(), x.bfloat16(), offs, weight.bfloat16(), recipe)
    assert_all_equal([out.detach(), *(t.grad.bfloat16() for t in leaves)], low)
    assert all(t.grad.dtype == torch.float32 for t in leaves)


@pytest.mark.parametrize("recipe", ["bf16", "rowwise"])
def test_mixed_dtypes_are_refused_as_f_linear_refuses_them(recipe: str) -> None:
    x, weight, bias, g = tensors(20, 2, 48, 32)
    offs = offsets([12, 8])
    with pytest.raises(ValueError, match="of one dtype"):
        octavo.grouped_mm(x.bfloat16(), weight.mT, offs, recipe=recipe)
    with pytest.raises(ValueError, match="of one dtype"):
        octavo.grouped_mm(g.T.bfloat16(), x, offs, recipe=recipe)
    with pytest.raises(ValueError, match="bias must be"):
        octavo.grouped_mm(x, weight.mT, offs, bias=bias.bfloat16(), recipe=recipe)


def test_other_shapes_are_named() -> None:
    x, weight, bias, g = tensors(20, 2, 48, 32)
    offs = offsets([12, 8])
    for a, b, more in ((g.T, x, {"bias": bias}), (x[None], weight.mT, {}), (weight, x, {})):
        with pytest.raises(ValueError, match="grouped_mm takes"):
            octavo.grouped_mm(a, b, offs, **more)
    with pytest.raises(ValueError, match="contracting over"):
        octavo.grouped_mm(g.T[:, 1:], x, offs)


@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_the_host_reads_no_group_size(recipe: str) -> None:
    """On fake tensors whatever would wait for the device raises; so forward and backward ask for no value."""
    with FakeTensorMode():
        x, weight, g = torch.empty(100, 64), torch.empty(4, 32, 64), torch.empty(100, 32)
        bias, offs = torch.empty(4, 32), torch.empty(4, dtype=torch.int32)
        with pytest.raises(DataDependentOutputException):
            offs.tolist()
        out, dx, dw, db = run_grouped(x, weight, bias, offs, g, recipe)
        outer, dg, dx_outer = run_outer(g, x, offs, weight, recipe)
    assert [t.shape for t in (out, dx, dw, db)] == [g.shape, x.shape, weight.shape, bias.shape]
    assert [t.shape for t in (outer, dg, dx_outer)] == [weight.shape, g.shape, x.shape]


@pytest.mark.parametrize(
    "recipe", ["rowwise", *(pytest.param(r, marks=pytest.mark.slow) for r in ("bf16", "mxfp8"))]
)
def test_sixteen_token_counts_compile_nothing_anew(recipe: str) -> None:
    torch.compiler.reset()
    weight = torch.randn(3, 32, 64)
    counter = CompileCounterWithBackend("aot_eager")

    def step(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return octavo.grouped_mm(x, weight.mT, offs, recipe=recipe)

    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
    for n in range(16):
        sizes = [n * n, (5 * n) % 7, 40 + n]
        x, w = torch.randn(sum(sizes) + 2, 64).requires_grad_(), weight.clone().requires_grad_()
        out = compiled(x, w, offsets(sizes))
        found = torch.autograd.grad(out.square().sum(), (x, w))
        eager = step(x, w, offsets(sizes))
        assert_near(
            [out.detach(), *found],
            [eager.detach(), *torch.autograd.grad(eager.square().sum(), (x, w))],
            100.0,
        )
        if n == 1:
            first = counter.frame_count
    # The first count may fix what the second makes variable; none after them compiles anything.
    assert counter.frame_count == first <= 2
