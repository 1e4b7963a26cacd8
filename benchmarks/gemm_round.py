"""Products behind PyTorch's operators on one GPU: checks first, then plans timed side by side, then the suites.

python benchmarks/gemm_round.py OUT [--checks] [--plans] [--suites]      (all by default)

Checks are those of tests/operators/gemm_checks.py, run on the card, each committed plan against the reference, and
``F.scaled_mm`` in eager mode and under torch.compile. A plan that does not compile (registers, shared memory) or is
wrong is a row that says so; lines of ``operators/gemm/plans.json`` are chosen from ``gemm-plans.json``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from octavo import hardware, operators, quantize
from octavo.bench import main, report, timing
from octavo.bench.mx_suite import FORMATS, TOLERANCE
from octavo.formats import ScaledTensor
from octavo.matmul import reference as matmul_reference
from octavo.operators.gemm import launch, reference
from octavo.operators.gemm import plan as plans
from octavo.operators.gemm.plan import Plan

CHECKS = Path(__file__).parents[1] / "tests" / "operators" / "gemm_checks.py"
GROUPS = ("mx", "mixed", "values", "first", "calls")
ROWS = (1, 16, 32, 64, 128, 256, 1024, 4096)
WEIGHTS = ((4096, 4096), (14336, 4096))
TILES = {
    16: [(16, 32), (16, 64), (16, 128)],
    64: [(16, 64), (32, 64), (64, 64), (64, 128)],
    256: [(64, 64), (64, 128), (128, 64), (128, 128)],
}
"""(BLOCK_M, BLOCK_N) by the most rows that they are tried for."""
WORKS = ("mxfp8", "mxfp4", "16-bit x mxfp8", "16-bit x mxfp4", "16-bit x block")


def checks() -> None:
    """Every group of the tests, on this card."""
    for group in GROUPS:
        done = subprocess.run([sys.executable, str(CHECKS), group], capture_output=True, text=True)
        print("checks", done.stdout.strip() or done.stderr[-2000:], flush=True)
        if done.returncode:
            raise SystemExit(f"{group}: the kernels are wrong, nothing is timed")
    _check_calls()


def _check_calls() -> None:
    """PyTorch's function, eager and compiled; the older operator, which takes no swizzle, too."""
    import torch.nn.functional as F

    recipe, swizzle = F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4
    a, b = (quantize(torch.randn(n, 512, device="cuda"), FORMATS["mxfp8"]) for n in (96, 256))
    sa, sb = (reference.swizzle(x.scale.view(torch.uint8)).view(torch.float8_e8m0fnu) for x in (a, b))
    want = matmul_reference.scaled_mm(a, b, None, torch.bfloat16, False)

    def step(x: torch.Tensor) -> torch.Tensor:
        return F.scaled_mm(x, b.data.t(), sa, recipe, sb, recipe, swizzle, swizzle)

    operators.enable("gemm")
    for name, call in (("eager", step), ("compiled", torch.compile(step, fullgraph=True))):
        error = ((call(a.data).double() - want.double()).norm() / want.double().norm()).item()
        print("F.scaled_mm", name, f"{error:.2e}", flush=True)
        if error > TOLERANCE:
            raise SystemExit(f"F.scaled_mm, {name}, is wrong")
    print(operators.status(), flush=True)
    operators.disable("gemm")


def _candidates(work: str, rows: int) -> list[Plan]:
    limit = next((limit for limit in TILES if rows <= limit), None)
    found = [Plan("decode_first")] if rows > 64 else []
    blocks = (128,) if work.endswith("block") else (128, 256)
    for (m, n), k, swap, stages in itertools.product(TILES[limit or 256], blocks, (False, True), (2, 4)):
        for split, warps in itertools.product((1, 4) if rows <= 64 else (1,), (4, 8) if rows > 64 else (4,)):
            found.append(Plan("tiles", (m, n, k), warps, stages, split=split, swap=swap))
    committed = plans.choose(hardware.architecture("cuda"), work, rows)
    return [committed, *(plan for plan in found if plan != committed)]


def _operands(work: str, rows: int, n: int, k: int) -> tuple[torch.Tensor | ScaledTensor, ScaledTensor]:
    fmt = FORMATS[work.split()[-1]]
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    weight = quantize(torch.randn(n, k, device="cuda", dtype=torch.bfloat16), fmt)
    return (x if work.startswith("16") else quantize(x, fmt)), weight


def _time(plan: Plan, sets: list, want: torch.Tensor) -> dict:
    row = {"plan": asdict(plan)}
    outs = [torch.empty_like(want) for _ in sets]
    try:
        got = launch.product(*sets[0], None, outs[0], plan)
        error = ((got.double() - want.double()).norm() / want.double().norm()).item()
        if not error <= TOLERANCE:
            return row | {"error": f"wrong by {error:.2e}"}
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for operands, out in zip(sets, outs):
                launch.product(*operands, None, out, plan)
        times = []
        for _ in range(7):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / len(sets))
        return row | {"ms": statistics.median(times)}
    except Exception as error:  # a plan that the compiler or the card refuses is a result, not an end
        return row | {"error": f"{type(error).__name__}: {str(error)[:120]}"}


def _sets(work: str, rows: int, n: int, k: int) -> list:
    first = _operands(work, rows, n, k)
    sides = [(x.data, x.scale) if isinstance(x, ScaledTensor) else (x,) for x in first]
    count = min(64, timing.copies(timing.nbytes([t for side in sides for t in side])))
    return [first, *(_operands(work, rows, n, k) for _ in range(count - 1))]


def time_plans(out: Path) -> None:
    """Every candidate by work, weight and rows; written as they come, the committed plan first of each shape."""
    rows: list[dict] = []
    for work, (n, k), m in itertools.product(WORKS, WEIGHTS, ROWS):
        sets = _sets(work, m, n, k)
        a, b = sets[0]
        want = (
            matmul_reference.scaled_mm(a, b, None, torch.bfloat16, False)
            if isinstance(a, ScaledTensor)
            else reference.mixed_mm(a, b, None)
        )
        found = [
            {"work": work, "m": m, "n": n, "k": k, **_time(plan, sets, want)} for plan in _candidates(work, m)
        ]
        rows += found
        best = min((row for row in found if "ms" in row), key=lambda row: row["ms"], default=None)
        print(work, m, n, k, "committed", found[0].get("ms", found[0].get("error")), "best", best, flush=True)
        content = {"suite": "gemm-plans", "machine": report.machine(), "rows": rows}
        (out / "gemm-plans.json").write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    for step in ("checks", "plans", "suites"):
        parser.add_argument(f"--{step}", action="store_true")
    chosen = parser.parse_args()
    every = not (chosen.checks or chosen.plans or chosen.suites)
    chosen.out.mkdir(parents=True, exist_ok=True)
    if chosen.checks or every:
        checks()
    if chosen.plans or every:
        time_plans(chosen.out)
    if chosen.suites or every:
        for suite in ("mx", "grouped-bf16"):
            main.run(suite, chosen.out, force=True, progress=lambda line: print(line, flush=True))
