"""Gradient accumulation, plain and with cached 8-bit weights, and the shared quantization of one input."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from training_support import ALL_RECIPES, QUANTIZED_RECIPES, OpCount, assert_all_equal, make_net, run_net

import octavo


def weight_quantizations(count: OpCount) -> int:
    return count.octavo().get("quantize", 0)


@pytest.mark.case("B14")
@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_b14_micro_batches_and_the_step_after_them(recipe: str) -> None:
    torch.manual_seed(0)
    layer = octavo.Linear(256, 256, recipe=recipe)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    x = torch.randn(8, 256)
    plain = layer(x).detach()
    layer(x).sum().backward()
    one = layer.weight.grad.clone()
    layer.zero_grad()
    with octavo.accumulate():
        for _ in range(5):
            out = layer(x)
            assert torch.equal(out, plain)
            out.sum().backward()
        five = one.clone()
        for _ in range(4):
            five += one
        assert torch.equal(layer.weight.grad, five)
        optimizer.step()
        stepped = [layer(x) for _ in range(2)]
    assert torch.equal(stepped[0], stepped[1])
    assert torch.equal(stepped[0], layer(x))
    if recipe != "bf16":
        assert not torch.equal(stepped[0], plain)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_accumulated_gradients_are_the_sum_of_the_micro_batches(recipe: str, cached: bool) -> None:
    net = make_net(recipe)
    batches = [torch.randn(6, 64) for _ in range(3)]
    expected = run_net(net, batches[0])[2:]
    for batch in batches[1:]:
        expected = [a + b for a, b in zip(expected, run_net(net, batch)[2:], strict=True)]
    net.zero_grad()
    weights = torch.linspace(-1, 1, 64)

    def accumulate() -> None:
        for batch in batches:
            (net(batch.requires_grad_()) * weights).sum().backward()

    if cached:
        with octavo.accumulate():
            accumulate()
    else:
        accumulate()
    assert_all_equal([p.grad for p in net.parameters()], expected)


@pytest.mark.parametrize("recipe", QUANTIZED_RECIPES)
def test_each_weight_is_quantized_once_for_each_direction(recipe: str) -> None:
    layer = octavo.Linear(64, 64, recipe=recipe)

    def count(batches: int) -> int:
        with octavo.accumulate(), OpCount() as ops:
            for _ in range(batches):
                layer(torch.randn(4, 64, requires_grad=True)).sum().backward()
        return weight_quantizations(ops)

    # rowwise_with_gw_hp also quantizes x and g by this op, once each a micro-batch.
    others = 2 if recipe == "rowwise_with_gw_hp" else 0
    assert count(1) == 2 + others
    assert count(4) == 2 + 4 * others


def test_recomputation_is_served_from_the_cache_too() -> None:
    layer = octavo.Linear(64, 64)
    with octavo.accumulate(), OpCount() as count:
        for _ in range(3):
            x = torch.randn(4, 64, requires_grad=True)
            checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert weight_quantizations(count) == 2


def test_autocast_is_served_from_the_cache_too() -> None:
    layer = octavo.Linear(64, 64)
    with octavo.accumulate(), OpCount() as count:
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                out = layer(torch.randn(4, 64, requires_grad=True))
            out.sum().backward()
    assert weight_quantizations(count) == 2


def test_expert_weights_are_cached_too() -> None:
    weight = nn.Parameter(torch.randn(2, 32, 64))
    offs = torch.tensor([3, 8], dtype=torch.int32)
    seen = []
    for batches in (1, 3):
        with octavo.accumulate(), OpCount() as count:
            for _ in range(batches):
                octavo.grouped_mm(torch.randn(8, 64, requires_grad=True), weight.mT, offs).sum().backward()
        # Beside the weight's two directions, x and g are quantized along their rows once each a micro-batch.
        seen.append(weight_quantizations(count) - 2 * batches)
    assert seen == [2, 2]


def changes() -> dict[str, object]:
    def in_place(layer: nn.Linear) -> None:
        with torch.no_grad():
            layer.weight.mul_(2)

    def optimizer_step(layer: nn.Linear) -> None:
        torch.optim.SGD(layer.parameters(), 0.5).step()

    def data_writing_optimizer(layer: nn.Linear) -> None:
        class ByData(torch.optim.Optimizer):
            def step(self, closure=None):
                for group in self.param_groups:
                    for p in group["params"]:
                        p.data.mul_(3)

        ByData(layer.parameters(), {}).step()

    def load(layer: nn.Linear) -> None:
        layer.load_state_dict({k: v * 3 for k, v in layer.state_dict().items()})

    def another_parameter(layer: nn.Linear) -> None:
        layer.weight = nn.Parameter(layer.weight.detach() * 3)

    def initialise(layer: nn.Linear) -> None:
        nn.init.normal_(layer.weight)

    return {
        f.__name__: f
        for f in (in_place, optimizer_step, data_writing_optimizer, load, another_parameter, initialise)
    }


@pytest.mark.parametrize("change", changes().values(), ids=list(changes()))
def test_the_cache_sees_every_change_of_a_weight(change) -> None:
    layer, x = octavo.Linear(64, 64), torch.randn(4, 64)
    with octavo.accumulate():
        layer(x).sum().backward()
        before = layer(x).detach()
        change(layer)
        after = layer(x).detach()
    assert not torch.equal(after, before)
    assert torch.equal(after, layer(x))


def test_a_write_through_data_is_unseen_and_the_checksum_finds_it() -> None:
    layer, x = octavo.Linear(64, 64), torch.randn(4, 64)
    with octavo.accumulate(debug=True):
        layer(x)
        layer(x)
        layer.weight.data[3, 5] += 1
        with pytest.raises(RuntimeError, match=r"\(64, 64\).*through \.data"):
            layer(x)
    assert layer(x).isfinite().all()


def test_blocks_nest_and_nothing_outlives_them() -> None:
    layer, x = octavo.Linear(64, 64), torch.randn(4, 64)
    with octavo.accumulate(), OpCount() as count:
        layer(x)
        with octavo.accumulate():
            layer(x)
        layer(x)
    assert weight_quantizations(count) == 2
    with OpCount() as count:
        layer(x)
        layer(x)
    assert weight_quantizations(count) == 2


def test_an_exception_ends_the_block() -> None:
    layer = octavo.Linear(64, 64)
    with pytest.raises(KeyError), octavo.accumulate():
        raise KeyError
    with OpCount() as count:
        layer(torch.randn(4, 64))
        layer(torch.randn(4, 64))
    assert weight_quantizations(count) == 2


def test_inference_mode_runs_with_the_cache_on() -> None:
    with torch.inference_mode(), octavo.accumulate():
        layer = octavo.Linear(32, 32)
        x = torch.randn(4, 32)
        first = layer(x)
        layer.weight.mul_(2)
        assert not torch.equal(layer(x), first)


def test_the_cache_is_off_under_compile() -> None:
    torch.compiler.reset()
    net, x = octavo.Linear(64, 48), torch.randn(4, 64)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    with octavo.accumulate():
        first = compiled(x).detach()
        with torch.no_grad():
            net.weight.mul_(2)
        second = compiled(x).detach()
        net.weight.data.mul_(2)
        third = compiled(x).detach()
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)
    assert torch.equal(third, net(x))


# ---- one quantization of one input ------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_layers_that_read_one_tensor_quantize_it_once(recipe: str) -> None:
    q, k, v = (octavo.Linear(64, n, recipe=recipe) for n in (64, 32, 32))
    x = torch.randn(8, 64, requires_grad=True) * 1.0
    with OpCount() as count:
        outs = [layer(x) for layer in (q, k, v)]
    assert count.octavo() == {"quantize_both": 1, "quantize": 3, "scaled_mm": 3}
    sum(o.sum() for o in outs).backward()
    apart = sum(torch.autograd.grad(layer(x.clone()).sum(), layer.weight)[0].sum() for layer in (q, k, v))
    torch.testing.assert_close(sum(layer.weight.grad.sum() for layer in (q, k, v)), apart)


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_an_input_changed_in_place_is_quantized_again(grad: bool) -> None:
    layer, x = octavo.Linear(64, 64), torch.randn(8, 64)
    with torch.set_grad_enabled(grad):
        first = layer(x)
        x.mul_(-1)
        second = layer(x)
    assert torch.equal(second, layer(x.clone()))
    assert not torch.equal(second, first)


def test_an_input_buffer_written_from_outside_is_quantized_again() -> None:
    # Buffers filled by NumPy, DLPack, a collective or a hand-launched kernel change without a new version.
    layer, buffer = octavo.Linear(64, 64), torch.randn(8, 64).numpy()
    x = torch.from_numpy(buffer)
    first = layer(x)
    buffer *= -1
    second = layer(x)
    assert not torch.equal(second, first)
    assert torch.equal(second, layer(torch.from_numpy(buffer.copy())))


def test_an_input_written_through_data_is_quantized_again() -> None:
    layer, x = octavo.Linear(64, 64), torch.randn(8, 64)
    first = layer(x)
    x.data.mul_(-1)
    assert not torch.equal(layer(x), first)


def test_layers_of_different_recipes_do_not_share() -> None:
    x = torch.randn(8, 64)
    layers = [octavo.Linear(64, 64, recipe=r) for r in ALL_RECIPES]
    together = [layer(x) for layer in layers]
    assert_all_equal(together, [layer(x.clone()) for layer in layers])


def test_threads_do_not_share() -> None:
    layer, x = octavo.Linear(64, 64), torch.randn(8, 64)
    expected, found = layer(x), []
    threads = [threading.Thread(target=lambda: found.append(layer(x))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_all_equal(found, [expected] * 4)
