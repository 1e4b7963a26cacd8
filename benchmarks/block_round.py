"""Four Llama-3-8B blocks, forward and backward on 8192 tokens, in BF16 and in each recipe, eager and compiled.

    PYTHONPATH=src python3 benchmarks/block_round.py --out DIR [--seconds N]

Outputs are checked against BF16 before anything is timed. Times are medians of CUDA events with the cache
cleared between runs; weights are quantized in every step unless the case says cached.
"""

import argparse
import contextlib
import json
import time
from pathlib import Path

import torch
import triton
from torch import nn
from triton.testing import do_bench

import octavo
from octavo.models.llama3 import PRESETS, TransformerBlock, rope_table
from octavo.testing import sqnr

TOKENS, LAYERS = 8192, 4
CASES = [
    ("bf16", "default", False),
    ("rowwise", "default", False),
    ("rowwise", "all", False),
    ("rowwise", "all", True),
    ("tensorwise", "default", False),
    ("tensorwise", "all", False),
    ("blockwise", "default", False),
    ("rowwise_with_gw_hp", "default", False),
    ("mxfp8", "default", False),
]


class Blocks(nn.Module):
    """``LAYERS`` blocks without embedding and head."""

    def __init__(self):
        super().__init__()
        self.config = PRESETS["llama3-8b"]
        self.layers = nn.ModuleList(TransformerBlock(self.config) for _ in range(LAYERS))

    def forward(self, x, cos, sin):
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x


def build(recipe, fast):
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Blocks().to(torch.bfloat16)
    if recipe != "bf16":
        octavo.convert(model, octavo.get_recipe(recipe, fast_accum=fast))
    return model


def measure(recipe, fast, cached, compiled, inputs, exact):
    torch._dynamo.reset()
    x, g, cos, sin = inputs
    model = build(recipe, fast)
    if compiled:
        for layer in model.layers:
            layer.compile()
    context = octavo.accumulate() if cached else contextlib.nullcontext()
    parameters = list(model.parameters())

    def step():
        x.grad = None
        for p in parameters:
            p.grad = None
        out = model(x, cos, sin)
        out.backward(g)
        return out

    with context:
        out = step().detach()
        quality = float("inf") if exact is None else sqnr(out, exact)
        assert torch.isfinite(x.grad).all()
        assert quality > 15, f"{recipe}: {quality} dB from BF16"
        step()
        torch.cuda.reset_peak_memory_stats()
        ms = do_bench(step, warmup=50, rep=500, return_mode="median")
    peak = torch.cuda.max_memory_allocated() / 1e9
    return out, {"recipe": recipe, "fast_accum": fast, "cached": cached, "compiled": compiled, "ms": ms,
                 "peak_gb": peak, "sqnr_to_bf16_db": quality}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--seconds", type=float, default=150)
    arguments = parser.parse_args()
    start, results = time.time(), []
    config = PRESETS["llama3-8b"]
    x = torch.randn(1, TOKENS, config.dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    g = torch.randn_like(x) * 1e-3
    inputs = (x, g, *rope_table(config, TOKENS, x.device))
    for compiled in (False, True):
        exact = None
        for recipe, fast, cached in CASES:
            if (compiled and cached) or time.time() - start > arguments.seconds:
                continue
            try:
                out, result = measure(recipe, fast, cached, compiled, inputs, exact)
            except Exception as error:  # one failing case must not lose the others' numbers
                print(
                    f"{recipe} {fast} compiled={compiled}: {type(error).__name__} {str(error)[:300]}",
                    flush=True,
                )
                continue
            exact = out if exact is None else exact
            results.append(result)
            base = next(r["ms"] for r in results if r["compiled"] == compiled)
            result["over_bf16"] = base / result["ms"]
            print(
                " | ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in result.items()),
                flush=True,
            )
            torch.cuda.empty_cache()
    report = {
        "suite": "block-round",
        "date": time.strftime("%Y-%m-%d"),
        "command": "python3 benchmarks/block_round.py --out benchmarks/results",
        "machine": {"gpu": torch.cuda.get_device_name()},
        "versions": {"octavo": octavo.__version__, "torch": torch.__version__, "triton": triton.__version__},
        "protocol": "median of CUDA events, cache cleared; 4 Llama-3-8B blocks, 8192 tokens, forward and backward",
        "cases": results,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "block-round-h200.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
