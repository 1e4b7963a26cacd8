"""A layer of a mixture of experts as the models have it, forward and backward, through ``convert`` beside BF16.

Router, permuting, routed experts, combining and shared experts (:class:`octavo.models.mixture.MixtureOfExperts`) on one
rank. DeepSeek-V3 has the experts that a rank of 8 or of 32 holds, and every choice among these. ``skewed`` tokens have
a direction in common, which the router's rows like more or less. ``aten`` is the same layer in BF16, ``compile`` under
torch.compile; weights are quantized in every step.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from octavo.bench import routings
from octavo.bench.cases import Case
from octavo.bench.grouped_suite import RECIPES, agrees
from octavo.bench.timing import Contender, Inputs
from octavo.models.deepseek import PRESETS
from octavo.models.mixture import MixtureConfig, MixtureOfExperts

_V3 = replace(PRESETS["deepseek-v3"].mixture, groups=1, active_groups=1)
LAYERS: dict[str, tuple[int, int, MixtureConfig]] = {
    "DeepSeek-MoE-16B": (8192, PRESETS["deepseek-moe-16b"].dim, PRESETS["deepseek-moe-16b"].mixture),
    "DeepSeek-V3 EP8": (8192, PRESETS["deepseek-v3"].dim, replace(_V3, experts=32)),
    "DeepSeek-V3 EP32": (8192, PRESETS["deepseek-v3"].dim, replace(_V3, experts=8, active=4)),
    "Llama4 16E": (
        16384, 5120, MixtureConfig(experts=16, active=1, ffn_dim=8192, shared=1, score="sigmoid"),
    ),
}  # fmt: skip
"""(tokens, width, mixture)."""
LEAN = 0.5
"""Of the direction that skewed tokens have in common, against a standard deviation of 1 of each."""
FLOOR_DB = 15.0


@functools.lru_cache(4)
def _layer(kind: str, recipe: str, fast: str, name: str, compiled: bool) -> nn.Module:
    # As many as a case has contenders.
    _, dim, mixture = LAYERS[name]
    torch.manual_seed(0)
    with torch.device(routings.DEVICE):
        layer = MixtureOfExperts(dim, mixture).to(torch.bfloat16)
    if kind == "octavo":
        import octavo

        octavo.convert(layer, octavo.get_recipe(recipe, fast_accum=fast), min_size=0)
    if compiled:
        layer.compile(dynamic=False)
    return layer


def _step(
    kind: str, recipe: str, fast: str, name: str, compiled: bool, *inputs: Any
) -> tuple[torch.Tensor, ...]:
    """(output, gradients of x and of every parameter)."""
    x, g = inputs
    layer = _layer(kind, recipe, fast, name, compiled)
    x = x.detach().requires_grad_()
    out = layer(x)
    return out.detach(), *torch.autograd.grad(out, (x, *layer.parameters()), g)


def _case(name: str, routing: str, recipe: str, fast: str, tokens: int) -> Case:
    _, dim, mixture = LAYERS[name]
    plain = functools.partial(_step, "bf16", "", "", name, False)

    def make() -> Inputs:
        x = torch.randn(1, tokens, dim, device=routings.DEVICE)
        common = torch.randn(dim, generator=torch.Generator().manual_seed(1)).to(x.device)
        x = x + LEAN * common if routing == "skewed" else x
        return x.bfloat16(), torch.randn_like(x).bfloat16()

    def check(inputs: Inputs, result: Any) -> None:
        for what, found, wanted in zip(("output", "grad_input"), result[:2], plain(*inputs)[:2], strict=True):
            agrees(found, wanted, FLOOR_DB, what)

    experts = tokens * (mixture.active + mixture.shared) * 3 * dim * mixture.ffn_dim
    held = (mixture.experts + mixture.shared) * 3 * dim * mixture.ffn_dim
    return Case(
        group=f"{recipe}{', fast everywhere' if fast == 'all' else ''}",
        case=f"{name} {routing}",
        bytes=2 * (3 * held + 4 * tokens * dim),
        flops=6 * experts,
        make=make,
        contenders={
            "octavo": Contender(functools.partial(_step, "octavo", recipe, fast, name, False)),
            "octavo_compile": Contender(functools.partial(_step, "octavo", recipe, fast, name, True)),
            "aten": Contender(plain),
            "compile": Contender(functools.partial(_step, "bf16", "", "", name, True)),
        },
        check=check,
        taken=lambda inputs: True,
        by_events=True,
        note="flops count the products of the experts, routed and shared",
    )


def _cases(tokens: int | None) -> list[Case]:
    return [
        _case(name, routing, *recipe, LAYERS[name][0] if tokens is None else tokens)
        for recipe in RECIPES[:4]
        for routing in ("even", "skewed")
        for name in LAYERS
    ]


def cases(force: bool = False) -> list[Case]:
    """Every layer in every recipe, even tokens first; ``force`` changes nothing here."""
    return _cases(None)


def small_cases() -> list[Case]:
    """The same kernels on 2048 tokens: what compiles them all in less memory than the suite's."""
    return _cases(2048)
