"""Grouped products through autograd: empty groups, tails, ragged sizes, gradients of any strides."""

from __future__ import annotations

import pytest
import torch
from training_support import (
    ALL_RECIPES,
    QUANTIZED_RECIPES,
    OpCount,
    assert_all_equal,
    penalty_backward,
    run_linear,
)

import octavo
from octavo.testing import poisoned_allocations, sqnr


def offsets(sizes: list[int]) -> torch.Tensor:
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


def tensors(
    rows: int, groups: int, k: int, n: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, ...]:
    """x [M, K], weight [G, N, K], bias [G, N], grad [M, N]."""
    generator = torch.Generator().manual_seed(rows + groups)
    shapes = ((rows, k), (groups, n, k), (groups, n), (rows, n))
    return tuple(torch.randn(s, generator=generator).to(dtype) for s in shapes)


def run_grouped(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    offs: torch.Tensor,
    grad: torch.Tensor,
    recipe: str,
) -> list[torch.Tensor]:
    """Output, dx, dw and, if there is a bias, its gradient."""
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias) if t is not None]
    out = octavo.grouped_mm(
        leaves[0], leaves[1].mT, offs, bias=None if bias is None else leaves[2], recipe=recipe
    )
    out.backward(grad)
    return [out.detach(), *(t.grad for t in leaves)]


def run_loop(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    offs: torch.Tensor,
    grad: torch.Tensor,
    recipe: str,
) -> list[torch.Tensor]:
    """The same, one linear layer an expert; zero where no group lies."""
    out, dx, dw = torch.zeros_like(grad), torch.zeros_like(x), torch.zeros_like(weight)
    db = torch.zeros(weight.shape[:2], dtype=x.dtype)
    start = 0
    for group, end in enumerate(offs.tolist()):
        if start < end:
            rows = slice(start, end)
            row_bias = None if bias is None else bias[group]
            found = run_linear(x[rows], weight[group], row_bias, grad[rows], recipe)
            out[rows], dx[rows], dw[group] = found[:3]
            if bias is not None:
                db[group] = found[3]
        start = end
    return [out, dx, dw, *(() if bias is None else (db,))]


def assert_near(found: list[torch.Tensor], expected: list[torch.Tensor], least: float = 50.0) -> None:
    """Equal up to the order of float32 sums: the codes are the same, a padded contraction adds zeros."""
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.shape == b.shape
        assert torch.equal(a.isnan(), b.isnan())
        assert sqnr(a, b) >= least, index


@pytest.mark.case("B18")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_b18_empty_experts_get_exactly_zero(recipe: str, dtype: torch.dtype) -> None:
    x, weight, bias, grad = tensors(14, 4, 64, 32, dtype)
    offs = offsets([5, 0, 9, 0])
    with poisoned_allocations():
        found = run_grouped(x, weight, bias, offs, grad, recipe)
    assert not found[2][[1, 3]].any()
    assert not found[3][[1, 3]].any()
    assert_near(found, run_loop(x, weight, bias, offs, grad, recipe))


@pytest.mark.case("B18")
@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_b18_at_the_sizes_of_the_report(recipe: str) -> None:
    sizes = [162, 0, 2577, 446, 0, 83]
    x, weight, _, grad = tensors(sum(sizes), 6, 48, 32, torch.bfloat16)
    with poisoned_allocations():
        found = run_grouped(x, weight, None, offsets(sizes), grad, recipe)
    assert not found[2][[1, 4]].any()
    assert_near(found, run_loop(x, weight, None, offsets(sizes), grad, recipe))


