"""The expert MLP, forward and backward, in each recipe beside BF16: gate and up, SwiGLU, down, on one rank's rows.

DeepSeek-V3's rows come sorted by expert, as a dispatcher of expert parallelism leaves them; DeepSeek-MoE-16B's and
Llama4's are tokens with a router's choice, so permuting and combining are part of what is timed. ``aten`` is PyTorch
in BF16 by ``torch._grouped_mm``, ``compile`` the same under torch.compile, ``torch_fp8_compile`` the same with FP8
products (:mod:`octavo.bench.stock_moe`). Weights are quantized in every step but in ``octavo_cached``.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

import octavo
from octavo.bench import published, routings, stock_moe
from octavo.bench.cases import Case
from octavo.bench.grouped_suite import RECIPES, agrees, by_triton
from octavo.bench.timing import Contender, Contenders, Inputs
from octavo.training.expert_spanning import route, routed_experts, sorted_experts
from octavo.training.recipes import Recipe

CHOICES = {"DeepSeek-MoE-16B": 6, "Llama4 16E": 1}
"""Experts a token is sent to, of the models whose whole routing is on one rank."""
FLOOR_DB = 17.0
"""Least agreement of output and gradients with BF16 (docs/moe.md: 20 dB and more against float64)."""
NAMES = ("output", "x", "w1", "w3", "w2", "scores")


@dataclass(frozen=True)
class Bank:
    """Experts of width F on rows of width D; ``choices`` is 0 where the rows come sorted."""

    name: str
    routing: str
    rows: int
    d: int
    f: int
    experts: int
    choices: int

    @property
    def sizes(self) -> tuple[int, ...]:
        return routings.sizes(self.routing, self.rows, self.experts)

    def make(self) -> Inputs:
        """x and the output's gradient, w1, w3 and w2, and where the rows go: (ends,) or (indices, scores)."""
        tokens = self.rows // max(1, self.choices)
        x, g = (_normal(tokens, self.d) for _ in range(2))
        up, down = (self.experts, self.f, self.d), (self.experts, self.d, self.f)
        weights = [torch.nn.Parameter(_normal(*s).mul_(s[2] ** -0.5)) for s in (up, up, down)]
        return x, g, *weights, *self.destinations(tokens)

    def destinations(self, tokens: int) -> tuple[torch.Tensor, ...]:
        """(ends,) of sorted rows, or (indices, scores) of tokens."""
        if not self.choices:
            return (routings.ends(self.sizes),)
        scores = torch.rand(tokens, self.choices, device=routings.DEVICE)
        return routings.indices(self.sizes, tokens, self.choices), scores


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=routings.DEVICE, dtype=torch.bfloat16)


def banks(rows_an_expert: int | None = None) -> list[Bank]:
    """Every shape in every routing, even routings first; with ``rows_an_expert`` at so few rows."""
    found = []
    for routing in routings.ROUTINGS:
        for name, (rows, d, f, experts) in published.EXPERTS.items():
            choices = CHOICES.get(name, 0)
            if routing == "ragged" and choices:
                continue  # every choice of a token is some expert's
            few = rows if rows_an_expert is None else rows_an_expert * experts
            found.append(Bank(name, routing, few, d, f, experts, choices))
    return found


