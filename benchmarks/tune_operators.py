"""Time every launch plan of the TopK and RMSNorm kernels beside PyTorch's own, after checking each result.

    PYTHONPATH=src python benchmarks/tune_operators.py topk forward backward --out FOLDER --seconds 240

Kernels are compiled first, in parallel processes that share the cache; then the plans of a shape are timed together by
CUDA-graph replay over rotating inputs. Results go to FOLDER/tune-<kind>.json as they come, with the plan of each time.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from octavo.bench import rmsnorm_suite, timing, topk_suite
from octavo.bench.cases import dtype_of
from octavo.bench.timing import Contender
from octavo.operators import rms_norm, topk
from octavo.operators.rms_norm import plan as norm_plans
from octavo.operators.topk import plan as topk_plans

EPS = 1e-6


def _name(plan) -> str:
    values = ",".join(f"{f.name}={getattr(plan, f.name)}" for f in dataclasses.fields(plan))
    return f"{type(plan).__name__}({values})"


def _unique(plans):
    return list(dict.fromkeys(plans))


def topk_candidates(shape):
    dtype, m, n, k = shape
    item = dtype_of(dtype).itemsize
    plans = [topk_plans.choose(m, n, k, item, 264)]
    if k <= 32 and n <= 1024:
        plans += [topk_plans.list_plan(n, k, lanes) for lanes in (4, 8, 16, 32)]
        plans += [topk_plans.list_plan(n, k, 8, 2)]
    if k <= 32 and n >= 200:
        for warps in (1, 2, 4, 8, 16):
            plan = topk_plans.threshold_plan(n, k, item, warps)
            if 4 <= plan.chunks <= 32 and n <= 32768:
                plans.append(plan)
    if k > 32 or n > 16384:
        for warps, unroll in ((4, 8), (8, 4), (8, 8), (16, 8)):
            plans.append(topk_plans.select_plan(m, n, k, warps, unroll))
        base = topk_plans.select_plan(m, n, k, 8, 8)
        if base.groups == 1024 and base.kp <= 256:
            plans.append(dataclasses.replace(base, groups=512))
        if m <= 256:
            plans += [topk_plans.select_plan(m, n, k, 8, 8, splits=s) for s in (1, 4, 16)]
    return _unique(plans)


def forward_candidates(shape):
    dtype, m, n = shape
    item = dtype_of(dtype).itemsize
    plans = [norm_plans.choose_forward(m, n, item, 264)]
    rows_plan = norm_plans.rows_plan
    if n <= 1024:
        for rows in (1, 4, 8, 16, 32):
            plans.append(rows_plan(n, item, 4, rows))
            plans.append(rows_plan(n, item, 4, rows, programs=1056, hold_weight=True, stages=2))
    elif n * item <= 2**18:
        for warps in (4, 8, 16, 32):
            if n // (32 * warps) * item > 320:
                continue
            plans.append(rows_plan(n, item, warps))
            if n * item <= 2**15 and warps <= 8:
                plans.append(
                    rows_plan(n, item, warps, programs=264 * max(1, 8 // warps), hold_weight=True, stages=2)
                )
                plans.append(
                    rows_plan(n, item, warps, programs=264 * max(1, 8 // warps), hold_weight=True, stages=3)
                )
            if n % 16:
                for c in (256 * warps, 64 * warps):
                    if -(-n // c) <= 20:
                        plans.append(norm_plans.RowsPlan(1, c, -(-n // c), warps))
    if n > 16384:
        plans += [
            norm_plans.LongPlan(c, w) for c, w in ((4096, 8), (8192, 8), (8192, 16), (16384, 16), (16384, 32))
        ]
    if m <= 64:
        plans += [norm_plans.split_plan(m, n, c, p) for c in (1024, 2048, 4096) for p in (264, 1056) if c < n]
    return _unique(plans)


def backward_candidates(shape):
    dtype, m, n = shape
    item = dtype_of(dtype).itemsize
    plans = [norm_plans.choose_backward(m, n, item, 264)]
    rows_plan = norm_plans.rows_plan
    if n <= 1024:
        for rows in (4, 8, 16, 32):
            for programs in (264, 528, 1056):
                plans.append(rows_plan(n, item, 4, rows, programs=min(-(-m // rows), programs), stages=2))
            plans.append(rows_plan(n, item, 4, rows, programs=min(-(-m // rows), 528), stages=1))
    elif n * item <= 2**17:
        for warps in (4, 8, 16, 32):
            if n // (32 * warps) > 48:
                continue
            for programs in (132, 264, 528):
                for stages in (1, 2, 3):
                    if not 132 * 8 <= programs * warps <= 132 * 32 or stages * 2 * n * item > 200000:
                        continue
                    plans.append(rows_plan(n, item, warps, programs=min(m, programs), stages=stages))
    if n * item > 2**15 or m <= 64:
        for c in (512, 1024, 2048):
            for rows in (2, 8):
                plans.append(norm_plans.split_plan(m, n, c, 264, 4 if c * rows <= 2048 else 8, rows))
    return _unique(plans)


def _inputs(kind, shape):
    m, n = shape[1], shape[2]
    dtype = dtype_of(shape[0])
    x = torch.randn(m, n, device="cuda").to(dtype)
    if kind == "topk":
        return (x,)
    w = torch.randn(n, device="cuda").to(dtype)
    if kind == "forward":
        return x, w
    g = torch.randn(m, n, device="cuda").to(dtype)
    return g, x, torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS), w


def _calls(kind, shape):
    """(PyTorch's call, ours with a plan, check)."""
    if kind == "topk":
        k = shape[3]
        ours = lambda plan: lambda x: topk.topk(x, k, plan=plan)  # noqa: E731
        return lambda x: torch.topk(x, k), ours, lambda inputs, got: topk_suite.check(inputs, got, k)
    if kind == "forward":
        ours = lambda plan: lambda x, w: rms_norm.fused_rms_norm(x, w.shape, w, EPS, plan=plan)  # noqa: E731
        return (
            (lambda x, w: torch.ops.aten._fused_rms_norm(x, w.shape, w, EPS)),
            ours,
            rmsnorm_suite.check_forward,
        )
    both = [True, True]

    def ours(plan):
        return lambda g, x, r, w: rms_norm.fused_rms_norm_backward(g, x, w.shape, r, w, both, plan=plan)

    def aten(g, x, r, w):
        return torch.ops.aten._fused_rms_norm_backward(g, x, w.shape, r, w, both)

    return aten, ours, rmsnorm_suite.check_backward


CANDIDATES = {"topk": topk_candidates, "forward": forward_candidates, "backward": backward_candidates}


def _shapes(kind, only):
    suite = topk_suite if kind == "topk" else rmsnorm_suite
    shapes = [(group, s) for group, members in suite.shapes().items() for s in members]
    # Both 16-bit dtypes compile to alike code, so one is enough to choose plans; sampling is chosen on float32.
    if kind == "topk":
        shapes = [(group, s) for group, s in shapes if group != "sampling" or s[0] == "fp32"]
    else:
        shapes = [(group, s) for group, s in shapes if s[0] != "fp16" or s[2] > 50000]
    return [(group, s) for group, s in shapes if only in group or only in str(s)]


def _compile(jobs):
    done = []
    for kind, shape, plan in jobs:
        small = (shape[0], min(shape[1], 8), *shape[2:])
        try:
            _calls(kind, small)[1](plan)(*_inputs(kind, small))
            torch.cuda.synchronize()
            done.append(None)
        except Exception as error:
            done.append(f"{kind} {shape} {_name(plan)}: {type(error).__name__} {str(error)[:300]}")
    return [d for d in done if d]


def _precompile(jobs, workers):
    seen, distinct = set(), []
    for kind, shape, plan in jobs:
        key = (kind, shape[0], shape[2:], dataclasses.replace(plan, **_neutral(plan)))
        if key not in seen:
            seen.add(key)
            distinct.append((kind, shape, plan))
    parts = [distinct[i::workers] for i in range(workers)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        failures = [line for part in pool.map(_compile, parts) for line in part]
    return len(distinct), failures


def _neutral(plan):
    return {name: 0 for name in ("programs",) if hasattr(plan, name)}


def _time(kind, group, shape, plans):
    aten, ours, check = _calls(kind, shape)
    first = _inputs(kind, shape)
    contenders, wrong = {"aten": Contender(aten)}, {}
    for plan in plans:
        try:
            check(first, ours(plan)(*first))
            contenders[_name(plan)] = Contender(ours(plan))
        except Exception as error:
            wrong[_name(plan)] = f"{type(error).__name__}: {str(error)[:200]}"
    sets = [first] + [_inputs(kind, shape) for _ in range(timing.copies(timing.nbytes(first)) - 1)]
    ms = timing.replay_ms(contenders, sets, rounds=5, budget_ms=2.0)
    host = timing.host_times({"aten": Contender(aten), "plan0": Contender(ours(plans[0]))}, first, calls=50)
    walls = {name: [t.host_us, t.wall_ms] for name, t in host.items()}
    return {"kind": kind, "group": group, "shape": shape, "ms": ms, "wrong": wrong, "host": walls}


def _line(entry):
    ms = dict(entry["ms"])
    aten = ms.pop("aten")
    best = sorted(ms.items(), key=lambda item: item[1])[:3]
    shown = "  ".join(f"{t * 1e3:.1f} {name}" for name, t in best)
    host = {name: f"{h:.1f}/{w * 1e3:.1f}" for name, (h, w) in entry["host"].items()}
    ratio = aten / best[0][1] if best else float("nan")
    wrong = f" WRONG {len(entry['wrong'])}" if entry["wrong"] else ""
    return (
        f"{entry['kind']} {entry['shape']} aten {aten * 1e3:.1f} x{ratio:.2f} | {shown} | host {host}{wrong}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="+", choices=sorted(CANDIDATES))
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    arguments = parser.parse_args()
    start = time.time()
    folder = Path(arguments.out)
    folder.mkdir(parents=True, exist_ok=True)
    work = [(kind, *gs) for kind in arguments.kinds for gs in _shapes(kind, arguments.only)]
    jobs = [(kind, shape, plan) for kind, _, shape in work for plan in CANDIDATES[kind](shape)]
    count, failures = _precompile(jobs, arguments.workers)
    print(f"compiled {count} in {time.time() - start:.0f} s, {len(failures)} failed", flush=True)
    for line in failures[:20]:
        print("FAILED", line, flush=True)
    ceiling = timing.copy_gb_s()
    print(f"copy {ceiling:.0f} GB/s", flush=True)
    entries, errors = {}, []
    for kind, group, shape in work:
        if time.time() - start > arguments.seconds:
            print("out of time before", kind, shape, flush=True)
            break
        try:
            entry = _time(kind, group, shape, CANDIDATES[kind](shape))
        except Exception as error:
            errors.append(f"{kind} {shape}: {type(error).__name__} {str(error)[:300]}")
            print("ERROR", errors[-1], flush=True)
            continue
        entries.setdefault(kind, []).append(entry)
        print(_line(entry), flush=True)
        content = {"copy_gb_s": ceiling, "entries": entries[kind], "errors": errors, "failures": failures}
        (folder / f"tune-{kind}.json").write_text(json.dumps(content, indent=0))
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