@pytest.mark.case("B19")
@pytest.mark.parametrize(
    ("recipe", "compiled"),
    [*((r, False) for r in ALL_RECIPES), *((r, True) for r in ("bf16", "rowwise"))],
)
def test_b19_no_expert_gets_a_token(recipe: str, compiled: bool) -> None:
    torch.compiler.reset()
    x = torch.empty(0, 256, requires_grad=True)
    weight = torch.randn(4, 224, 256, requires_grad=True)
    offs = torch.zeros(4, dtype=torch.int32)

    def step(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return octavo.grouped_mm(x, weight.mT, offs, recipe=recipe)

    call = torch.compile(step, backend="aot_eager", fullgraph=True) if compiled else step
    out = call(x, weight, offs)
    out.sum().backward()
    assert out.shape == (0, 224)
    assert x.grad.shape == (0, 256)
    assert torch.equal(weight.grad, torch.zeros_like(weight))


@pytest.mark.case("B19")
@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_b19_every_token_lies_in_the_tail(recipe: str) -> None:
    x, weight, bias, grad = tensors(7, 3, 64, 32)
    found = run_grouped(x, weight, bias, torch.zeros(3, dtype=torch.int32), grad, recipe)
    assert not any(t.any() for t in found)


@pytest.mark.case("B20")
@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_b20_the_tail_is_zero_whatever_it_holds(recipe: str) -> None:
    x, weight, bias, grad = tensors(12, 2, 16, 24)
    offs = torch.tensor([3, 8], dtype=torch.int32)
    expected = None
    for x_tail, g_tail in ((0.0, 0.0), (float("nan"), 0.0), (float("inf"), float("nan")), (1e30, 1e30)):
        x[8:], grad[8:] = x_tail, g_tail
        with poisoned_allocations():
            found = run_grouped(x, weight, bias, offs, grad, recipe)
        assert not found[0][8:].any()
        assert not found[1][8:].any()
        assert all(t.isfinite().all() for t in found)
        expected = expected or found
        assert_all_equal(found, expected)
    # Scattered back with weight 0, the tail adds nothing.
    target = torch.zeros(8, 24).index_add_(
        0, torch.arange(12) % 8, found[0] * (torch.arange(12) < 8)[:, None]
    )
    assert target.isfinite().all()


@pytest.mark.case("B21")
@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_b21_groups_of_any_size(recipe: str) -> None:
    sizes = [44, 20, 0, 64, 1]
    x, weight, bias, grad = tensors(sum(sizes), 5, 64, 96)
    found = run_grouped(x, weight, bias, offsets(sizes), grad, recipe)
    assert_near(found, run_loop(x, weight, bias, offsets(sizes), grad, recipe), 100.0)


@pytest.mark.case("B21")
@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_b21_no_scale_spans_two_groups(recipe: str) -> None:
    sizes = [44, 20, 0, 64, 1]
    offs = offsets(sizes)
    x, weight, bias, grad = tensors(sum(sizes), 5, 64, 96)
    before = run_grouped(x, weight, bias, offs, grad, recipe)
    x[44:64] *= 1000
    grad[44:64] *= 1000
    after = run_grouped(x, weight, bias, offs, grad, recipe)
    others = torch.ones(sum(sizes), dtype=torch.bool)
    others[44:64] = False
    for a, b in zip(after[:2], before[:2], strict=True):
        assert torch.equal(a[others], b[others])
    for a, b in zip(after[2:], before[2:], strict=True):
        assert torch.equal(a[[0, 2, 3, 4]], b[[0, 2, 3, 4]])
        assert not torch.equal(a[1], b[1])


@pytest.mark.parametrize("sizes", [[1], [3, 17, 0, 1], [128, 127, 129], [0, 0, 31]])
@pytest.mark.parametrize("recipe", QUANTIZED_RECIPES)
def test_odd_sizes(recipe: str, sizes: list[int]) -> None:
    x, weight, bias, grad = tensors(sum(sizes) + 3, len(sizes), 33, 17)
    found = run_grouped(x, weight, bias, offsets(sizes), grad, recipe)
    assert_near(found, run_loop(x, weight, bias, offsets(sizes), grad, recipe), 100.0)


@pytest.mark.case("B27")
@pytest.mark.parametrize(("rows", "k", "n"), [(8, 0, 16), (8, 16, 0), (0, 16, 16), (0, 0, 0)])
@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_b27_grouped_zero_lengths_give_zeros(recipe: str, rows: int, k: int, n: int) -> None:
    x, weight, _, grad = tensors(rows, 2, k, n)
    found = run_grouped(x, weight, None, offsets([rows // 2, rows - rows // 2]), grad, recipe)
    assert [t.shape for t in found] == [grad.shape, x.shape, weight.shape]
    assert not any(t.any() for t in found)


@pytest.mark.case("B44")
@pytest.mark.parametrize("kind", ["expanded", "one value", "strided", "transposed"])
@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_b44_grouped_takes_any_strides_of_the_gradient(recipe: str, kind: str) -> None:
    x, weight, bias, _ = tensors(40, 3, 64, 32, torch.bfloat16)
    grad = {
        "expanded": torch.randn(32).bfloat16().expand(40, 32),
        "one value": torch.ones((), dtype=torch.bfloat16).expand(40, 32),
        "strided": torch.randn(40, 64).bfloat16()[:, ::2],
        "transposed": torch.randn(32, 40).bfloat16().t(),
    }[kind]
    offs = offsets([11, 0, 25])
    found = run_grouped(x, weight, bias, offs, grad, recipe)
    assert_all_equal(found, run_grouped(x, weight, bias, offs, grad.contiguous(), recipe))


@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_weights_in_either_memory_order(recipe: str) -> None:
    x, weight, _, grad = tensors(20, 2, 48, 32)
    offs = offsets([12, 8])
    kn = weight.mT.contiguous().requires_grad_()
    out = octavo.grouped_mm(x, kn, offs, recipe=recipe)
    out.backward(grad)
    expected = run_grouped(x, weight, None, offs, grad, recipe)
    assert_all_equal([out.detach(), kn.grad], [expected[0], expected[2].mT])


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_frozen_experts_cost_no_weight_gradient(recipe: str) -> None:
    x, weight, _, grad = tensors(20, 2, 48, 32)
    x.requires_grad_()
    with OpCount() as count:
        octavo.grouped_mm(x, weight.mT, offsets([12, 8]), recipe=recipe).backward(grad)
    assert count.octavo()["scaled_grouped_mm"] == 2
    assert weight.grad is None


@pytest.mark.parametrize("recipe", QUANTIZED_RECIPES)
def test_grouped_without_gradients_quantizes_nothing_for_backward(recipe: str) -> None:
    x, weight, _, _ = tensors(20, 2, 48, 32)
    weight.requires_grad_()
    with torch.no_grad(), OpCount() as count:
        octavo.grouped_mm(x, weight.mT, offsets([12, 8]), recipe=recipe)
    assert sum(v for k, v in count.octavo().items() if k.startswith("quantize")) == 2


@pytest.mark.parametrize("recipe", QUANTIZED_RECIPES)
def test_a_second_derivative_of_a_grouped_product_is_refused(recipe: str) -> None:
    x, weight, _, _ = tensors(20, 2, 48, 32)
    x.requires_grad_()
    out = octavo.grouped_mm(x, weight.mT, offsets([12, 8]), recipe=recipe)
    with pytest.raises((RuntimeError, NotImplementedError)):
        penalty_backward(out, x)


@pytest.mark.parametrize("recipe", QUANTIZED_RECIPES)
def test_grouped_under_autocast(recipe: str) -> None:
    x, weight, bias, grad = tensors(20, 2, 48, 32)
    offs = offsets([12, 5])
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    with torch.autocast("cpu", torch.bfloat16):
        out = octavo.grouped_mm(leaves[0], leaves[1].mT, offs, bias=leaves[2], recipe=recipe)
    out.backward(grad.bfloat16())
    assert out.dtype == torch.bfloat16
    assert all(t.grad.dtype == torch.float32 for t in leaves)
    low = [t.detach().bfloat16() for t in (x, weight, bias)]
    expected = run_grouped(low[0], low[1], low[2], offs, grad.bfloat16(), recipe)
    assert_all_equal([out.detach(), *(t.grad.bfloat16() for t in leaves)], expected)


def test_bad_offsets_are_named() -> None:
    x, weight, _, _ = tensors(20, 2, 48, 32)
    for offs, match in (
        (offsets([12, 9]), "pass the 20 rows"),
        (torch.tensor([12, 8], dtype=torch.int32), "must not decrease"),
        (torch.tensor([12, 20]), "int32"),
        (offsets([5, 5, 5]), "offs"),
    ):
        with pytest.raises(ValueError, match=match):
            octavo.grouped_mm(x, weight.mT, offs)


@pytest.mark.parametrize("recipe", ["bf16", "rowwise"])
def test_bad_offsets_are_named_by_every_recipe(recipe: str) -> None:
    x, weight, _, _ = tensors(20, 2, 48, 32)
    with pytest.raises(ValueError, match="pass the 20 rows"):
        octavo.grouped_mm(x, weight.mT, offsets([12, 9]), recipe=recipe)


@pytest.mark.parametrize("recipe", ["rowwise", pytest.param("blockwise", marks=pytest.mark.slow)])
def test_compiled_grouped_products_equal_eager_ones(recipe: str) -> None:
    torch.compiler.reset()
    weight = torch.randn(3, 32, 64)
    compiled = torch.compile(run_step, backend="aot_eager", fullgraph=True, dynamic=None)
    for sizes in ([5, 0, 9], [40, 3, 2], [7, 64, 66]):
        x = torch.randn(sum(sizes) + 2, 64)
        assert_all_equal(
            list(run_leaves(compiled, x, weight, offsets(sizes), recipe)),
            list(run_leaves(run_step, x, weight, offsets(sizes), recipe)),
        )


def run_step(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor, recipe: str) -> torch.Tensor:
    return octavo.grouped_mm(x, weight.mT, offs, recipe=recipe)


def run_leaves(call, x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor, recipe: str):
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    out = call(x, weight, offs, recipe)
    return out.detach(), *torch.autograd.grad(out.square().sum(), (x, weight))
