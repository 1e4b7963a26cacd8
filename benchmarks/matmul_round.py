"""One round of the Triton matrix products on a GPU: check every candidate configuration, then time those that pass.

    python3 benchmarks/matmul_round.py --out runs/matmul_round

Every job is one product, shape and pair of formats with the committed configuration first and a few candidates
after it. Jobs are checked in processes of their own, several at a time, which also compiles what will be timed;
then one process times everything beside PyTorch's own product and the BF16 one. Writes ``round.json`` (all numbers)
and ``round.txt`` (the tables printed).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from matmul_checks import (
    BLOCK,
    ONE,
    ROW,
    SQUARE,
    WHOLE,
    WIDE_ONE,
    Call,
    Job,
    call,
    cfg,
    op_of,
    run_checks,
    timed_operands,
)  # fmt: skip

from octavo import hardware, use_kernels
from octavo.formats import MXFP4, MXFP8
from octavo.matmul import launch_tables
from octavo.matmul.launch_tables import Config

ARCH = "sm_90"


def _dense_jobs() -> list[Job]:
    t = {"tma": True}
    precise = (
        cfg("epilogue", (128, 128, 128), 8, 4, **t), cfg("epilogue", (128, 128, 128), 8, 3, promote=32, **t),
        cfg("epilogue", (128, 128, 128), 8, 4), cfg("epilogue", (128, 256, 128), 8, 3, **t),
    )  # fmt: skip
    fast = (
        cfg("epilogue", (128, 256, 128), 8, 3, **t), cfg("epilogue", (128, 128, 128), 8, 4, **t),
        cfg("epilogue", (128, 256, 128), 8, 4, band=16, **t),
    )  # fmt: skip
    block = (
        cfg("block", (128, 128, 128), 8, 4, **t), cfg("block", (64, 128, 128), 4, 4, **t),
        cfg("block", (128, 256, 128), 8, 3, **t), cfg("block", (128, 128, 128), 8, 4),
    )  # fmt: skip
    blockrows = (
        cfg("block", (128, 128, 128), 8, 3, **t),
        cfg("block", (64, 128, 128), 4, 4, **t),
    )
    return [
        Job("qkv rowwise precise", "dense epilogue", ROW, ROW, (8192, 6144, 4096), precise),
        Job("qkv rowwise fast", "dense fast epilogue", ROW, ROW, (8192, 6144, 4096), fast, fast=True),
        Job("w2 rowwise fast", "dense fast epilogue", ROW, ROW, (8192, 4096, 14336), fast[:1], fast=True),
        Job("qkv tensorwise grad", "dense epilogue", WIDE_ONE, ONE, (8192, 4096, 6144)),
        Job("qkv 1x128 x 128x128", "dense block", BLOCK, SQUARE, (8192, 6144, 4096), block),
        Job("qkv 1x128 x 1x128", "dense blockrows", BLOCK, BLOCK, (6144, 4096, 8192), blockrows),
    ]


def _mx_jobs() -> list[Job]:
    small = (
        cfg("dequantize", (16, 32, 256), 4, 4), cfg("dequantize", (16, 128, 128), 4, 4, split=4),
        cfg("dequantize", (16, 64, 128), 4, 5, split=4), cfg("dequantize", (16, 64, 256), 4, 3, split=2),
    )  # fmt: skip
    middle = (
        cfg("dequantize", (64, 32, 256), 4, 3), cfg("dequantize", (64, 64, 128), 4, 4, split=2),
        cfg("scaled", (64, 64, 128), 4, 4, split=4), cfg("dequantize", (32, 64, 256), 4, 3, split=4),
    )  # fmt: skip
    large = (
        cfg("dequantize", (128, 128, 64), 8, 3), cfg("dequantize", (128, 128, 128), 8, 3),
        cfg("scaled", (128, 128, 128), 8, 3), cfg("decode_first", (0, 0, 0), 4, 1),
    )  # fmt: skip
    huge = (
        cfg("dequantize", (128, 128, 64), 8, 3), cfg("dequantize", (128, 256, 64), 8, 3),
        cfg("scaled", (128, 128, 128), 8, 3),
    )  # fmt: skip
    by_blocks = {
        64: cfg("block", (64, 64, 32), 4, 8, split=4), 512: cfg("block", (128, 128, 32), 8, 6),
        4096: cfg("block", (128, 128, 32), 8, 6),
    }  # fmt: skip
    jobs = []
    for m, candidates in ((16, small), (64, middle), (512, large), (4096, huge)):
        more = (by_blocks[m],) if m in by_blocks else ()
        jobs.append(Job(f"mxfp8 M={m}", "dense mxfp8", MXFP8, MXFP8, (m, 4096, 4096), (*candidates, *more)))
        jobs.append(Job(f"mxfp4 M={m}", "dense mxfp4", MXFP4, MXFP4, (m, 4096, 4096), candidates))
    jobs.append(Job("mxfp8 M=32 wide", "dense mxfp8", MXFP8, MXFP8, (32, 14336, 4096), middle[:2]))
    return jobs


def _grouped_jobs() -> list[Job]:
    t = {"tma": True}
    ep8, ep32 = (65536, 2048, 7168, 32), (32768, 2048, 7168, 8)
    weight = (2048, 7168, 65536, 32)
    block = (cfg("block", (128, 128, 128), 8, 4, **t), cfg("block", (64, 128, 128), 4, 4, **t))
    mx = (cfg("dequantize", (128, 256, 64), 8, 3), cfg("scaled", (128, 128, 128), 8, 3))
    plain = (cfg("plain", (128, 256, 64), 8, 3, **t), cfg("plain", (128, 128, 64), 8, 4, **t))
    turned = (cfg("plain", (128, 256, 64), 8, 3), cfg("plain", (128, 128, 64), 4, 4))
    return [
        Job("EP8 rowwise fast", "rows fast epilogue", ROW, ROW, ep8,
            (cfg("epilogue", (128, 256, 128), 8, 3, **t), cfg("epilogue", (128, 128, 128), 8, 4, **t)), fast=True),
        Job("EP8 rowwise precise", "rows epilogue", ROW, ROW, ep8, (cfg("epilogue", (128, 128, 128), 8, 4, **t),)),
        Job("EP8 1x128 x 128x128", "rows block", BLOCK, SQUARE, ep8, block),
        Job("EP8 1x128 x 128x128 skewed", "rows block", BLOCK, SQUARE, ep8, (), skew=True),
        Job("EP32 1x128 x 128x128", "rows block", BLOCK, SQUARE, ep32),
        Job("EP8 mxfp8", "rows mxfp8", MXFP8, MXFP8, ep8, mx),
        Job("EP8 bf16", "rows plain", None, None, ep8, plain),
        Job("EP8 bf16 skewed", "rows plain", None, None, ep8, (), skew=True),
        Job("EP8 grad_weight rowwise", "columns epilogue", ROW, ROW, weight),
        Job("EP8 grad_weight fast", "columns fast epilogue", ROW, ROW, weight,
            (cfg("epilogue", (128, 256, 128), 8, 3, **t), cfg("epilogue", (128, 128, 128), 8, 4, **t)), fast=True),
        Job("EP8 grad_weight 1x128", "columns blockrows", BLOCK, BLOCK, weight, block),
        Job("EP8 grad_weight mxfp8", "columns mxfp8", MXFP8, MXFP8, weight, (cfg("dequantize", (128, 256, 64), 8, 3),)),
        Job("EP8 grad_weight bf16", "columns plain", None, None, weight, turned),
    ]  # fmt: skip


def jobs() -> list[Job]:
    """Everything of a round, the committed configuration of each job first."""
    every = [*_dense_jobs(), *_mx_jobs(), *_grouped_jobs()]
    return [_with_committed(job) for job in every]


def _with_committed(job: Job) -> Job:
    rows = job.shape[0] // job.shape[3] if job.form == "rows" else job.shape[0]
    committed = launch_tables.lookup(ARCH, rows, job.product)
    others = tuple(c for c in job.candidates if asdict(c) | {"up_to": 0} != asdict(committed) | {"up_to": 0})
    return Job(**{**job.__dict__, "candidates": (committed, *others)})


# ---- timing -------------------------------------------------------------------------------------------------


def _milliseconds(calls: list[Call], repeats: int = 7) -> float:
    """Median of replays of a graph that goes once over ``calls``, a call."""
    for each in calls:
        each()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for each in calls:
            each()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / len(calls))
    return statistics.median(times)


def _copies(job: Job) -> int:
    m, n, k = job.shape[:3]
    bytes_each = (m + n) * k if job.form == "dense" else 2**30
    return max(1, min(16, math.ceil(4 * 60e6 / bytes_each)))


def time_job(job: Job, checked: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of every candidate that passed, of PyTorch's own product, and of the BF16 one."""
    sets = [timed_operands(job, 10 * copy) for copy in range(_copies(job))]
    found: dict[str, Any] = {"job": job.name, "product": job.product, "shape": job.shape, "ms": {}}

    def measure(name: str, calls: list[Call]) -> None:
        try:
            found["ms"][name] = round(_milliseconds(calls), 5)
        except Exception as error:
            found.setdefault("errors", {})[name] = f"{type(error).__name__}: {error}"[:200]
            torch.cuda.synchronize()

    for entry in checked["configs"]:
        if not entry["ok"]:
            continue
        config = Config(**{**entry["config"], "tile": tuple(entry["config"]["tile"])})
        with use_kernels(**{op_of(job): "triton"}), launch_tables.override({job.product: (config,)}):
            measure(_label(config), [lambda s=s: call(job, s) for s in sets])
    if job.a is None or not job.a.is_mx:
        with use_kernels(**{op_of(job): "torch"}):
            measure("torch", [lambda s=s: call(job, s) for s in sets])
    del sets
    measure("bf16", _bf16_calls(job))
    return found


