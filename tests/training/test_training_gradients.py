"""The linear Function against quantize and scaled_mm called by hand, bit for bit, and its edges."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from training_support import (
    ALL_RECIPES,
    CONTRACT,
    QUANTIZED_RECIPES,
    OpCount,
    assert_all_equal,
    linear_by_hand,
    penalty_backward,
    run_linear,
)

import octavo
from octavo.formats import MXFP8
from octavo.testing import outlier_matrix, poisoned_allocations

FORWARD_ONLY = octavo.Recipe("forward_only", output=octavo.RECIPES["rowwise"].output)
BACKWARD_ONLY = octavo.Recipe(
    "backward_only",
    grad_input=octavo.RECIPES["rowwise"].grad_input,
    grad_weight=octavo.RECIPES["rowwise"].grad_weight,
)
MIXED = octavo.Recipe(
    "mixed",
    octavo.Product(MXFP8, MXFP8),
    octavo.RECIPES["tensorwise"].grad_input,
    octavo.RECIPES["blockwise"].grad_weight,
)


def tensors(
    shape: tuple[int, ...], n: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[torch.Tensor, ...]:
    """x [..., K], weight [N, K], bias [N], grad [..., N]."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    return draw(*shape), draw(n, shape[-1]), draw(n), draw(*shape[:-1], n)


def check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, grad: torch.Tensor, recipe: str) -> None:
    found = run_linear(x, weight, bias, grad, recipe)
    assert_all_equal(list(found), list(linear_by_hand(x, weight, bias, grad, CONTRACT[recipe])))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_equals_the_products_called_by_hand(recipe: str, dtype: torch.dtype) -> None:
    check(*tensors((48, 160), 96, dtype), recipe)


@pytest.mark.parametrize("shape", [(160,), (5, 160), (2, 3, 160), (2, 1, 3, 160)])
@pytest.mark.parametrize("recipe", QUANTIZED_RECIPES)
def test_leading_dimensions(recipe: str, shape: tuple[int, ...]) -> None:
    check(*tensors(shape, 24), recipe)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (17, 3, 33), (3, 17, 129), (130, 15, 7), (31, 257, 65)])
@pytest.mark.parametrize("recipe", QUANTIZED_RECIPES)
def test_odd_sizes(recipe: str, m: int, n: int, k: int) -> None:
    check(*tensors((m, k), n), recipe)


@pytest.mark.parametrize("recipe", QUANTIZED_RECIPES)
def test_outliers_and_poisoned_memory(recipe: str) -> None:
    x, weight, bias, grad = tensors((96, 160), 64, torch.bfloat16)
    x, grad = outlier_matrix(x.shape, dtype=x.dtype), outlier_matrix(grad.shape, seed=1, dtype=x.dtype)
    expected = linear_by_hand(x, weight, bias, grad, CONTRACT[recipe])
    with poisoned_allocations():
        found = run_linear(x, weight, bias, grad, recipe)
    assert_all_equal(list(found), list(expected))


@pytest.mark.parametrize("shape", [(0, 32), (2, 0, 32), (0, 0, 32)])
@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_empty_batches(recipe: str, shape: tuple[int, ...]) -> None:
    x, weight, bias, grad = tensors(shape, 16)
    out, dx, dw, db = run_linear(x, weight, bias, grad, recipe)
    assert out.shape == grad.shape
    assert dx.shape == x.shape
    assert torch.equal(dw, torch.zeros_like(weight))
    assert torch.equal(db, torch.zeros_like(bias))


@pytest.mark.case("B27")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("m", "n", "k"), [(16, 16, 0), (0, 16, 0), (16, 0, 16), (0, 0, 16), (0, 16, 16)])
@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_b27_zero_lengths_give_zeros(recipe: str, m: int, n: int, k: int, bias: bool) -> None:
    x, weight, b, grad = tensors((m, k), n)
    out, dx, dw, _ = run_linear(x, weight, b if bias else None, grad, recipe)
    torch.testing.assert_close(out, torch.nn.functional.linear(x, weight, b if bias else None))
    for found, like in ((dx, x), (dw, weight)):
        assert found.shape == like.shape
        assert not found.isnan().any()
        assert not found.any()


