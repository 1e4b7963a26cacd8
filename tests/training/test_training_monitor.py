"""The monitor's numbers against a count by hand, and that watching changes and waits for nothing."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from training_support import (
    CONTRACT,
    QUANTIZED_RECIPES,
    OpCount,
    assert_all_equal,
    make_net,
    product_by_hand,
    run_net,
)

import octavo
from octavo.formats import E4M3FN, Format
from octavo.testing import sqnr

OPERANDS = {
    ("output", "input"): lambda x, w, g: x,
    ("output", "weight"): lambda x, w, g: w,
    ("grad_input", "grad_output"): lambda x, w, g: g,
    ("grad_input", "weight"): lambda x, w, g: w.T,
    ("grad_weight", "grad_output"): lambda x, w, g: g.T,
    ("grad_weight", "input"): lambda x, w, g: x.T,
}
SYNCHRONISING = ("aten._local_scalar_dense", "aten.item", "aten.is_nonzero", "aten.equal", "aten.nonzero")


def spread(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Values over many octaves, so that some vanish, with exact zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * 2.0 ** (-30 * torch.rand(shape, generator=generator))
    return x * (torch.rand(shape, generator=generator) > 0.1)


def by_hand(tensor: torch.Tensor, fmt: Format) -> dict[str, float]:
    quantized = octavo.quantize(tensor.contiguous(), fmt)
    decoded = octavo.dequantize(quantized)
    lost = (decoded == 0) & (tensor != 0)
    return {
        "amax": tensor.abs().max().item(),
        "underflowed": lost.sum().item() / (tensor != 0).sum().item(),
        "sqnr_db": sqnr(decoded, tensor),
    }


@pytest.mark.parametrize("recipe", QUANTIZED_RECIPES)
def test_the_numbers_are_those_of_a_count_by_hand(recipe: str) -> None:
    x, w, g = spread((40, 160), 0), spread((48, 160), 1), spread((40, 48), 2)
    layer = octavo.Linear(160, 48, bias=False, recipe=recipe)
    with torch.no_grad():
        layer.weight.copy_(w)
    with octavo.monitor(layer) as watch:
        layer(x.requires_grad_()).backward(g)
    x = x.detach()
    found = {(s.product, s.operand): s for s in watch.read()}
    formats = dict(zip(("output", "grad_input", "grad_weight"), CONTRACT[recipe], strict=True))
    assert set(found) == {key for key in OPERANDS if formats[key[0]] is not None}
    for key, stats in found.items():
        first = key[1] in ("grad_output",) or key == ("output", "input")
        expected = by_hand(OPERANDS[key](x, w, g), formats[key[0]][0 if first else 1])
        assert stats.amax == pytest.approx(expected["amax"])
        assert stats.underflowed == pytest.approx(expected["underflowed"])
        assert stats.sqnr_db == pytest.approx(expected["sqnr_db"], abs=1e-6)
        assert stats.saturated == 0
        assert stats.nonfinite == 0
    if recipe == "tensorwise":
        assert found["output", "input"].underflowed > 0.05


def test_saturation_is_counted() -> None:
    # Scales rounded to the nearest lower power of two clip (OCP MX "floor"); rceil never does.
    shares = {}
    for rounding in ("floor", "rceil"):
        fmt = Format(E4M3FN, "1x32", rounding)
        recipe = octavo.Recipe("mx", octavo.Product(fmt, fmt))
        layer = octavo.Linear(32, 32, bias=False, recipe=recipe)
        x = torch.ones(8, 32)
        x[:, :4] = 500.0  # over 448 + half a step of 32, under 512
        x[:, 4:6] = 460.0  # over 448, but rounding alone would bring it back
        with octavo.monitor(layer) as watch:
            layer(x)
        shares[rounding] = {s.operand: s.saturated for s in watch.read()}["input"]
    assert shares == {"floor": 4 / 32, "rceil": 0}


def test_nothing_lost_is_infinite_and_zeros_are_no_underflow() -> None:
    layer = octavo.Linear(32, 16, bias=False)
    with torch.no_grad():
        layer.weight.fill_(0.5)
    with octavo.monitor(layer) as watch:
        layer(torch.zeros(4, 32))
    stats = {s.operand: s for s in watch.read()}
    assert stats["weight"].sqnr_db == stats["input"].sqnr_db == math.inf
    assert stats["input"].amax == stats["input"].underflowed == 0
    # The input is watched twice: for the output and for the weight gradient.
    assert str(watch).count("inf") == 3


def test_an_empty_batch_is_watched() -> None:
    layer = octavo.Linear(32, 16)
    with octavo.monitor(layer) as watch:
        layer(torch.zeros(0, 32))
    assert {s.operand for s in watch.read()} == {"weight"}


@pytest.mark.parametrize("every", [1, 2, 3])
def test_every_nth_training_step_is_watched(every: int) -> None:
    net = make_net()
    with octavo.monitor(net, every=every) as watch:
        amax = []
        for step in range(7):
            run_net(net, torch.full((4, 64), float(step + 1)))
            amax.append(
                {(s.layer, s.product, s.operand): s.amax for s in watch.read()}["up", "output", "input"]
            )
    watched = [step + 1 for step in range(7) if step % every == 0]
    assert amax == [max(w for w in watched if w <= step + 1) for step in range(7)]


def test_evaluation_is_not_counted() -> None:
    net = make_net()
    with octavo.monitor(net, every=2) as watch:
        for step in range(4):
            net.eval()
            net(torch.full((2, 64), 1e6))
            net.train()
            run_net(net, torch.full((2, 64), float(step + 1)))
    assert {(s.layer, s.product, s.operand): s.amax for s in watch.read()}["up", "output", "input"] == 3


def test_stepping_never_synchronises() -> None:
    net, x = make_net(), torch.randn(8, 64)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with octavo.monitor(net), OpCount() as count:
        for _ in range(2):
            net(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    assert not [op for op in count.ops if op in SYNCHRONISING]
    assert count.octavo()["observe"] > 0


@pytest.mark.parametrize("recipe", QUANTIZED_RECIPES)
def test_watching_changes_no_bit(recipe: str) -> None:
    net, x = make_net(recipe), torch.randn(8, 64)
    expected = run_net(net, x)
    with octavo.monitor(net):
        assert_all_equal(run_net(net, x), expected)


def test_closing_stops_the_watch_and_leaves_the_numbers() -> None:
    net, x = make_net(), torch.randn(8, 64)
    watch = octavo.monitor(net)
    run_net(net, x)
    before = watch.read()
    watch.close()
    run_net(net, 100 * x)
    assert watch.read() == before
    assert all(layer.stats is None for layer in (net.up, net.down, net.out))
    assert not net._forward_pre_hooks
    watch.reset()
    assert watch.read() == []


def test_the_first_nonfinite_operand_is_named() -> None:
    net, x = make_net(), torch.randn(8, 64)
    with octavo.monitor(net) as watch:
        run_net(net, x)
        assert watch.first_nonfinite() is None
        with torch.no_grad():
            net.down.weight[0, 0] = math.nan
        net(x)
    first = watch.first_nonfinite()
    assert (first.layer, first.product, first.operand) == ("down", "output", "weight")
    # One element of the two passes that were watched.
    assert first.nonfinite == 1 / (2 * net.down.weight.numel())


def test_where_a_diverging_backward_began_is_named() -> None:
    net, x = make_net(), torch.randn(8, 64)
    bad = torch.zeros(8, 64)
    bad[0, 0] = math.inf
    with octavo.monitor(net) as watch:
        net(x).backward(bad)
    # The gradient was already infinite where it entered the last layer; the others only passed it on.
    first = watch.first_nonfinite()
    assert (first.layer, first.product, first.operand) == ("out", "grad_input", "grad_output")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nonfinite_values_have_a_share_and_leave_the_other_numbers(value: float) -> None:
    layer = octavo.Linear(32, 16, bias=False)
    x = torch.ones(8, 32)
    x[3, 4] = value
    with octavo.monitor(layer) as watch:
        layer(x)
    stats = {s.operand: s for s in watch.read()}["input"]
    assert stats.nonfinite == 1 / x.numel()
    assert stats.amax == 1
    assert stats.sqnr_db == math.inf


@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_compiled_counts_equal_eager_ones(every: int) -> None:
    torch.compiler.reset()
    batches = [torch.randn(8, 64) for _ in range(3)]
    tables = []
    for compiled in (False, True):
        torch.manual_seed(0)
        net = octavo.Linear(64, 48)
        call = torch.compile(net, backend="aot_eager", fullgraph=True) if compiled else net
        with octavo.monitor(net, every=every) as watch:
            for batch in batches:
                run_net(net, batch, call)
        tables.append(watch.read())
    assert tables[0] == tables[1]
    assert len(tables[0]) == 6


@pytest.mark.parametrize("in_place", [True, False])
def test_a_model_that_has_run_compiled_can_be_watched_and_left_alone_again(in_place: bool) -> None:
    torch.compiler.reset()
    net, x = nn.Sequential(octavo.Linear(64, 48), nn.ReLU(), octavo.Linear(48, 64)), torch.randn(8, 64)
    if in_place:
        net.compile(backend="aot_eager")
    call = net if in_place else torch.compile(net, backend="aot_eager")
    run_net(net, x, call)
    for _ in range(2):
        with octavo.monitor(net) as watch:
            run_net(net, x, call)
        seen = watch.read()
        assert len(seen) == 12
        run_net(net, 1000 * x, call)
        assert watch.read() == seen


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_counts_shares_alike(reentrant: bool) -> None:
    net, x = make_net("tensorwise"), spread((16, 64), 3)
    with octavo.monitor(net) as watch:
        run_net(net, x)
    plain = watch.read()
    with octavo.monitor(net) as watch:
        run_net(net, x, lambda z: checkpoint(net, z, use_reentrant=reentrant))
    for a, b in zip(watch.read(), plain, strict=True):
        assert replace(a, sqnr_db=0.0) == replace(b, sqnr_db=0.0)
        assert a.sqnr_db == pytest.approx(b.sqnr_db)


def test_checkpointing_leaves_the_share_of_nonfinite_values() -> None:
    net, x = make_net(), torch.randn(8, 64)
    x[0, 0] = math.nan
    with octavo.monitor(net) as watch:
        run_net(net, x, lambda z: checkpoint(net, z, use_reentrant=False))
    assert watch.first_nonfinite().nonfinite == 1 / x.numel()


def test_the_table_and_a_copy_of_a_watched_model() -> None:
    net = make_net()
    with octavo.monitor(net) as watch:
        run_net(net, torch.randn(8, 64))
        twin = copy.deepcopy(net)
        run_net(twin, torch.full((8, 64), 1e9))
    lines = str(watch).splitlines()
    assert lines[0].split()[:3] == ["layer", "product", "operand"]
    assert len(lines) == 19
    assert max(s.amax for s in watch.read()) < 1e9


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"octavo\.convert"):
        octavo.monitor(nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"octavo\.convert"):
        octavo.monitor(make_net("bf16"))
    with pytest.raises(ValueError, match="every"):
        octavo.monitor(make_net(), every=0)


def test_sqnr_of_the_operands_bounds_that_of_the_product() -> None:
    x, w = torch.randn(64, 512), torch.randn(64, 512)
    layer = octavo.Linear(512, 64, bias=False)
    with torch.no_grad():
        layer.weight.copy_(w)
    with octavo.monitor(layer) as watch:
        layer(x)
    noise = sum(10 ** (-s.sqnr_db / 10) for s in watch.read() if s.product == "output")
    out = product_by_hand(x, w, CONTRACT["rowwise"][0])
    assert sqnr(out, x.double() @ w.double().T) == pytest.approx(-10 * math.log10(noise), abs=0.5)
