"""SQNR of the three products of every recipe against float64, by the floors of ``floors.json``.

``python tests/training/test_training_numerics.py`` measures again and prints the table for the file.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from training_support import CONTRACT, QUANTIZED_RECIPES

import octavo
from octavo.testing import outlier_matrix, sqnr, worst_row_sqnr

PATH = Path(__file__).with_name("floors.json")
DOC = Path(__file__).parents[2] / "docs" / "numerics.md"
TABLE = json.loads(PATH.read_text()) if PATH.exists() else {"margin_db": 0.75, "seen": {}}
PRODUCTS = ("output", "grad_input", "grad_weight")
INPUTS = ("normal", "outliers")
SEEDS = (0, 1, 2)
# [M, N, K] of the layer such that the contraction of that product is 4096 long.
SIZES = {"output": (128, 128, 4096), "grad_input": (128, 4096, 128), "grad_weight": (4096, 128, 128)}
# High precision and MX do not depend on the family.
CASES = [
    (recipe, family)
    for recipe in octavo.RECIPES
    for family in ("ocp", "fnuz")
    if family == "ocp" or recipe not in ("bf16", "mxfp8")
]


def operands(product: str, kind: str, seed: int) -> tuple[torch.Tensor, ...]:
    """x [M, K], weight [N, K], g [M, N] in bfloat16; outliers lie in x and g, weights are normal."""
    m, n, k = SIZES[product]
    generator = torch.Generator().manual_seed(seed)

    def draw(shape: tuple[int, int], index: int) -> torch.Tensor:
        if kind == "outliers":
            return outlier_matrix(shape, seed=10 * seed + index, dtype=torch.bfloat16)
        return torch.randn(shape, generator=generator).bfloat16()

    weight = torch.randn((n, k), generator=torch.Generator().manual_seed(100 + seed)).bfloat16()
    return draw((m, k), 1), weight, draw((m, n), 2)


def measure(recipe: octavo.Recipe, product: str, kind: str) -> tuple[float, float]:
    """Lowest (global, worst-row) SQNR in dB over :data:`SEEDS`."""
    seen = []
    for seed in SEEDS:
        x, weight, g = operands(product, kind, seed)
        x64, w64, g64 = x.double(), weight.double(), g.double()
        x.requires_grad_(product == "grad_input")
        weight.requires_grad_(product == "grad_weight")
        out = octavo.linear(x, weight, recipe=recipe)
        if product == "output":
            actual, expected = out, x64 @ w64.T
        else:
            out.backward(g)
            if product == "grad_input":
                actual, expected = x.grad, g64 @ w64
            else:
                actual, expected = weight.grad, g64.T @ x64
        seen.append((sqnr(actual, expected), worst_row_sqnr(actual, expected)))
    return min(s[0] for s in seen), min(s[1] for s in seen)


def key(recipe: str, family: str, kind: str) -> str:
    return f"{recipe} {family} {kind}"


def floor(recipe: str, family: str, kind: str, product: str) -> tuple[float, float]:
    """(global, worst-row) floor in dB: what was seen less the margin."""
    seen = TABLE["seen"][key(recipe, family, kind)][product]
    return seen[0] - TABLE["margin_db"], seen[1] - TABLE["margin_db"]


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize(("recipe", "family"), CASES)
def test_every_product_keeps_its_sqnr_floor(recipe: str, family: str, kind: str, product: str) -> None:
    least, least_row = floor(recipe, family, kind, product)
    seen, seen_row = measure(replace(octavo.RECIPES[recipe], family=family), product, kind)
    assert seen >= least
    assert seen_row >= least_row


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("family", ["ocp", "fnuz"])
def test_the_rowwise_floors_are_at_least_25_db(family: str, product: str, kind: str) -> None:
    assert floor("rowwise", family, kind, product)[0] >= 25


def test_one_wrong_scale_is_seen_by_the_worst_row_floor() -> None:
    x, weight, _ = operands("output", "normal", 0)
    (fmt_x, fmt_w, _), *_ = CONTRACT["rowwise"]
    a, b = octavo.quantize(x, fmt_x), octavo.quantize(weight, fmt_w)
    a.scale[5] *= 2
    out = octavo.scaled_mm(a, b)
    assert (
        worst_row_sqnr(out, x.double() @ weight.double().T) < floor("rowwise", "ocp", "normal", "output")[1]
    )


@pytest.mark.parametrize("recipe", QUANTIZED_RECIPES)
def test_a_recipe_really_rounds_to_8_bits(recipe: str) -> None:
    for product, formats in zip(PRODUCTS, CONTRACT[recipe], strict=True):
        if formats is not None:
            assert measure(octavo.RECIPES[recipe], product, "normal")[0] < 30


@pytest.mark.parametrize("recipe", octavo.RECIPES)
def test_the_recipes_are_those_of_the_contract(recipe: str) -> None:
    found = octavo.RECIPES[recipe]
    for product, formats in zip(PRODUCTS, CONTRACT[recipe], strict=True):
        actual = found.product(product, torch.device("cpu"))
        assert (actual and (actual.a, actual.b, actual.fast_accum)) == formats


def documented_table() -> str:
    """The floors as the Markdown table of docs/numerics.md: floor (seen) of global / worst row."""
    lines = [
        "| recipe | FP8 family | inputs | output | grad_input | grad_weight |",
        "|---|---|---|---|---|---|",
    ]
    for recipe, family in CASES:
        for kind in INPUTS:
            cells = []
            for product in PRODUCTS:
                least = floor(recipe, family, kind, product)
                seen = TABLE["seen"][key(recipe, family, kind)][product]
                cells.append(" / ".join(f"{a:.1f} ({b:.1f})" for a, b in zip(least, seen, strict=True)))
            shown = family if recipe not in ("bf16", "mxfp8") else "any"
            lines.append(f"| {recipe} | {shown} | {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def test_the_documented_floors_are_these() -> None:
    assert documented_table() in DOC.read_text()


if __name__ == "__main__":
    seen = {
        key(recipe, family, kind): {
            p: [round(v, 2) for v in measure(replace(octavo.RECIPES[recipe], family=family), p, kind)]
            for p in PRODUCTS
        }
        for recipe, family in CASES
        for kind in INPUTS
    }
    print(json.dumps({"margin_db": TABLE["margin_db"], "seen": seen}, indent=1))
