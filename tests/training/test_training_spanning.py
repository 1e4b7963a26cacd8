"""MLPs that run as one Function: equal to their layers within rounding, and only where they may."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from training_support import QUANTIZED_RECIPES, OpCount, assert_all_equal, penalty_backward, run_net

import octavo
from octavo.testing import poisoned_allocations, sqnr
from octavo.training.spanning import mlp, register_mlp


class FeedForward(nn.Module):
    """The SwiGLU MLP that conversion knows by its name and its projections' names."""

    def __init__(self, width: int = 64, hidden: int = 160) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


register_mlp(FeedForward, "w1", "w3", "w2")


def gelu_feed_forward() -> type[nn.Module]:
    """Another class of the same name and projections with another activation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(nn.functional.gelu(self.w1(x)) * self.w3(x))

    return type("FeedForward", (FeedForward,), {"forward": forward})


def dropout_feed_forward() -> type[nn.Module]:
    """The same with the output scaled, as a residual branch might be."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.1 * FeedForward.forward(self, x)

    return type("FeedForward", (FeedForward,), {"forward": forward})


def make(recipe: str = "rowwise", spans: bool = True, cls: type[nn.Module] = FeedForward) -> nn.Module:
    torch.manual_seed(0)
    block = nn.Sequential(cls())
    octavo.convert(block, recipe, spans=spans)
    return block


