"""Four Llama-3-8B blocks, forward and backward on 8192 tokens, through ``convert``, beside BF16 and torchao.

``aten`` is BF16 eager, ``compile`` BF16 under torch.compile, ``octavo`` eager and ``octavo_compile`` compiled;
weights are quantized in every step. Times are of CUDA events with the cache cleared; ``peak_gb`` is what one step,
its gradients included, takes beyond weights and inputs. Cached weights are timed by ``benchmarks/block_round.py``,
whose steps run inside ``octavo.accumulate()``.
"""

from __future__ import annotations

import functools

import torch
from torch import nn

from octavo.bench import peers
from octavo.bench.agreement import sqnr_db
from octavo.bench.cases import Case
from octavo.bench.linear_suite import RECIPES
from octavo.bench.timing import Contender, Inputs

TOKENS, LAYERS = 8192, 4
FLOOR_DB = 15.0


class _Blocks(nn.Module):
    def __init__(self) -> None:
        from octavo.models.llama3 import PRESETS, TransformerBlock

        super().__init__()
        self.config = PRESETS["llama3-8b"]
        self.layers = nn.ModuleList(TransformerBlock(self.config) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x


@functools.lru_cache(6)
def _model(kind: str, recipe: str, fast: str, compiled: bool) -> nn.Module:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = _Blocks().to(torch.bfloat16)
    if kind == "octavo":
        import octavo

        octavo.convert(model, octavo.get_recipe(recipe, fast_accum=fast))
    elif kind == "torchao":
        peers.torchao_float8(model, recipe)
    if compiled:
        assert isinstance(model.layers, nn.ModuleList)
        for layer in model.layers:
            layer.compile()
    return model


def _step(kind: str, recipe: str, fast: str, compiled: bool, *inputs: torch.Tensor) -> torch.Tensor:
    x, g, cos, sin = inputs
    model = _model(kind, recipe, fast, compiled)
    x = x.detach().requires_grad_()
    out = model(x, cos, sin)
    torch.autograd.grad(out, (x, *model.parameters()), g)
    return out.detach()


def _make() -> Inputs:
    from octavo.models.llama3 import PRESETS, rope_table

    config = PRESETS["llama3-8b"]
    x = torch.randn(1, TOKENS, config.dim, device="cuda", dtype=torch.bfloat16)
    return x, torch.randn_like(x) * 1e-3, *rope_table(config, TOKENS, x.device)


def _check(inputs: Inputs, result: torch.Tensor) -> None:
    db = sqnr_db(result, _step("bf16", "", "", False, *inputs))
    assert db > FLOOR_DB, f"output: {db:.1f} dB from BF16"


def _case(recipe: str, fast: str) -> Case:
    from octavo.models.llama3 import PRESETS

    config = PRESETS["llama3-8b"]
    heads = config.head_dim * config.n_kv_heads
    weights = 2 * config.dim * (config.dim + heads) + 3 * config.dim * config.ffn_dim
    contenders = {
        "octavo": Contender(functools.partial(_step, "octavo", recipe, fast, False)),
        "octavo_compile": Contender(functools.partial(_step, "octavo", recipe, fast, True)),
        "aten": Contender(functools.partial(_step, "bf16", "", "", False)),
        "compile": Contender(functools.partial(_step, "bf16", "", "", True)),
    }
    if fast == "default" and peers.has_torchao_recipe(recipe):
        contenders["torchao_compile"] = Contender(functools.partial(_step, "torchao", recipe, fast, True))
    return Case(
        group="four Llama-3-8B blocks",
        case=f"{recipe}, {'fast everywhere' if fast == 'all' else 'default accumulation'}",
        bytes=LAYERS * 6 * weights,
        # Products of the linear layers alone; attention's are the same for all.
        flops=LAYERS * 6 * TOKENS * weights,
        make=_make,
        contenders=contenders,
        check=_check,
        taken=lambda inputs: True,
        by_events=True,
        note="flops count the linear layers",
    )


def cases(force: bool = False) -> list[Case]:
    """The blocks in every recipe; ``force`` changes nothing here."""
    return [_case(*recipe) for recipe in RECIPES]
