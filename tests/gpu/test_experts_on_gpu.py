"""Experts on a real GPU: the CPU's numbers, graphs that replay with new weights and new routing, no waiting."""

from __future__ import annotations

import pytest
import torch

import octavo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

RECIPES = [name for name in octavo.RECIPES if name != "bf16"]
T, K, E, D, H = 384, 2, 8, 256, 384


def make(recipe: str, device: str) -> tuple[octavo.GroupedExperts, list[torch.Tensor]]:
    """A bank, and x, indices, scores, grad; the last two experts get no token."""
    generator = torch.Generator().manual_seed(0)
    family = octavo.hardware.fp8_family(torch.device("cuda"))
    experts = octavo.GroupedExperts(
        D, H, E, recipe=octavo.get_recipe(recipe, family=family), dtype=torch.bfloat16
    )
    with torch.no_grad():
        for weight in experts.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[2] ** -0.5)
    x, grad = (torch.randn(T, D, generator=generator).bfloat16() for _ in range(2))
    logits = torch.randn(T, E, generator=generator)
    logits[:, -2:] = -torch.inf
    scores, indices = logits.softmax(-1).topk(K, -1)
    return experts.to(device), [t.to(device) for t in (x, indices, scores, grad)]


def step(experts: octavo.GroupedExperts, x, indices, scores, grad) -> list[torch.Tensor]:
    """Output and the gradients of x, scores, w1, w2, w3."""
    out = experts(x, indices, scores)
    return [out, *torch.autograd.grad(out, (x, scores, *experts.parameters()), grad)]


def prepared(recipe: str, device: str) -> tuple[octavo.GroupedExperts, list[torch.Tensor]]:
    experts, (x, indices, scores, grad) = make(recipe, device)
    return experts, [x.requires_grad_(), indices, scores.requires_grad_(), grad]


@pytest.mark.case("B18")
@pytest.mark.parametrize("recipe", RECIPES)
def test_experts_on_gpu_equal_those_of_the_cpu(recipe: str) -> None:
    from octavo.testing import sqnr

    (on_gpu, inputs), (on_cpu, same) = prepared(recipe, "cuda"), prepared(recipe, "cpu")
    found, expected = step(on_gpu, *inputs), step(on_cpu, *same)
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        # A last bit of exp moves single codes of the activation, and those a gradient.
        assert sqnr(a, b) >= 35, index
    assert not any(dw[-2:].any() for dw in found[3:])


@pytest.mark.case("B24")
@pytest.mark.parametrize("recipe", ["bf16", *RECIPES])
def test_b24_a_graph_of_experts_sees_new_weights_and_new_routing(recipe: str) -> None:
    from octavo.testing import sqnr

    experts, inputs = prepared(recipe, "cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(experts, *inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(experts, *inputs)
    with torch.no_grad():
        for weight in experts.parameters():
            weight.mul_(1.7)
        inputs[0].add_(0.3)
        inputs[1].copy_((inputs[1] + 3) % E)
    graph.replay()
    torch.cuda.synchronize()
    # cuBLAS may choose another algorithm under capture; stale weights or routing would be far off.
    for replayed, eager in zip(captured, step(experts, *inputs), strict=True):
        assert sqnr(replayed, eager) >= 50


@pytest.mark.parametrize("recipe", ["bf16", *RECIPES])
def test_nothing_waits_for_the_device(recipe: str) -> None:
    experts, inputs = prepared(recipe, "cuda")
    step(experts, *inputs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(experts, *inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