def quality(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return min(sqnr(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("recipe", QUANTIZED_RECIPES)
def test_the_span_is_as_near_to_float32_as_its_layers(recipe: str) -> None:
    x = torch.randn(2, 48, 64)
    exact = run_net(make("bf16", spans=False), x)
    layers, span = (quality(run_net(make(recipe, spans=s), x), exact) for s in (False, True))
    assert span >= layers - 1.0
    assert span < 40


@pytest.mark.parametrize("shape", [(64,), (0, 64), (3, 64), (2, 1, 5, 64)])
@pytest.mark.parametrize("recipe", QUANTIZED_RECIPES)
def test_any_leading_shape(recipe: str, shape: tuple[int, ...]) -> None:
    block, x = make(recipe), torch.randn(shape)
    with poisoned_allocations():
        out, dx, *grads = run_net(block, x)
    assert out.shape == dx.shape == x.shape
    assert all(t.isfinite().all() for t in (out, dx, *grads))


@pytest.mark.parametrize("other", [gelu_feed_forward, dropout_feed_forward])
def test_a_class_that_merely_shares_the_name_keeps_its_forward(other) -> None:
    x = torch.randn(16, 64)
    assert_all_equal(run_net(make(cls=other()), x), run_net(make(cls=other(), spans=False), x))


def test_spans_are_reported_and_can_be_turned_off() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(FeedForward())
    report = octavo.convert(model)
    assert report.spans == ("0",)
    assert "one function" in str(report)
    assert octavo.convert(model, spans=False).spans == ()
    assert type(model[0]) is FeedForward
    x = torch.randn(8, 64)
    assert_all_equal(run_net(model, x), run_net(make(spans=False), x))


@pytest.mark.parametrize(
    "hook", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
             "register_full_backward_pre_hook"],
)  # fmt: skip
def test_hooks_on_a_projection_are_called(hook: str) -> None:
    block, calls = make(), []
    getattr(block[0].w3, hook)(lambda *a: calls.append(hook))
    run_net(block, torch.randn(8, 64))
    assert calls == [hook]


@pytest.mark.parametrize("frozen", ["w1", "w2", "w3", "all"])
def test_frozen_projections_get_no_gradient(frozen: str) -> None:
    block, reference, x = make(), make(), torch.randn(8, 64)
    run_net(reference, x)
    names = ("w1", "w2", "w3") if frozen == "all" else (frozen,)
    for name in names:
        getattr(block[0], name).weight.requires_grad_(False)
    _, dx, *_ = run_net(block, x)
    assert torch.equal(dx, run_net(reference, x)[1])
    for name in ("w1", "w2", "w3"):
        grad, expected = getattr(block[0], name).weight.grad, getattr(reference[0], name).weight.grad
        assert grad is None if name in names else torch.equal(grad, expected)


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize("conversions", [1, 2])
def test_copies_run_alike(clone, conversions: int) -> None:
    block, x = make(), torch.randn(8, 64)
    for _ in range(conversions - 1):
        octavo.convert(block, "rowwise")
    twin = clone(block)
    assert type(twin[0]) is type(block[0])
    assert isinstance(twin[0], FeedForward)
    assert_all_equal(run_net(twin, x), run_net(block, x))


def test_the_state_dict_is_unchanged() -> None:
    assert list(make().state_dict()) == list(nn.Sequential(FeedForward()).state_dict())


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("recipe", QUANTIZED_RECIPES)
def test_recomputation_is_bit_identical(recipe: str, reentrant: bool) -> None:
    block, x = make(recipe), torch.randn(8, 64)
    found = run_net(block, x, lambda z: checkpoint(block, z, use_reentrant=reentrant))
    assert_all_equal(found, run_net(block, x))


@pytest.mark.parametrize("recipe", ["rowwise", pytest.param("rowwise_with_gw_hp", marks=pytest.mark.slow)])
def test_compiled_equals_eager(recipe: str) -> None:
    torch.compiler.reset()
    block = make(recipe)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    for rows in (8, 24):
        x = torch.randn(rows, 64)
        assert_all_equal(run_net(block, x, compiled), run_net(block, x))


def test_a_monitor_sees_the_projections_of_a_span() -> None:
    block = make()
    with octavo.monitor(block) as watch:
        run_net(block, torch.randn(8, 64))
    assert {s.layer for s in watch.read()} == {"0.w1", "0.w2", "0.w3"}


def test_recomputation_takes_the_path_of_its_own_forward_while_watched() -> None:
    # As a pipeline schedule does: the next micro-batch's forward runs before this one's backward.
    block, x = make(), torch.randn(8, 64, requires_grad=True)
    wrapped = nn.Sequential(block)
    wrapped.forward = lambda z: checkpoint(block, z, use_reentrant=False)
    with octavo.monitor(wrapped, every=2):
        first, second = wrapped(x), wrapped(2 * x)
        first.sum().backward()
        second.sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_watching_a_span_changes_no_bit(recipe: str, dtype: torch.dtype) -> None:
    block, x = make(recipe).to(dtype), torch.randn(32, 64, dtype=dtype)
    expected = run_net(block, x)
    with octavo.monitor(block):
        assert_all_equal(run_net(block, x), expected)


@pytest.mark.parametrize("recipe", ["rowwise", "mxfp8"])
def test_weights_of_a_span_are_quantized_once_while_gradients_accumulate(recipe: str) -> None:
    block = make(recipe)

    def count(batches: int) -> int:
        with octavo.accumulate(), OpCount() as ops:
            for _ in range(batches):
                block(torch.randn(8, 64, requires_grad=True)).sum().backward()
        return sum(n for name, n in ops.octavo().items() if name in ("quantize", "quantize_concat"))

    assert count(3) == count(1)


def test_a_second_derivative_of_a_span_is_refused() -> None:
    x = torch.randn(8, 64, requires_grad=True)
    out = make()(x)
    with pytest.raises((RuntimeError, NotImplementedError)):
        penalty_backward(out, x)


@pytest.mark.parametrize("recipe", QUANTIZED_RECIPES)
def test_autocast_takes_a_span_of_float32_weights(recipe: str) -> None:
    block, x = make(recipe), torch.randn(8, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = block(x)
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16
    assert x.grad.dtype == block[0].w1.weight.grad.dtype == torch.float32


def test_errors_name_what_was_got() -> None:
    x, w1, w2 = torch.randn(4, 64), torch.randn(96, 64), torch.randn(64, 96)
    with pytest.raises(ValueError, match="got"):
        mlp(x, w1, w1, w2.T)
    with pytest.raises(ValueError, match="bf16"):
        mlp(x, w1, w1, w2, recipe="bf16")