@pytest.mark.parametrize("recipe", [FORWARD_ONLY, BACKWARD_ONLY, MIXED], ids=lambda r: r.name)
def test_a_recipe_of_ones_own(recipe: octavo.Recipe) -> None:
    x, weight, bias, grad = tensors((40, 160), 48)
    cpu = torch.device("cpu")
    products = [recipe.product(p, cpu) for p in ("output", "grad_input", "grad_weight")]
    contract = tuple(p and (p.a, p.b, p.fast_accum) for p in products)
    found = run_linear(x, weight, bias, grad, recipe)
    assert_all_equal(list(found), list(linear_by_hand(x, weight, bias, grad, contract)))


@pytest.mark.parametrize("recipe", QUANTIZED_RECIPES)
def test_the_fnuz_family_on_a_cpu(recipe: str) -> None:
    x, weight, bias, grad = tensors((40, 160), 48)
    contract = tuple(
        f and (f[0].with_family("fnuz"), f[1].with_family("fnuz"), f[2]) for f in CONTRACT[recipe]
    )
    found = run_linear(x, weight, bias, grad, replace(octavo.RECIPES[recipe], family="fnuz"))
    assert_all_equal(list(found), list(linear_by_hand(x, weight, bias, grad, contract)))
    if recipe in ("tensorwise", "blockwise"):
        assert not torch.equal(found[0], run_linear(x, weight, bias, grad, recipe)[0])


