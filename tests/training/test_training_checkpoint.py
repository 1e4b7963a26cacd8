"""Activation checkpointing recomputes bit for bit what the forward computed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from training_support import ALL_RECIPES, Net, assert_all_equal, make_net, run_net

import octavo


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_recomputation_is_bit_identical(recipe: str, reentrant: bool, cached: bool) -> None:
    net, x = make_net(recipe, torch.bfloat16), torch.randn(2, 8, 64).bfloat16()
    expected = run_net(net, x)

    def recomputed(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(net, x, use_reentrant=reentrant)

    if cached:
        with octavo.accumulate():
            assert_all_equal(run_net(net, x, recomputed), expected)
            assert_all_equal(run_net(net, x, recomputed), expected)
    else:
        assert_all_equal(run_net(net, x, recomputed), expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_grouped_recomputation_is_bit_identical(reentrant: bool) -> None:
    weight = torch.randn(3, 48, 64, requires_grad=True)
    x, offs = torch.randn(20, 64, requires_grad=True), torch.tensor([5, 5, 17], dtype=torch.int32)

    def experts(x: torch.Tensor) -> torch.Tensor:
        return octavo.grouped_mm(x, weight.mT, offs)

    expected = torch.autograd.grad(experts(x).square().sum(), (x, weight))
    checkpoint(experts, x, use_reentrant=reentrant).square().sum().backward()
    assert_all_equal([x.grad, weight.grad], list(expected))


def test_recomputation_under_autocast_is_bit_identical() -> None:
    net, x = make_net(), torch.randn(8, 64)

    def run(call) -> list[torch.Tensor]:
        def inside(x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return call(x).float()

        return run_net(net, x, inside)

    assert_all_equal(run(lambda z: checkpoint(net, z, use_reentrant=False)), run(net))


@pytest.mark.case("B28")
@pytest.mark.parametrize("recipe", ["rowwise", pytest.param("mxfp8", marks=pytest.mark.slow)])
def test_b28_compiled_blocks_inside_checkpoints(recipe: str) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    blocks = nn.ModuleList(Net() for _ in range(4))
    octavo.convert(blocks, recipe)
    for block in blocks:
        block.compile(backend="aot_eager", fullgraph=True)

    def run(x: torch.Tensor, recompute: bool) -> torch.Tensor:
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        return x

    for length in (16, 24, 16):
        x = torch.randn(2, length, 64)
        found = run_net(blocks, x, lambda z: run(z, True))
        assert_all_equal(found, run_net(blocks, x, lambda z: run(z, False)))
