"""The spanning MLP: one Function for gate, up, SwiGLU and down, equal to the layers one by one."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import octavo
from octavo.testing import sqnr
from octavo.training.spanning import mlp, register_mlp

RECIPES = [name for name in octavo.RECIPES if name != "bf16"]


class FeedForward(nn.Module):
    def __init__(self, dim=128, hidden=256):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


register_mlp(FeedForward, "w1", "w3", "w2")


def model(recipe=None, **options):
    torch.manual_seed(0)
    found = nn.Sequential(FeedForward(), FeedForward())
    return found, octavo.convert(found, recipe, **options) if recipe else None


def gradients(module, x, g):
    x = x.clone().requires_grad_()
    module.zero_grad()
    out = module(x)
    out.backward(g)
    return [out.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]


@pytest.mark.parametrize("recipe", RECIPES)
def test_span_agrees_with_the_layers_one_by_one(recipe):
    (spanned, report), (apart, plain) = model(recipe), model(recipe, spans=False)
    assert report.spans == ("0", "1")
    assert plain.spans == ()
    x, g = torch.randn(2, 24, 128), torch.randn(2, 24, 128)
    high, _ = model()
    exact = gradients(high, x, g)
    for got, layered, true in zip(gradients(spanned, x, g), gradients(apart, x, g), exact, strict=True):
        assert got.shape == layered.shape
        assert sqnr(got, true) >= sqnr(layered, true) - 0.7


def test_span_is_what_the_formula_gives_from_the_same_ops():
    torch.manual_seed(0)
    x, w1, w3, w2 = torch.randn(8, 64), torch.randn(96, 64), torch.randn(96, 64), torch.randn(64, 96)
    recipe = octavo.get_recipe("rowwise")
    fmt = recipe.output.a
    q = lambda t: octavo.quantize(t, fmt)  # noqa: E731
    gate, up = (octavo.scaled_mm(q(x), q(w), out_dtype=torch.float32) for w in (w1, w3))
    expected = octavo.scaled_mm(q(gate * torch.sigmoid(gate) * up), q(w2), out_dtype=torch.float32)
    assert torch.equal(mlp(x, w1, w3, w2, recipe=recipe), expected)


@pytest.mark.parametrize("recipe", RECIPES)
def test_frozen_weights_get_no_gradient_and_the_others_keep_theirs(recipe):
    for frozen in ([0], [1], [2], [0, 1, 2], [0, 1]):
        (a, _), (b, _) = model(recipe), model(recipe)
        layers = [a[0].w1, a[0].w3, a[0].w2]
        for i in frozen:
            layers[i].weight.requires_grad_(False)
        x = torch.randn(8, 128)
        for m in (a, b):
            inp = x.clone().requires_grad_()
            m(inp).square().sum().backward()
            m.dx = inp.grad
        assert torch.equal(a.dx, b.dx)
        for i, (mine, full) in enumerate(zip(layers, (b[0].w1, b[0].w3, b[0].w2), strict=True)):
            assert (
                mine.weight.grad is None if i in frozen else torch.equal(mine.weight.grad, full.weight.grad)
            )


@pytest.mark.parametrize("recipe", RECIPES)
def test_span_compiles_to_one_graph_with_dynamic_tokens(recipe):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    m, _ = model(recipe)
    compiled = torch.compile(m, fullgraph=True, backend="aot_eager")
    for rows in (40, 24, 56):
        x, g = torch.randn(rows, 128), torch.randn(rows, 128)
        for fused, eager in zip(gradients(compiled, x, g), gradients(m, x, g), strict=True):
            assert torch.equal(fused, eager)
    assert counters["stats"]["unique_graphs"] <= 3


def test_span_steps_aside_for_hooks_monitors_autocast_and_other_recipes():
    x = torch.randn(8, 128)
    plain, _ = model("rowwise", spans=False)
    layered = plain(x)
    seen = []
    hooked, _ = model("rowwise")
    for block in hooked:
        block.w3.register_forward_hook(lambda *args: seen.append(1))
    assert torch.equal(hooked(x), layered)
    assert len(seen) == 2
    watched, _ = model("rowwise")
    with octavo.monitor(watched) as monitor:
        assert torch.equal(watched(x), layered)
    assert {s.layer for s in monitor.read()} == {f"{i}.{w}" for i in (0, 1) for w in ("w1", "w2", "w3")}
    mixed, _ = model("rowwise")
    for block in mixed:
        block.w2.recipe = octavo.get_recipe("bf16")
    assert mixed(x).shape == x.shape
    with torch.autocast("cpu", torch.bfloat16):
        assert hooked(x).dtype == torch.bfloat16


def test_span_survives_copies_pickles_and_state_dicts():
    m, _ = model("blockwise")
    x = torch.randn(8, 128)
    for twin in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        assert torch.equal(twin(x), m(x))
        assert type(twin[0]) is type(m[0])
        assert twin[0].w1.weight is not m[0].w1.weight
    fresh, _ = model("blockwise")
    fresh.load_state_dict(m.state_dict(), strict=True)
    assert torch.equal(fresh(x), m(x))


def test_only_silu_mlps_of_converted_linears_are_spanned():
    torch.manual_seed(0)
    odd = FeedForward()
    odd.act_fn = nn.GELU()
    report = octavo.convert(nn.Sequential(odd, FeedForward()), rules=[(r"^1\.w2", None)])
    assert report.spans == ()


def test_mlp_says_what_it_needs():
    x, w = torch.randn(4, 32), torch.randn(64, 32)
    with pytest.raises(ValueError, match=r"w2\[D, F\] of one dtype"):
        mlp(x, w, w, w)
    with pytest.raises(ValueError, match="keeps the output product in high precision"):
        mlp(x, w, w, w.T, recipe="bf16")