def _bf16_calls(job: Job) -> list[Call]:
    m, n, k = job.shape[:3]
    if job.form == "dense":
        count = _copies(job)
        pairs = [
            tuple(torch.randn(r, k, device="cuda", dtype=torch.bfloat16) for r in (m, n))
            for _ in range(count)
        ]
        return [lambda p=p: torch.mm(p[0], p[1].t()) for p in pairs]
    plain = Job(job.name, f"{job.form} plain", None, None, job.shape, skew=job.skew)
    a, b, offs = timed_operands(plain, 0)
    return [lambda: torch._grouped_mm(a, b.mT, offs=offs)]


def _label(config: Config) -> str:
    tile = "x".join(map(str, config.tile))
    extra = [f"w{config.warps}", f"s{config.stages}"]
    extra += ["tma"] if config.tma else []
    extra += [f"split{config.split}"] if config.split > 1 else []
    extra += [f"promote{config.promote}"] if config.promote != 128 else []
    extra += [f"band{config.band}"] if config.band != 8 else []
    return config.kind if config.kind == "decode_first" else f"{config.kind} {tile} {' '.join(extra)}"


def _report(results: dict[str, Any], timings: list[dict[str, Any]], every: list[Job]) -> str:
    lines = ["# checks"]
    for task, result in results.items():
        if task == "accuracy":
            continue
        if task in WHOLE:
            faults = result if isinstance(result, list) else result["notes"]
            lines.append(f"{task}: {'ok' if not faults else 'FAULTS'}")
            lines += [f"  {fault}" for fault in faults]
            continue
        job = every[int(task)]
        lines += [f"FAULT {job.name}: {note}" for note in result["notes"]]
        for entry in result["configs"]:
            config = Config(**{**entry["config"], "tile": tuple(entry["config"]["tile"])})
            what = entry.get("error") or f"{entry['sqnr']:.1f} dB, worst row {entry['worst_row']:.1f}"
            lines.append(f"{'ok   ' if entry['ok'] else 'FAULT'} {job.name} | {_label(config)} | {what}")
    lines.append("\n# accuracy, dB [all, worst row]")
    accuracy = results.get("accuracy", [])
    lines += [json.dumps(row) for row in accuracy] if isinstance(accuracy, list) else [str(accuracy)]
    lines.append("\n# ms and TFLOP/s; * the committed configuration")
    for job, timing in zip(every, timings, strict=True):
        lines.append(f"{job.name} {job.shape}")
        committed = _label(job.candidates[0])
        for name, ms in timing["ms"].items():
            mark = "*" if name == committed else " "
            lines.append(f"  {mark} {name:46s} {ms:9.4f} ms {job.flops / ms / 1e9:8.0f} TFLOP/s")
        lines += [f"    {name}: {error}" for name, error in timing.get("errors", {}).items()]
    return "\n".join(lines)


def main() -> None:
    """Check, time, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for round.json and round.txt")
    parser.add_argument("--jobs", type=int, default=16, help="processes that check at a time")
    parser.add_argument("--check-limit", type=float, default=150.0, help="seconds for all checks")
    parser.add_argument("--only", default="", help="only time jobs whose name contains this")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="matmul-round-"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(scratch / "triton-cache"))
    every, started = jobs(), time.time()
    results = run_checks(every, scratch, options.jobs, options.check_limit)
    checked_at = time.time()
    timings = []
    for index, job in enumerate(every):
        if options.only in job.name:
            timings.append(time_job(job, results[str(index)]))
        else:
            timings.append({"job": job.name, "ms": {}})
        torch.cuda.empty_cache()
    seconds = {"checks": round(checked_at - started, 1), "timing": round(time.time() - checked_at, 1)}
    machine = {"gpu": torch.cuda.get_device_name(), "versions": hardware.versions()}
    text = _report(results, timings, every)
    (options.out / "round.txt").write_text(text + "\n")
    record = {"machine": machine, "seconds": seconds, "checks": results, "timings": timings}
    (options.out / "round.json").write_text(json.dumps(record, indent=1))
    print(text)
    print(seconds)


if __name__ == "__main__":
    main()