def train(function: Any, x: torch.Tensor, g: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(output, gradients of x, w1, w3, w2, and of the scores if there are any)."""
    x = x.detach().requires_grad_()
    weights, where = rest[:3], rest[3:]
    wanted = [x, *weights]
    if len(where) == 2:
        where = (where[0], where[1].detach().requires_grad_())
        wanted.append(where[1])
    out = function(x, weights, *where)
    return out.detach(), *torch.autograd.grad(out, wanted, g)


def _ours(recipe: Recipe, x: torch.Tensor, weights: Any, *where: torch.Tensor) -> torch.Tensor:
    if len(where) == 1:
        return sorted_experts(x, where[0], weights, recipe)
    indices, scores = where
    return routed_experts(x, indices, scores, weights, recipe)


def _stock(product: Any, x: torch.Tensor, weights: Any, *where: torch.Tensor) -> torch.Tensor:
    if len(where) == 1:
        return stock_moe.experts(product, x, weights, where[0], None, None, None)
    indices, scores = where
    routing = route(indices, weights[0].shape[0])
    rows = routing.order // indices.shape[1]
    return stock_moe.experts(product, x, weights, routing.offs, rows, routing.back, scores)


@contextlib.contextmanager
def _kept(step: Any, bank: Bank, held: list[weakref.ref[torch.Tensor]]) -> Iterator[None]:
    """Inside ``accumulate()``, with the weights of the last inputs quantized already by a step on few rows."""
    few = replace(bank, rows=16 * bank.experts * max(1, bank.choices), routing="uniform")
    tokens = few.rows // max(1, few.choices)
    with octavo.accumulate():
        if held:
            x = torch.zeros(tokens, bank.d, device=routings.DEVICE, dtype=torch.bfloat16)
            step(x, torch.zeros_like(x), *(reference() for reference in held), *few.destinations(tokens))
        yield


def _case(bank: Bank, recipe: str, fast: str) -> Case:
    ours = functools.partial(_ours, octavo.get_recipe(recipe, fast_accum=fast))
    step = functools.partial(train, ours)
    bf16 = functools.partial(_stock, stock_moe.bf16_grouped)
    fp8 = functools.partial(_stock, stock_moe.fp8_grouped)
    plain = functools.partial(train, bf16)
    held: list[weakref.ref[torch.Tensor]] = []

    def make() -> Inputs:
        inputs = bank.make()
        held[:] = [weakref.ref(w) for w in inputs[2:5]]
        return inputs

    def check(inputs: Inputs, result: Any) -> None:
        live = sum(bank.sizes) if not bank.choices else None
        idle = [e for e, size in enumerate(bank.sizes) if size == 0]
        for name, found, wanted in zip(NAMES, result, plain(*inputs), strict=False):
            rows = slice(live) if name in ("output", "x") else slice(None)
            agrees(found[rows], wanted[rows], FLOOR_DB, name)
            if name.startswith("w"):
                assert not found[idle].any(), f"{name}: an expert without rows, of {idle}, has a gradient"
            elif live is not None:
                assert not found[live:].any(), f"{name}: rows past the last end are not zero"

    contenders: Contenders = {
        "octavo": Contender(step),
        "octavo_cached": Contender(step, functools.partial(_kept, step, bank, held)),
        "aten": Contender(plain),
        "compile": Contender(functools.partial(train, stock_moe.compiled(bf16))),
    }
    if bank.routing == "uniform" and fast == "default" and recipe in ("rowwise", "blockwise"):
        contenders["octavo_compile"] = Contender(functools.partial(train, stock_moe.compiled(ours)))
    if recipe == "rowwise" and fast == "default":
        contenders["octavo_triton"] = Contender(step, by_triton)
    if recipe == "rowwise" and fast == "default" and stock_moe.fits(bank.sizes):
        contenders["torch_fp8_compile"] = Contender(functools.partial(train, stock_moe.compiled(fp8)))
    weights = 3 * bank.experts * bank.d * bank.f
    return Case(
        group=f"{recipe}{', fast everywhere' if fast == 'all' else ''}",
        case=f"{bank.name} {bank.routing}, {'tokens' if bank.choices else 'sorted rows'}",
        bytes=2 * (3 * weights + 4 * bank.rows // max(1, bank.choices) * bank.d),
        flops=18 * sum(bank.sizes) * bank.d * bank.f,
        make=make,
        contenders=contenders,
        check=check,
        taken=lambda inputs: True,
        by_events=True,
    )


def _cases(found: list[Bank]) -> list[Case]:
    even = [bank for bank in found if bank.routing == "uniform"]
    skewed = [bank for bank in found if bank.routing == "skewed"]
    rest = [bank for bank in found if bank.routing in ("empty", "ragged")]
    # What matters most comes first: a run may be cut short.
    return [
        *(_case(bank, *recipe) for recipe in RECIPES[:2] for bank in even),
        *(_case(bank, *RECIPES[2]) for bank in even),
        *(_case(bank, *RECIPES[1]) for bank in skewed),
        *(_case(bank, *RECIPES[0]) for bank in rest + skewed),
        *(_case(bank, *recipe) for recipe in RECIPES[3:] for bank in even),
        *(_case(bank, *RECIPES[2]) for bank in skewed + rest),
    ]


def cases(force: bool = False) -> list[Case]:
    """Every bank in the recipes, the most telling first; ``force`` changes nothing here."""
    return _cases(banks())


def small_cases() -> list[Case]:
    """The same kernels on 192 rows an expert: what compiles them all in less memory than the suite's."""
    return _cases(banks(192))
