"""One quantization of an input that several layers read, and never a stale one."""

import gc

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import octavo
from octavo.training import shared


class CountQuantize(TorchDispatchMode):
    """Counts calls of the quantization ops, by name."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "octavo" and "quantize" in func._opname:
            self.calls.append(func._opname)
        return func(*args, **(kwargs or {}))


def activation():
    """A tensor that autograd made, as the input of a layer inside a model is."""
    return torch.randn(8, 64).requires_grad_() * 1.0


def three_layers(recipe="rowwise"):
    torch.manual_seed(0)
    return [octavo.Linear(64, n, bias=False, recipe=recipe) for n in (64, 32, 32)]


def test_three_projections_of_one_input_quantize_it_once_and_save_it_once():
    layers, x = three_layers(), activation()
    with CountQuantize() as count:
        outs = [layer(x) for layer in layers]
    assert count.calls.count("quantize_both") == 1
    saved = {out.grad_fn.saved_tensors[0].data_ptr() for out in outs}
    assert len(saved) == 1


@pytest.mark.parametrize("recipe", [r for r in octavo.RECIPES if r != "bf16"])
def test_shared_operands_give_the_bits_of_separate_ones(recipe):
    layers, x = three_layers(recipe), activation()
    together = sum(layer(x).sum() for layer in layers)
    (grad,) = torch.autograd.grad(together, x)
    apart = [torch.autograd.grad(layer(x.clone()).sum(), x)[0] for layer in layers]
    # The sums of three gradients may differ in their order alone.
    torch.testing.assert_close(grad, sum(apart), rtol=1e-5, atol=1e-6)


def test_an_input_written_in_place_is_quantized_again():
    layer, x = three_layers()[0], activation()
    first = layer(x)
    x.mul_(3.0)
    assert torch.equal(layer(x), layer(x.clone()))
    assert not torch.equal(layer(x), first)


def test_another_recipe_does_not_get_the_first_ones_operands():
    x = activation()
    rowwise, blockwise = three_layers("rowwise")[0], three_layers("blockwise")[0]
    rowwise(x)
    assert torch.equal(blockwise(x), blockwise(x.clone()))


def test_nothing_is_kept_once_the_input_is_gone():
    layer, x = three_layers()[0], activation()
    layer(x)
    assert shared._last.entry is not None
    del x
    gc.collect()
    assert shared._last.entry is None


def test_inference_tensors_have_no_version_and_are_not_shared():
    layer = three_layers()[0]
    with torch.inference_mode():
        x = torch.randn(8, 64)
        first = layer(x)
        x.mul_(2.0)
        assert not torch.equal(layer(x), first)


def test_a_buffer_refilled_behind_the_version_counter_is_quantized_again():
    layer, memory = three_layers()[0], torch.randn(8, 64).numpy()
    x = torch.from_numpy(memory)
    first = layer(x)
    memory *= -1
    assert torch.equal(layer(x), -first)
