"""State dicts, files, resuming, and that nothing grows with the number of steps."""

from __future__ import annotations

import contextlib
import gc
import io

import pytest
import torch
from torch import nn
from training_support import ALL_RECIPES, Net, assert_all_equal, make_net, run_net

import octavo


def saved(state: object) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return buffer


@pytest.mark.case("B33")
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_b33_state_dicts_load_safely(recipe: str, assign: bool) -> None:
    net, x = make_net(recipe), torch.randn(6, 64)
    run_net(net, x)
    state = torch.load(saved(net.state_dict()), weights_only=True)
    assert {type(v) for v in state.values()} == {torch.Tensor}
    fresh = Net()
    octavo.convert(fresh, recipe)
    fresh.load_state_dict(state, strict=True, assign=assign)
    assert_all_equal(run_net(fresh, x), run_net(net, x))


@pytest.mark.case("B33")
def test_b33_state_dicts_go_both_ways() -> None:
    plain, net = Net(), make_net()
    plain.load_state_dict(net.state_dict(), strict=True)
    assert_all_equal(list(plain.state_dict().values()), list(net.state_dict().values()))
    assert list(plain.state_dict()) == list(net.state_dict())
    other = Net()
    net.load_state_dict(other.state_dict(), strict=True)
    assert torch.equal(net.up.weight, other.up.weight)
    octavo.convert(plain)
    x = torch.randn(4, 64)
    net.load_state_dict(plain.state_dict())
    assert torch.equal(net(x), plain(x))


@pytest.mark.case("B33")
def test_b33_a_state_dict_taken_while_watched_is_the_same() -> None:
    net = make_net()
    with octavo.monitor(net), octavo.accumulate():
        run_net(net, torch.randn(4, 64))
        assert list(net.state_dict()) == list(Net().state_dict())


@pytest.mark.case("B33")
def test_b33_a_whole_model_in_a_file() -> None:
    net, x = make_net(), torch.randn(4, 64)
    loaded = torch.load(saved(net), weights_only=False)
    assert torch.equal(loaded(x), net(x))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step))
        loss = (net(x) - x.roll(1, -1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.case("B34")
@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_b34_resuming_is_bit_equal(recipe: str) -> None:
    net = make_net(recipe)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    train(net, optimizer, range(5))
    buffer = saved({"model": net.state_dict(), "optimizer": optimizer.state_dict()})
    expected = train(net, optimizer, range(5, 10))
    # A fresh module stands for the new process: nothing but the file carries over.
    fresh = Net()
    octavo.convert(fresh, recipe)
    again = torch.optim.AdamW(fresh.parameters(), 1e-3)
    state = torch.load(buffer, weights_only=True)
    fresh.load_state_dict(state["model"])
    again.load_state_dict(state["optimizer"])
    assert train(fresh, again, range(5, 10)) == expected


@pytest.mark.case("B34")
@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_b34_starting_from_a_bf16_run_has_no_jump(recipe: str) -> None:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    train(net, optimizer, range(40))
    state = net.state_dict()
    twin = Net()
    twin.load_state_dict(state)
    octavo.convert(twin, recipe)
    x = torch.randn(64, 64)
    losses = [(m(x) - x.roll(1, -1)).square().mean().item() for m in (net, twin)]
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
    octavo.convert(net, recipe)
    before = losses[0]
    assert train(net, optimizer, range(40, 45))[-1] < 1.1 * before


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())


@pytest.mark.case("B35")
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("recipe", ["rowwise", "mxfp8"])
def test_b35_nothing_grows_with_the_steps(recipe: str, cached: bool) -> None:
    layer = octavo.Linear(192, 192, recipe=recipe)
    optimizer = torch.optim.SGD(layer.parameters(), 1e-3)
    x = torch.randn(64, 192)

    def steps(count: int) -> tuple[int, int]:
        for _ in range(count):
            layer(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return live_tensors(), saved(layer.state_dict()).getbuffer().nbytes

    with octavo.accumulate() if cached else contextlib.nullcontext():
        first, later = steps(1), steps(200)
    # Garbage of earlier tests may still be collected, so the count may fall; it must not rise.
    assert later[0] <= first[0]
    assert later[1] == first[1]
    if not cached:
        assert first[1] == saved(nn.Linear(192, 192).state_dict()).getbuffer().nbytes
