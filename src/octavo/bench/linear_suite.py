"""One linear layer, forward and backward on 8192 tokens, in each recipe beside BF16 and torchao.

``aten`` is BF16 eager, ``compile`` BF16 under torch.compile. Weights are quantized in every call: a captured graph
quantizes inside itself. ``deep_gemm`` stands beside Octavo's own product of the same blockwise operands.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from octavo.bench import peers
from octavo.bench.agreement import sqnr_db
from octavo.bench.cases import Case
from octavo.bench.timing import Contender, Inputs

TOKENS = 8192
LAYERS = {"qkv": (6144, 4096), "wo": (4096, 4096), "w1/w3": (14336, 4096), "w2": (4096, 14336)}
"""Llama-3-8B's, (out features, in features)."""
RECIPES = (
    ("rowwise", "default"), ("rowwise", "all"), ("tensorwise", "default"), ("tensorwise", "all"),
    ("blockwise", "default"), ("rowwise_with_gw_hp", "default"), ("mxfp8", "default"),
)  # fmt: skip
FLOOR_DB = 20.0
"""Least agreement of output and gradients with BF16 on normal inputs (numerics.md: about 28 dB)."""


@functools.lru_cache(6)
def _layer(kind: str, recipe: str, fast: str, n: int, k: int, compiled: bool) -> nn.Linear:
    # As many as a case has contenders: a captured graph must not outlive its weights.
    torch.manual_seed(0)
    layer = _plain_or_converted(kind, recipe, fast, n, k)
    if compiled:
        layer.compile(dynamic=False)
    return layer


def _plain_or_converted(kind: str, recipe: str, fast: str, n: int, k: int) -> nn.Linear:
    layer = nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16)
    if kind == "octavo":
        import octavo

        box = nn.ModuleDict({"layer": layer})
        octavo.convert(box, octavo.get_recipe(recipe, fast_accum=fast), min_size=0)
        return box["layer"]  # type: ignore[return-value]
    if kind == "torchao":
        return peers.torchao_float8(nn.Sequential(layer), recipe)[0]  # type: ignore[index, return-value]
    return layer


def train(layer: Any, x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(output, gradient of x, gradient of the weight)."""
    x = x.detach().requires_grad_()
    out = layer(x)
    return out.detach(), *torch.autograd.grad(out, (x, layer.weight), g)


def _contender(kind: str, recipe: str, fast: str, n: int, k: int, compiled: bool = False) -> Contender:
    def call(x: torch.Tensor, g: torch.Tensor) -> Any:
        return train(_layer(kind, recipe, fast, n, k, compiled), x, g)

    return Contender(call)


def _case(name: str, recipe: str, fast: str) -> Case:
    n, k = LAYERS[name]
    size = recipe, fast, n, k
    # The plain layer is one for every recipe.
    plain = _contender("bf16", "", "", n, k)

    def check(inputs: Inputs, result: Any) -> None:
        names = ("output", "grad_input", "grad_weight")
        for what, got, wanted in zip(names, result, plain(*inputs), strict=True):
            db = sqnr_db(got, wanted)
            assert db > FLOOR_DB, f"{what}: {db:.1f} dB from BF16"

    contenders = {
        "octavo": _contender("octavo", *size),
        "octavo_compile": _contender("octavo", *size, compiled=True),
        "aten": plain,
        "compile": _contender("bf16", "", "", n, k, compiled=True),
    }
    if fast == "default" and peers.has_torchao_recipe(recipe):
        contenders["torchao"] = _contender("torchao", *size)
        contenders["torchao_compile"] = _contender("torchao", *size, compiled=True)
    return Case(
        group=f"{recipe}, {'fast everywhere' if fast == 'all' else 'default accumulation'}",
        case=f"bf16 {name} {TOKENS}x{n}x{k}",
        bytes=2 * (2 * TOKENS * k + 2 * TOKENS * n + 2 * n * k),
        flops=6 * TOKENS * n * k,
        make=lambda: (
            torch.randn(TOKENS, k, device="cuda", dtype=torch.bfloat16),
            torch.randn(TOKENS, n, device="cuda", dtype=torch.bfloat16),
        ),
        contenders=contenders,
        check=check,
        taken=lambda inputs: True,
    )


def _product(name: str) -> Case:
    from octavo import formats
    from octavo.matmul import scaled_mm
    from octavo.quantize import quantize

    n, k = LAYERS[name]
    one, block = (formats.Format(formats.E4M3FN, g) for g in ("1x128", "128x128"))

    def make() -> Inputs:
        a = torch.randn(TOKENS, k, device="cuda", dtype=torch.bfloat16)
        w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
        return quantize(a, one), quantize(w, block), a, w

    def octavo(qa: Any, qb: Any, _a: Any, _w: Any) -> torch.Tensor:
        return scaled_mm(qa, qb, out_dtype=torch.bfloat16)

    def aten(_qa: Any, _qb: Any, a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return a @ w.T

    def check(inputs: Inputs, result: Any) -> None:
        db = sqnr_db(result, aten(*inputs))
        assert db > FLOOR_DB, f"{db:.1f} dB from BF16"

    return Case(
        group="blockwise product alone",
        case=f"e4m3 {name} {TOKENS}x{n}x{k}",
        bytes=TOKENS * k + n * k + 2 * TOKENS * n,
        flops=2 * TOKENS * n * k,
        make=make,
        contenders={"octavo": Contender(octavo), "aten": Contender(aten), **peers.deep_gemm_blockwise()},
        check=check,
        taken=lambda inputs: True,
    )


def cases(force: bool = False) -> list[Case]:
    """Every layer in every recipe, and the blockwise products; ``force`` changes nothing here."""
    layers = [_case(name, *recipe) for recipe in RECIPES for name in LAYERS]
    return layers + [_product(name) for name in LAYERS]
