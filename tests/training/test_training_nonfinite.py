"""What a monitor names as the first operand that held NaN or inf, with such values planted."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from training_support import QUANTIZED_RECIPES

import octavo
from octavo.training.spanning import register_mlp


class Scrambled(nn.Module):
    """Layers that run as first, middle, last and are listed the other way round; ``plant`` lies between."""

    def __init__(self, recipe: str) -> None:
        super().__init__()
        self.last = octavo.Linear(64, 64, bias=False, recipe=recipe)
        self.middle = octavo.Linear(64, 64, bias=False, recipe=recipe)
        self.first = octavo.Linear(64, 64, bias=False, recipe=recipe)
        self.forward_factor = self.backward_factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.middle(self.first(x) * self.forward_factor)
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: grad * self.backward_factor)
        return self.last(hidden)


def first_of(net: nn.Module, x: torch.Tensor, call: Any = None) -> tuple[str, str, str] | None:
    with octavo.monitor(net) as watch:
        (net if call is None else call)(x).square().sum().backward()
    found = watch.first_nonfinite()
    return None if found is None else (found.layer, found.product, found.operand)


@pytest.mark.parametrize("recipe", QUANTIZED_RECIPES)
@pytest.mark.parametrize("where", ["input", "first", "middle", "last", "between", "backward"])
def test_the_first_nonfinite_is_the_first_that_ran(recipe: str, where: str) -> None:
    net, x = Scrambled(recipe), torch.randn(32, 64)
    x.requires_grad_()
    assert first_of(net, x) is None
    with torch.no_grad():
        if where == "input":
            x[3, 4] = math.inf
        elif where == "between":
            net.forward_factor = math.inf
        elif where == "backward":
            net.backward_factor = math.nan
        else:
            getattr(net, where).weight[0, 5] = -math.inf
    expected = {
        "input": ("first", "output", "input"),
        "between": ("middle", "output", "input"),
        "backward": ("middle", "grad_input", "grad_output"),
    }
    assert first_of(net, x) == expected.get(where, (where, "output", "weight"))


def test_a_bad_weight_of_a_layer_that_runs_in_backward_first_is_named_before_its_gradient() -> None:
    # Both are bad: the forward product ran before any gradient did.
    net, x = Scrambled("rowwise"), torch.randn(8, 64)
    net.backward_factor = math.inf
    with torch.no_grad():
        net.last.weight[0, 0] = math.nan
    assert first_of(net, x) == ("last", "output", "weight")


class FeedForward(nn.Module):
    """A SwiGLU MLP that ``convert`` runs as one span."""

    def __init__(self) -> None:
        super().__init__()
        self.w2 = nn.Linear(96, 64, bias=False)
        self.w3, self.w1 = nn.Linear(64, 96, bias=False), nn.Linear(64, 96, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


register_mlp(FeedForward, "w1", "w3", "w2")


@pytest.mark.parametrize("spans", [True, False])
@pytest.mark.parametrize("where", ["w1", "w3", "w2", "input", "grad_output"])
def test_the_first_nonfinite_of_a_span_is_that_of_its_layers(where: str, spans: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(FeedForward(), FeedForward())
    assert octavo.convert(net, "rowwise", spans=spans).spans == (("0", "1") if spans else ())
    x, seed = torch.randn(32, 64, requires_grad=True), torch.ones(32, 64)
    with torch.no_grad():
        if where == "input":
            x[0, 0] = math.inf
        elif where == "grad_output":
            seed[0, 0] = math.nan
        else:
            net[0].get_submodule(where).weight[1, 2] = math.inf
    with octavo.monitor(net) as watch:
        net(x).backward(seed)
    found = watch.first_nonfinite()
    expected = {"grad_output": ("1.w2", "grad_input", "grad_output"), "input": ("0.w1", "output", "input")}
    assert (found.layer, found.product, found.operand) == expected.get(
        where, (f"0.{where}", "output", "weight")
    )


def test_the_first_step_that_went_bad_is_the_one_that_is_named() -> None:
    net, x = Scrambled("rowwise"), torch.randn(8, 64)
    with octavo.monitor(net) as watch:
        with torch.no_grad():
            net.last.weight[0, 0] = math.nan
        net(x)
        with torch.no_grad():
            net.first.weight[0, 0] = math.nan
        net(x)
        assert watch.first_nonfinite().layer == "last"
        watch.reset()
        assert watch.first_nonfinite() is None
        net(x)
        assert watch.first_nonfinite().layer == "first"


@pytest.mark.parametrize("where", ["first", "last"])
def test_the_first_nonfinite_of_a_compiled_model(where: str) -> None:
    torch.compiler.reset()
    net, x = Scrambled("rowwise"), torch.randn(8, 64)
    call = torch.compile(net, backend="aot_eager")
    with torch.no_grad():
        getattr(net, where).weight[0, 0] = math.inf
    assert first_of(net, x, call) == (where, "output", "weight")
