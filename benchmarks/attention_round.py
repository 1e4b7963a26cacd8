"""Attention on one GPU: tiles timed side by side, then the suite; a line of ``plans.json`` for each head dimension.

python benchmarks/attention_round.py OUT [--tiles] [--suite]      (both by default)

Every candidate is checked against PyTorch's flash kernel before it is timed. A tile that does not compile (registers,
shared memory) is a row that says so.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch

from octavo.bench import main, report
from octavo.bench.attention_suite import BACKENDS, HEAD_DIMS, WIDTH, check, flops
from octavo.operators import attention
from octavo.operators.attention.plan import Plan, Tile

LENGTHS = (1024, 8192)
ROUNDS = 7
FORWARD = [
    (128, 128, 8, 2),
    (128, 64, 8, 2),
    (128, 64, 8, 3),
    (128, 64, 4, 3),
    (64, 64, 4, 3),
    (128, 128, 8, 3),
]
KEYS = [(64, 128, 8, 2), (32, 128, 8, 2), (64, 64, 4, 2), (64, 64, 8, 2), (32, 64, 4, 2), (128, 64, 8, 2)]
QUERIES = [
    (128, 64, 8, 2),
    (64, 64, 4, 2),
    (128, 32, 8, 2),
    (128, 64, 8, 3),
    (128, 128, 8, 2),
    (64, 128, 8, 2),
]
SAFE = Tile(64, 64, 4, 2)


def _inputs(d: int, dv: int, length: int) -> list[torch.Tensor]:
    heads, batch = max(1, WIDTH // d), max(1, 8192 // length)
    made = [torch.randn(batch, length, heads, n, device="cuda", dtype=torch.bfloat16) for n in (d, d, dv, dv)]
    return [x.transpose(1, 2) for x in made]


def _ms(call) -> float:
    for _ in range(2):
        call()
    times = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def _variants() -> list[tuple[str, Plan]]:
    found = []
    for descriptors in (True, False):
        found += [("forward", Plan(Tile(*t), SAFE, SAFE, descriptors)) for t in FORWARD]
        found += [("keys", Plan(SAFE, Tile(*t), SAFE, descriptors)) for t in KEYS]
        found += [("queries", Plan(SAFE, SAFE, Tile(*t), descriptors)) for t in QUERIES]
        found += [("fused", Plan(SAFE, Tile(*t), SAFE, descriptors, True)) for t in KEYS[:3]]
    return found


def _time(kind: str, plan: Plan, tensors: list[torch.Tensor], causal: bool, theirs: tuple) -> dict:
    q, k, v, g = tensors
    row = {"kind": kind, "descriptors": plan.descriptors}
    row["tile"] = list(vars(plan.keys if kind == "fused" else getattr(plan, kind)).values())
    try:
        if kind == "forward":
            check(attention.attention(q, k, v, causal, plan=plan)[0], theirs[0][0])
            return row | {"ms": _ms(lambda: attention.attention(q, k, v, causal, plan=plan))}
        saved = theirs[0][0], theirs[0][1]
        check(attention.attention_backward(g, q, k, v, *saved, causal, plan=plan), theirs[1])
        return row | {"ms": _ms(lambda: attention.attention_backward(g, q, k, v, *saved, causal, plan=plan))}
    except Exception as error:  # a tile that the compiler or the card refuses is a result, not an end
        return row | {"error": f"{type(error).__name__}: {str(error)[:120]}"}


def tiles(out: Path) -> None:
    """Every variant at two lengths, causal; written as they come."""
    rows: list[dict] = []
    for d, dv in HEAD_DIMS:
        for length in LENGTHS:
            tensors = _inputs(d, dv, length)
            q, k, v, g = tensors
            backend = BACKENDS["flash" if d == dv else "cudnn"]
            forward = backend.forward(q, k, v, True)
            theirs = forward, backend.backward(g, q, k, v, forward, True)
            for kind, plan in _variants():
                row = {"d": d, "dv": dv, "length": length, **_time(kind, plan, tensors, True, theirs)}
                if "ms" in row:
                    shape = q.shape[0], q.shape[1], length, d, dv, True, kind != "forward"
                    row["tflops"] = flops(*shape) / row["ms"] / 1e9
                rows.append(row)
                print(row, flush=True)
            content = {"suite": "attention-tiles", "machine": report.machine(), "rows": rows}
            (out / "attention-tiles.json").write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--suite", action="store_true")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    if chosen.tiles or not chosen.suite:
        tiles(chosen.out)
    if chosen.suite or not chosen.tiles:
        main.run(
            "attention", chosen.out, compile=False, force=True, progress=lambda line: print(line, flush=True)
        )
