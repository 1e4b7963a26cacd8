"""The monitor on experts: numbers against a count by hand over the rows of experts, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from training_support import CONTRACT, QUANTIZED_RECIPES, assert_all_equal

import octavo
from octavo.formats import Format
from octavo.quantize import quantize_grouped
from octavo.testing import sqnr
from octavo.training.expert_spanning import routed_experts
from octavo.training.gathered import GatheredWeight
from octavo.training.monitor import OperandStats
from octavo.training.observe import FIELDS, new_stats
from octavo.training.recipes import PRODUCTS

T, K, E, D, H = 40, 2, 5, 64, 32
INDICES = torch.randint(-1, 3, (T, K), generator=torch.Generator().manual_seed(1)) * 2
"""Experts 0, 2 and 4, and -2 for none; 1 and 3 get no row."""


def make(recipe: str, choices: int = K) -> tuple[octavo.GroupedExperts, tuple[torch.Tensor, ...]]:
    """A bank in a module; x, indices, scores and the gradient."""
    torch.manual_seed(0)
    experts = octavo.GroupedExperts(D, H, E, recipe=recipe)
    with torch.no_grad():
        for weight in experts.parameters():
            weight.normal_().mul_(weight.shape[2] ** -0.5)
    x, grad = torch.randn(T, D), torch.randn(T, D)
    indices = INDICES if choices == K else torch.cat((INDICES, torch.full((T, choices - K), 4)), 1)
    return experts, (x, indices, torch.rand(T, choices), grad)


def train(experts: octavo.GroupedExperts, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    x, indices, scores, grad = inputs
    x, scores = x.clone().requires_grad_(), scores.clone().requires_grad_()
    out = experts(x, indices, scores)
    return [out, *torch.autograd.grad(out, (x, scores, *experts.parameters()), grad)]


def by_expert(rows: torch.Tensor, offs: torch.Tensor, fmt: Format, turned: bool) -> torch.Tensor:
    """``rows``, of experts alone, decoded; transposed with a scale of its own an expert and column."""
    found, start = [], 0
    for end in offs.tolist():
        part = rows[start:end]
        if end > start and turned:
            # Groups end at whole blocks, padded by zeros.
            pad = -len(part) % max(1, fmt.block[1])
            q = octavo.quantize(F.pad(part, (0, 0, 0, pad)), fmt, transpose=True)
            found.append(octavo.dequantize(q).T[: end - start])
        elif end > start:
            one = torch.tensor([end - start], dtype=torch.int32)
            found.append(octavo.dequantize(quantize_grouped(part, one, fmt)))
        start = end
    return torch.cat(found)


@pytest.mark.parametrize("choices", [K, 5])
@pytest.mark.parametrize("recipe", QUANTIZED_RECIPES)
def test_the_numbers_are_those_of_a_count_by_hand(recipe: str, choices: int) -> None:
    """Tokens as they are sent and the gradients that come back; with many choices the input is quantized later."""
    experts, inputs = make(recipe, choices)
    with octavo.monitor(experts) as watch:
        train(experts, inputs)
    found = {(s.layer, s.product, s.operand): s for s in watch.read()}
    formats = dict(zip(("output", "grad_input", "grad_weight"), CONTRACT[recipe], strict=True))
    quantized = {name for name, pair in formats.items() if pair is not None}
    assert {key[:2] for key in found} == {(layer, p) for layer in ("gate_up", "down") for p in quantized}
    assert len(found) == 4 * len(quantized)

    x, indices, _, grad = inputs
    chosen = indices.flatten()
    order = torch.where(chosen < 0, E, chosen).sort(stable=True).indices
    offs = torch.bincount(chosen[chosen >= 0], minlength=E).cumsum(0).to(torch.int32)
    tokens = order[: offs[-1]] // choices
    for key, source in (
        (("gate_up", "output", "input"), x),
        (("down", "grad_input", "grad_output"), grad),
        (("gate_up", "grad_weight", "input"), x),
        (("down", "grad_weight", "grad_output"), grad),
    ):
        if key[1] in quantized:
            rows = source[tokens]
            product = octavo.get_recipe(recipe).product(key[1], x.device)
            assert product is not None
            fmt = product.b if key[1:] == ("grad_weight", "input") else product.a
            decoded = by_expert(rows, offs, fmt, key[1] == "grad_weight")
            assert found[key].amax == pytest.approx(rows.abs().max().item())
            assert found[key].sqnr_db == pytest.approx(sqnr(decoded, rows), abs=1e-6), key
            assert found[key].nonfinite == 0
    output = octavo.get_recipe(recipe).product("output", x.device)
    assert output is not None
    for layer, weight in (("gate_up", torch.cat((experts.w1, experts.w3), 1)), ("down", experts.w2)):
        decoded = octavo.dequantize(octavo.quantize(weight, output.b))
        seen = found[layer, "output", "weight"]
        assert seen.amax == pytest.approx(weight.abs().max().item())
        assert seen.sqnr_db == pytest.approx(sqnr(decoded, weight), abs=1e-6)
    for seen in found.values():
        assert seen.sqnr_db > 15
        assert seen.underflowed < 0.2


@pytest.mark.parametrize("recipe", QUANTIZED_RECIPES)
def test_watching_changes_no_bit(recipe: str) -> None:
    experts, inputs = make(recipe)
    alone = train(experts, inputs)
    with octavo.monitor(experts):
        watched = train(experts, inputs)
    assert_all_equal(watched, alone)
    assert_all_equal(train(experts, inputs), alone)
    assert experts.stats == (None, None)


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise", "mxfp8"])
def test_rows_of_no_expert_are_not_counted(recipe: str) -> None:
    """Sorted rows with a tail of NaN: what lies there is no operand."""
    experts, (x, _, _, grad) = make(recipe)
    offs = torch.tensor([7, 7, 20, 30, 30], dtype=torch.int32)
    seen: list[list[OperandStats]] = []
    for tail in (0.0, float("nan")):
        x[30:] = tail
        with octavo.monitor(experts) as watch:
            out = experts.forward_sorted(x.clone().requires_grad_(), offs)
            out.backward(grad.index_fill(0, torch.arange(30, T), tail))
        seen.append(watch.read())
    assert seen[0] == seen[1]
    assert all(s.nonfinite == 0 for s in seen[1])


def test_a_bad_weight_is_named() -> None:
    experts, inputs = make("rowwise")
    model = nn.ModuleDict({"moe": experts})
    with torch.no_grad():
        experts.w2[2, 0, 0] = torch.nan
    with octavo.monitor(model) as watch:
        train(experts, inputs)
    first = watch.first_nonfinite()
    assert first is not None
    assert (first.layer, first.product, first.operand) == ("moe.down", "output", "weight")


def test_plain_experts_are_no_layer_to_watch() -> None:
    experts, _ = make("bf16")
    with pytest.raises(ValueError, match="no converted layer to watch"):
        octavo.monitor(experts)
    assert octavo.convert(experts, "rowwise").converted == ("",)
    with octavo.monitor(experts) as watch:
        assert watch.read() == []


@pytest.mark.parametrize("form", ["rows", "groups"])
def test_a_compiled_bank_is_watched(form: str) -> None:
    experts, (x, indices, scores, grad) = make("rowwise")
    offs = torch.tensor([7, 7, 20, 30, 30], dtype=torch.int32)

    def call(x: torch.Tensor) -> torch.Tensor:
        return experts.forward_sorted(x, offs) if form == "groups" else experts(x, indices, scores)

    found = []
    for forward in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
        with octavo.monitor(experts) as watch:
            forward(x.clone().requires_grad_()).backward(grad)
        found.append(watch.read())
    assert found[0] == found[1]
    assert len(found[0]) == 12


def test_weights_that_were_gathered_in_8_bits_are_not_seen() -> None:
    """There is nothing to compare their codes with; the rows beside them are watched all the same."""
    torch.manual_seed(0)
    recipe = octavo.get_recipe("blockwise")
    product = recipe.product("output", torch.device("cpu"))
    assert product is not None
    weights = []
    for _ in range(3):
        q = octavo.quantize(torch.randn(E, 128, 128), product.b)
        weights.append(GatheredWeight(q.data, q.scale, q.format.key, torch.float32, ""))
    stats = new_stats(torch.device("cpu")), new_stats(torch.device("cpu"))
    x = torch.randn(T, 128, requires_grad=True)
    scores = torch.rand(T, K)
    routed_experts(x, INDICES, scores, tuple(weights), recipe, stats).sum().backward()
    for buffer in stats:
        elements = buffer[..., FIELDS.index("elements")]
        assert elements[PRODUCTS.index("output"), 0] > 0
        assert elements[PRODUCTS.index("grad_input"), 0] > 0
        assert not elements[:2, 1].any()