@pytest.mark.parametrize(
    ("option", "expected"),
    [("default", "yes no no"), ("all", "yes yes yes"), ("none", "no no no")],
)
def test_fast_accum_is_an_option_of_any_recipe(option: str, expected: str) -> None:
    recipe = octavo.get_recipe("rowwise", fast_accum=option)
    seen = []

    class Permissions(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "octavo.scaled_mm" in str(func):
                seen.append("yes" if args[8] else "no")
            return func(*args, **(kwargs or {}))

    with Permissions():
        run_linear(*tensors((16, 32), 16), recipe)
    assert " ".join(seen) == expected


# ---- gradients that come in unusual strides ---------------------------------------------------------------


@pytest.mark.case("B44")
@pytest.mark.parametrize("kind", ["expanded", "one value", "strided", "transposed"])
@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_b44_linear_takes_any_strides_of_the_gradient(recipe: str, kind: str) -> None:
    x, weight, bias, _ = tensors((2, 24, 64), 32, torch.bfloat16)
    grad = {
        "expanded": torch.randn(32).bfloat16().expand(2, 24, 32),
        "one value": torch.ones((), dtype=torch.bfloat16).expand(2, 24, 32),
        "strided": torch.randn(2, 24, 64).bfloat16()[..., ::2],
        "transposed": torch.randn(2, 32, 24).bfloat16().mT,
    }[kind]
    found = run_linear(x, weight, bias, grad, recipe)
    assert_all_equal(list(found), list(run_linear(x, weight, bias, grad.contiguous(), recipe)))


@pytest.mark.case("B44")
@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_b44_backward_of_a_plain_sum(recipe: str) -> None:
    x, weight, bias, _ = tensors((2, 24, 64), 32)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    octavo.linear(*leaves, recipe=recipe).sum().backward()
    expected = run_linear(x, weight, bias, torch.ones(2, 24, 32), recipe)
    assert_all_equal([t.grad for t in leaves], list(expected[1:]))


@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_inputs_of_any_strides_are_read_and_not_written(recipe: str) -> None:
    base = torch.randn(96, 24)
    weight, grad = torch.randn(64, 16).T.contiguous().T, torch.randn(24, 64)
    views = [base.t()[:, 16:32], base[:24, :16], torch.randn(1, 16).expand(24, 16)]
    for x in views:
        before = x.clone()
        found = run_linear(x, weight, None, grad, recipe)
        expected = run_linear(x.contiguous(), weight.contiguous(), None, grad, recipe)
        assert_all_equal(list(found[:3]), list(expected[:3]))
        assert torch.equal(x, before)


# ---- what is computed and kept ----------------------------------------------------------------------------


def count_ops(recipe: str | octavo.Recipe, needs: tuple[bool, bool, bool]) -> dict[str, int]:
    x, weight, bias, grad = tensors((16, 32), 16)
    for tensor, need in zip((x, weight, bias), needs, strict=True):
        tensor.requires_grad_(need)
    with OpCount() as count:
        out = octavo.linear(x, weight, bias, recipe=recipe)
        out.backward(grad)
    for tensor, need in zip((x, weight, bias), needs, strict=True):
        assert (tensor.grad is not None) == need
    return count.octavo()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_all_gradients_read_each_activation_once(recipe: str) -> None:
    assert count_ops(recipe, (True, True, True)) == {"quantize_both": 2, "quantize": 2, "scaled_mm": 3}


@pytest.mark.parametrize("recipe", QUANTIZED_RECIPES)
def test_a_frozen_weight_costs_no_weight_gradient(recipe: str) -> None:
    assert count_ops(recipe, (True, False, True)) == {"quantize": 4, "scaled_mm": 2}


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_an_input_without_gradient_costs_no_input_gradient(recipe: str) -> None:
    assert count_ops(recipe, (False, True, False)) == {"quantize_both": 1, "quantize": 2, "scaled_mm": 2}


@pytest.mark.parametrize("recipe", QUANTIZED_RECIPES)
def test_a_bias_alone_costs_no_product_backward(recipe: str) -> None:
    assert count_ops(recipe, (False, False, True)) == {"quantize": 2, "scaled_mm": 1}


@pytest.mark.parametrize("recipe", QUANTIZED_RECIPES)
def test_without_gradients_nothing_is_quantized_for_backward(recipe: str) -> None:
    layer = octavo.Linear(32, 16, recipe=recipe)
    with torch.no_grad(), OpCount() as count:
        layer(torch.randn(8, 32))
    assert count.octavo() == {"quantize": 2, "scaled_mm": 1}


def saved_bytes(recipe: str | octavo.Recipe, freeze: bool) -> int:
    x, weight, bias, _ = tensors((512, 64), 16, torch.bfloat16)
    x.requires_grad_()
    weight.requires_grad_(not freeze)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        octavo.linear(x, weight, bias, recipe=recipe)
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    return sum(kept.values()) - weight.untyped_storage().nbytes()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_backward_keeps_the_input_in_8_bits(recipe: str) -> None:
    codes = 512 * 64
    assert codes <= saved_bytes(recipe, freeze=False) <= codes + 4 * 64 * 16


@pytest.mark.parametrize("recipe", QUANTIZED_RECIPES)
def test_a_frozen_weight_keeps_nothing_of_the_input(recipe: str) -> None:
    assert saved_bytes(recipe, freeze=True) == 0


@pytest.mark.parametrize("recipe", QUANTIZED_RECIPES)
def test_backward_twice_through_one_graph(recipe: str) -> None:
    x, weight, bias, grad = tensors((16, 32), 16)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    out = octavo.linear(*leaves, recipe=recipe)
    first = torch.autograd.grad(out, leaves, grad, retain_graph=True)
    assert_all_equal(list(torch.autograd.grad(out, leaves, grad)), list(first))


@pytest.mark.parametrize("recipe", QUANTIZED_RECIPES)
def test_a_second_derivative_is_refused_with_an_error(recipe: str) -> None:
    x, weight, bias, _ = tensors((16, 32), 16)
    x.requires_grad_()
    weight.requires_grad_()
    out = octavo.linear(x, weight, bias, recipe=recipe)
    with pytest.raises((RuntimeError, NotImplementedError)):
        penalty_backward(out, x)


def test_small_gradients_do_not_vanish() -> None:
    x, weight, _, _ = tensors((32, 64), 32)
    x.requires_grad_()
    octavo.linear(x, weight, recipe="rowwise").backward(torch.full((32, 32), 1e-7))
    expected = torch.full((32, 32), 1e-7) @ weight
    assert (x.grad - expected).norm() < 0.05 * expected.norm()


# ---- errors -----------------------------------------------------------------------------------------------


def test_errors_name_what_was_got() -> None:
    x, weight = torch.randn(4, 32), torch.randn(16, 32)
    for bad_x, bad_weight in (
        (x[:, :31], weight),
        (x.double(), weight),
        (x, weight[None]),
        (x[0, 0], weight),
    ):
        with pytest.raises(ValueError, match="got x"):
            octavo.linear(bad_x, bad_weight)
    with pytest.raises(ValueError, match="bias"):
        octavo.linear(x, weight, torch.zeros(15))
    with pytest.raises(ValueError, match="unknown recipe 'fp8'"):
        octavo.linear(x, weight, recipe="fp8")
    with pytest.raises(ValueError, match="family"):
        octavo.get_recipe("rowwise", family="nvidia")
    with pytest.raises(ValueError, match="fast_accum"):
        octavo.get_recipe("rowwise", fast_accum="yes")


def test_the_meta_device_gives_shapes() -> None:
    layer = octavo.Linear(32, 16, device="meta")
    assert layer(torch.empty(2, 8, 32, device="meta")).shape == (2, 8, 16)


# ---- autocast ---------------------------------------------------------------------------------------------


@pytest.mark.case("B12")
@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward outside"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", [FORWARD_ONLY, *QUANTIZED_RECIPES], ids=lambda r: getattr(r, "name", r))
def test_b12_autocast_with_any_backward(
    recipe: octavo.Recipe | str, dtype: torch.dtype, inside: bool
) -> None:
    layer = octavo.Linear(64, 64, recipe=recipe)
    x = torch.randn(8, 64, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    with torch.autocast("cpu", torch.bfloat16, enabled=inside):
        y.sum().backward()
    assert y.dtype == torch.bfloat16
    assert x.grad.dtype == dtype
    assert layer.weight.grad.dtype == layer.bias.grad.dtype == torch.float32
    expected = run_linear(
        x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16(), torch.ones_like(y), recipe
    )
    found = [y.detach(), x.grad.bfloat16(), layer.weight.grad.bfloat16(), layer.bias.grad.bfloat16()]
    assert_all_equal(found, list(expected))


@pytest.mark.parametrize("recipe", QUANTIZED_RECIPES)
def test_autocast_does_not_reach_inside_the_product(recipe: str) -> None:
    x, weight, bias, _ = tensors((40, 160), 48)
    (fmt_x, fmt_w, _), *_ = CONTRACT[recipe]
    a, b = octavo.quantize(x, fmt_x), octavo.quantize(weight, fmt_w)
    expected = octavo.scaled_mm(a, b, bias=bias, out_dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = octavo.scaled_mm(a, b, bias=bias, out_dtype=torch.float32)
    assert torch.equal(found, expected)


# ---- determinism ------------------------------------------------------------------------------------------


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.case("B10")
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_b10_linear_in_deterministic_mode(recipe: str) -> None:
    inputs = tensors((40, 96), 64)
    first = run_linear(*inputs, recipe)
    assert_all_equal(list(run_linear(*inputs, recipe)), list(first))


@pytest.mark.case("B10")
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_b10_grouped_in_deterministic_mode(recipe: str) -> None:
    x, w = torch.randn(29, 64, requires_grad=True), torch.randn(3, 64, 48, requires_grad=True)
    offs = torch.tensor([9, 9, 25], dtype=torch.int32)

    def run() -> list[torch.Tensor]:
        out = octavo.grouped_mm(x, w, offs, recipe=recipe)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), (x, w))]

    assert_all_equal(run(), run())
