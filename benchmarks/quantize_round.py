"""Check every quantization kernel against the reference on a GPU, then time a few configurations of each.

    python3 benchmarks/quantize_round.py --out DIR

Kernels compile in a pool of processes, which also run the checks; then one process times with CUDA events,
medians, the cache cleared before each run. Rates count the bytes that each case must move and are given as shares
of a large copy's rate and of a copy of the same size. Writes ``quantize_round.json`` into DIR.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch

from octavo import formats as F
from octavo.formats import Format

SHAPES = [(8192, 4096), (8192, 14336), (28672, 4096), (8191, 4095)]
GROUPED = (65536, 7168, 32)
FUSED = (8192, 28672)
JOINED = (8192, (4096, 1024, 1024))
ROW = Format(F.E4M3FN, "rowwise", "power_of_two")
ONE = Format(F.E4M3FN, "tensorwise")
B1 = Format(F.E4M3FN, "1x128")
B128 = Format(F.E4M3FN, "128x128")
MX8, MX4 = F.MXFP8, F.MXFP4
MAIN = [ROW, ONE, B1, B128, MX8, MX4]


# ---- cases and candidates ------------------------------------------------------------------------------------


def tiles(kind: str, *sizes: tuple[int, int, int, int], group: int = 1, evict: int = 0) -> list[dict]:
    return [
        {"tiles": {kind: {"block_m": m, "block_k": k, "warps": w, "owned": r, "group": group, "evict": evict,
                          "reverse": 1}}}
        for m, k, w, r in sizes
    ]  # fmt: skip


def amax(kind: str, *sizes: tuple[int, int, int, int, int]) -> list[dict]:
    return [
        {"amax": {kind: {"block_m": m, "block_k": k, "warps": w, "steps": s, "owned": r}}}
        for m, k, w, s, r in sizes
    ]


def rows(*options: tuple[int, int]) -> list[dict]:
    return [{"rows": {str(2**n): {"rows": r, "warps": w} for n in range(7, 16)}} for r, w in options]


def rows_first(*options: tuple[int, int, int]) -> list[dict]:
    return [
        {"rows_first": {"any": {"enabled": 1, "rows": r, "warps": w, "programs": p}}} for r, w, p in options
    ]


@dataclass(frozen=True)
class Case:
    """What is timed: function name below, its formats, bytes an element, candidate table overrides."""

    call: str
    fmts: tuple[Format | None, ...]
    bytes: float
    candidates: list[dict] = field(default_factory=list)


BOTH_MX = [(128, 128, 8, 4), (32, 128, 4, 4), (128, 64, 8, 2), (64, 128, 4, 4)]
DENSE = {
    "row": Case("direct", (ROW,), 3, rows((1, 8), (2, 8))),
    "tensorwise": Case("direct", (ONE,), 5, amax("one", (16, 512, 4, 2, 1), (8, 1024, 8, 8, 1))),
    "column^T": Case("turned", (ROW,), 5, amax("column", (128, 128, 8, 1, 8), (64, 128, 4, 4, 8), (64, 64, 4, 4, 1))
                     + tiles("turned", (128, 128, 8, 8), evict=1) + tiles("turned", (128, 64, 4, 8), group=4)),
    "tensorwise both": Case("both", (ONE, ONE), 6, tiles("both", (128, 128, 8, 4), (64, 128, 4, 4))
                            + tiles("both", (128, 64, 4, 4), evict=1)),
    "rowwise both": Case("both", (ROW, ROW), 6, amax("row+column", (64, 256, 8, 4, 8), (64, 128, 4, 4, 8),
                         (16, 512, 8, 8, 1)) + rows_first((1, 8, 1056), (1, 4, 1056), (2, 8, 528))
                         + tiles("both", (128, 128, 8, 4))),
    "1x128": Case("direct", (B1,), 3, tiles("direct", (8, 1024, 8, 1), (16, 512, 8, 1))),
    "1x128^T": Case("turned", (B1,), 3, tiles("turned", (128, 128, 8, 8), (128, 64, 8, 4), (128, 32, 4, 4))),
    "1x128 both": Case("both", (B1, B1), 4, tiles("both", (128, 128, 4, 8), (128, 256, 16, 4), (128, 128, 16, 2))),
    "128x128": Case("direct", (B128,), 3, tiles("direct", (128, 128, 16, 1), (128, 128, 4, 1))),
    "128x128 both": Case("both", (B128, B128), 4, tiles("both", (128, 128, 16, 2), (128, 128, 4, 8))),
    "mxfp8": Case("direct", (MX8,), 3, tiles("direct", (8, 1024, 8, 1))),
    "mxfp8^T": Case("turned", (MX8,), 3, tiles("turned", (128, 128, 8, 8), (32, 128, 4, 4), (64, 64, 4, 4))),
    "mxfp8 both": Case("both", (MX8, MX8), 4, tiles("both", *BOTH_MX)),
    "mxfp4": Case("direct", (MX4,), 2.5, tiles("direct", (16, 512, 4, 1))),
    "mxfp4 both": Case("both", (MX4, MX4), 3, tiles("both", (32, 128, 4, 4), (128, 64, 4, 8))),
}  # fmt: skip


def grouped(kind: str, *sizes: tuple[int, int, int, int]) -> list[dict]:
    return [{"grouped": {kind: {"block_m": m, "block_k": k, "warps": w, "owned": r}}} for m, k, w, r in sizes]


RAGGED = {
    "groups row^T": Case("groups", (ROW,), 5, grouped("columns", (128, 128, 8, 8), (64, 64, 4, 4))
                         + grouped("amax", (128, 128, 8, 8), (256, 64, 8, 8))),
    "groups 1x128^T": Case("groups", (B1,), 3, grouped("columns", (128, 128, 8, 8), (128, 64, 8, 4))),
    "groups mxfp8^T": Case("groups", (MX8,), 3, grouped("columns", (128, 128, 8, 8), (64, 64, 4, 4))),
}  # fmt: skip


def backward(name: str, *sizes: tuple[int, int, int, int]) -> list[dict]:
    steps = {"steps": 8} if name == "amax" else {"group": 1}
    return [
        {"swiglu_backward": {name: {"block_m": m, "block_k": k, "warps": w, "owned": r, **steps}}}
        for m, k, w, r in sizes
    ]


# Bytes are counted for an element of the activation, and for the concatenation of one of its elements.
PRODUCERS = {
    "swiglu row": Case("swiglu", (ROW,), 5, rows((1, 8), (1, 16))),
    "swiglu 1x128": Case("swiglu", (B1,), 5, tiles("direct", (8, 1024, 8, 1))),
    "swiglu mxfp8": Case("swiglu", (MX8,), 5),
    "swiglu back row": Case("back", (ROW, ROW, ROW), 17, backward("tiles", (64, 64, 4, 2), (128, 64, 8, 2))
                            + backward("amax", (64, 128, 8, 4), (32, 64, 4, 4))),
    "swiglu back 1x128": Case("back", (B1, B1, B1), 11, backward("tiles", (128, 64, 8, 2))),
    "swiglu back mxfp8": Case("back", (MX8, MX8, MX8), 11, backward("tiles", (128, 64, 8, 2))),
    "concat row both": Case("concat", (ROW, ROW), 6),
}  # fmt: skip
CASES = {**DENSE, **RAGGED, **PRODUCERS}


def call(kind: str, inputs: Any, fmts: tuple[Format | None, ...]) -> tuple[Any, ...]:
    """The launch code of a case, without dispatch."""
    from octavo.fused import triton_launch as fused
    from octavo.quantize import alignment, triton_launch

    if kind == "both":
        return triton_launch.quantize_both(inputs, *fmts)
    if kind == "groups":
        return triton_launch.quantize_groups(*inputs, fmts[0], True, alignment(fmts[0]))
    if kind == "swiglu":
        return fused.swiglu_quantize(inputs[0], fmts[0])
    if kind == "back":
        return fused.swiglu_backward_quantize(*inputs, *fmts, False)
    if kind == "concat":
        return fused.quantize_concat(list(inputs), 1, *fmts)
    return triton_launch.quantize(inputs, fmts[0], kind == "turned")


def make(kind: str, rows_: int, columns: int) -> Any:
    """Inputs of a case; ``columns`` of the matrix that is quantized, of h for SwiGLU."""
    x = torch.randn(rows_, columns, device="cuda").bfloat16()
    if kind == "groups":
        generator = torch.Generator().manual_seed(0)
        cuts = torch.randint(0, rows_, (GROUPED[2] - 1,), generator=generator).sort().values
        return x, torch.cat([cuts, torch.tensor([rows_])]).to(torch.int32).cuda()
    if kind in ("swiglu", "back"):
        return x, torch.randn(rows_, columns // 2, device="cuda").bfloat16()
    if kind == "concat":
        return tuple(torch.randn(rows_, k, device="cuda").bfloat16() for k in JOINED[1])
    return x


# ---- checks --------------------------------------------------------------------------------------------------


def adversarial(*shape: int, dtype: torch.dtype, seed: int, special: bool = True) -> torch.Tensor:
    """Every scale code, ties, zeros of both signs, subnormals, and rows that hold inf or NaN."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=g)
    spread = torch.randint(-150, 126, (*shape[:-1], 1), generator=g).float()
    wild = x * torch.exp2(spread.clamp(-126)) * torch.exp2((spread + 126).clamp(max=0))
    # With amax 448 (240, 6, ...) the multiplier is 1, and these hit the midpoints between codes.
    steps = torch.randint(-64, 65, shape, generator=g).float() / 8
    ties = (steps * torch.exp2(torch.randint(-9, 6, shape, generator=g))).clamp(-448, 448)
    flat = ties.view(-1)
    flat[::31] = torch.tensor([448.0, -448.0, 240.0, 6.0])[torch.arange(flat[::31].numel()) % 4]
    choice = torch.randint(0, 3, (*shape[:-1], 1), generator=g)
    flat = torch.where(choice == 0, x, torch.where(choice == 1, wild, ties)).reshape(-1)
    flat[::29], flat[::37] = 0.0, -0.0
    if special and flat.numel() > 2000:
        flat[flat.numel() // 3] = float("nan")
        flat[flat.numel() // 2] = float("inf")
        flat[flat.numel() // 2 + 1] = -float("inf")
    return flat.view(shape).to(dtype)


def as_bits(x: torch.Tensor) -> torch.Tensor:
    """Integers of the same width on the CPU, every NaN scale made the same."""
    if x.dtype == torch.float32:
        x = torch.where(x.isnan(), torch.nan, x)
        return x.cpu().view(torch.int32)
    return x.view(torch.uint8).cpu() if x.element_size() == 1 else x.cpu().view(torch.int16)


def same(found: tuple, wanted: tuple, share: float = 0.0) -> str | None:
    """The first difference; codes may differ in ``share`` of the places, and scales then in as many."""
    for n, (a, b) in enumerate(zip(found, wanted, strict=True)):
        if a is None or b is None:
            if a is not b:
                return f"output {n}: one is absent"
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"output {n}: {a.dtype} {tuple(a.shape)} for {b.dtype} {tuple(b.shape)}"
        a, b = as_bits(a), as_bits(b)
        wrong = a != b
        if wrong.sum() > share * wrong.numel():
            where = wrong.nonzero()[0].tolist()
            values = f"{a[tuple(where)]} for {b[tuple(where)]}"
            return f"output {n}: {int(wrong.sum())} of {wrong.numel()} differ, first at {where}: {values}"
    return None


def views(dtype: torch.dtype) -> list[tuple[str, torch.Tensor]]:
    def data(*shape: int) -> torch.Tensor:
        return adversarial(*shape, dtype=dtype, seed=7).cuda()

    return [
        ("plain", data(304, 528)), ("odd", data(257, 134)), ("experts", data(3, 136, 264)),
        ("transposed", data(136, 264).mT), ("strided", data(64, 400)[:, ::2]), ("no rows", data(0, 64)),
        ("inner batch", data(48, 6, 208).permute(0, 2, 1)), ("slice", data(64, 400)[:, 3:203]),
    ]  # fmt: skip


def check_format(key: str, dtype: str, count: int) -> list[str]:
    """Both layouts of one format on the first ``count`` kinds of input."""
    from octavo.quantize import reference

    fmt, bad = Format.from_key(key), []
    for name, x in views(getattr(torch, dtype))[:count]:
        for turned in (False, True):
            if x.shape[-2 if turned else -1] % fmt.element.packed:
                continue
            found = call("turned" if turned else "direct", x, (fmt,))
            problem = same(found, reference.quantize(x.cpu(), fmt, turned))
            bad += [f"{key} {name} {dtype} turned={turned}: {problem}"] if problem else []
    return bad


def check_both(key: str, key_t: str) -> list[str]:
    from octavo.quantize import launch_tables, reference

    fmt, fmt_t, bad = Format.from_key(key), Format.from_key(key_t), []
    first = {"rows_first": {"any": {"enabled": 1, "rows": 2, "warps": 4, "programs": 37}}}
    for table in ({}, first) if (fmt, fmt_t) == (ROW, ROW) else ({},):
        for name, x in views(torch.bfloat16)[:2]:
            if x.shape[-1] % fmt.element.packed or x.shape[-2] % fmt_t.element.packed:
                continue
            with launch_tables.override(table):
                found = call("both", x, (fmt, fmt_t))
            problem = same(found, reference.quantize_both(x.cpu(), fmt, fmt_t))
            bad += [f"both {key} {key_t} {name} {table}: {problem}"] if problem else []
    return bad


def check_groups(key: str) -> list[str]:
    from octavo.quantize import alignment, triton_launch
    from octavo.quantize import grouped as reference

    fmt, bad = Format.from_key(key), []
    for sizes, tail in (([5, 0, 9, 0, 44], 0), ([44, 20, 0, 64, 1], 3), ([0, 0, 0], 5), ([300, 1, 130], 0)):
        offs = torch.tensor(sizes).cumsum(0).to(torch.int32)
        x = adversarial(sum(sizes) + tail, 200, dtype=torch.bfloat16, seed=3)
        x[sum(sizes) :] = float("nan")
        for turned in (False, True) if fmt.granularity == "tensorwise" else (True,):
            found = triton_launch.quantize_groups(x.cuda(), offs.cuda(), fmt, turned, alignment(fmt))
            problem = same(found, reference.quantize_groups(x, offs, fmt, turned, alignment(fmt)))
            bad += [f"groups {key} {sizes}+{tail} turned={turned}: {problem}"] if problem else []
    return bad


def check_fused(key: str) -> list[str]:
    from octavo.fused import reference
    from octavo.fused import triton_launch as fused

    fmt, bad = Format.from_key(key), []

    def compare(what: str, found: tuple, wanted: tuple, share: float) -> None:
        problem = same(found, wanted, share)
        bad.extend([f"{what} {key}: {problem}"] if problem else [])

    for dim, sizes in itertools.product((0, 1), ((128, 256, 40), (6, 20, 2))):
        xs = [adversarial(*((n, 70) if dim == 0 else (70, n)), dtype=torch.bfloat16, seed=n, special=False).cuda()
              for n in sizes]  # fmt: skip
        for f, t in ((fmt, fmt), (fmt, None)):
            wanted = reference.quantize_concat(xs, dim, f, t)
            compare(f"concat {dim} {sizes}", fused.quantize_concat(xs, dim, f, t), wanted, 0.0)
    h = torch.randn(200, 512, device="cuda").bfloat16() * 2
    grad = torch.randn(200, 256, device="cuda").bfloat16()
    compare("swiglu", fused.swiglu_quantize(h, fmt), reference.swiglu_quantize(h, fmt), 0.01)
    for keep in (False, True):
        arguments = (h, grad, fmt, fmt, fmt, keep)
        found, wanted = (
            fused.swiglu_backward_quantize(*arguments),
            reference.swiglu_backward_quantize(*arguments),
        )
        compare(f"swiglu backward keep={keep}", found, wanted, 0.01)
    return bad


def check_large() -> list[str]:
    """Past 2^31 elements, by slices at the far end."""
    from octavo.quantize import reference

    bad, far = [], slice(-256, None)
    x = torch.empty(65664, 33024, dtype=torch.bfloat16, device="cuda").normal_()
    for fmt in (ROW, MX8):
        direct = call("direct", x, (fmt,))
        problem = same(tuple(t[far] for t in direct), reference.quantize(x[far], fmt))
        bad += [f"large {fmt}: {problem}"] if problem else []
        del direct
        turned = call("turned", x, (fmt,))
        problem = same(tuple(t[far] for t in turned), reference.quantize(x[:, far].contiguous(), fmt, True))
        bad += [f"large {fmt}^T: {problem}"] if problem else []
        del turned
    return bad


def check_timed(name: str) -> list[str]:
    """The timed sizes with the committed configuration, against the reference run on the GPU."""
    from octavo.quantize import reference

    bad, case = [], CASES[name]
    for shape in SHAPES[:1] + SHAPES[3:]:
        if any(f is not None and f.element.packed > 1 for f in case.fmts) and shape[1] % 2:
            continue
        x = adversarial(*shape, dtype=torch.bfloat16, seed=11, special=False).cuda()
        turned = case.call == "turned"
        wanted = (
            reference.quantize_both(x, *case.fmts)
            if case.call == "both"
            else reference.quantize(x, case.fmts[0], turned)
        )
        problem = same(call(case.call, x, case.fmts), wanted)
        bad += [f"{name} {shape}: {problem}"] if problem else []
    return bad


def warm(name: str, index: int) -> list[str]:
    """Compile one candidate on short inputs that specialise as the timed ones do."""
    from octavo.quantize import launch_tables

    case = CASES[name]
    with launch_tables.override(([{}] + case.candidates)[index]):
        if name in DENSE:
            for columns, count in ((4096, 1024), (14336, 1024), (4095, 1023))[: 3 if index == 0 else 2]:
                if case.fmts[0].element.packed == 1 or columns % 2 == 0:
                    call(case.call, make(case.call, count, columns), case.fmts)
        else:
            columns = {"groups": GROUPED[1], "concat": 0}.get(case.call, FUSED[1])
            call(case.call, make(case.call, 1024, columns), case.fmts)
    torch.cuda.synchronize()
    return []


def run_job(job: tuple) -> tuple[tuple, list[str], float]:
    started = time.time()
    torch.set_num_threads(1)
    torch.utils.deterministic.fill_uninitialized_memory = True
    name, *arguments = job
    torch.use_deterministic_algorithms(name.startswith("check"), warn_only=True)
    try:
        bad = globals()[name](*arguments)
    except Exception:
        bad = [f"{job}: {traceback.format_exc(limit=-3)}"]
    return job, bad, time.time() - started


def jobs(checks: bool) -> list[tuple]:
    out: list[tuple] = [
        ("warm", name, i) for name, case in CASES.items() for i in range(len(case.candidates) + 1)
    ]
    if not checks:
        return out
    out += [("check_format", f.key, "bfloat16", 8 if f in (ROW, B1, MX8) else 4) for f in MAIN]
    others = [
        Format(*f)
        for f in ((F.E5M2, "columnwise"), (F.E4M3FN, "128x1"), (F.E4M3FNUZ, "1x128"), (F.E5M2FNUZ, "rowwise"),
                  (F.E5M2, "1x32", "floor"), (F.E2M1, "1x32", "even"))
    ]  # fmt: skip
    out += [("check_format", f.key, "bfloat16", 2) for f in others]
    out += [("check_format", f.key, "float32", 2) for f in MAIN] + [("check_format", MX4.key, "float16", 2)]
    out += [
        ("check_both", a.key, b.key) for a, b in [*((f, f) for f in MAIN), (ROW, ONE), (ONE, ROW), (B1, MX8)]
    ]
    out += [("check_groups", f.key) for f in (ROW, ONE, B1, B128, MX8, MX4)]
    out += [("check_fused", f.key) for f in (ROW, ONE, B1, B128, MX8)]
    return out + [("check_timed", name) for name in DENSE] + [("check_large",)]


def prepare(args: argparse.Namespace) -> list[str]:
    """Compile and check in parallel; returns what is wrong."""
    todo = jobs(not args.skip_checks)
    problems, times = [], []
    with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
        arriving = pool.imap_unordered(run_job, todo)
        try:
            for _ in todo:
                left = args.started + args.check_seconds - time.time()
                job, bad, seconds = arriving.next(timeout=max(0.1, left))
                problems += bad
                times.append((seconds, job))
        except multiprocessing.TimeoutError:
            done = {job for _, job in times}
            print("unfinished:", [job for job in todo if job not in done])
            pool.terminate()
    checks = [job for job in todo if job[0] != "warm"]
    done = {job for _, job in times}
    print(f"{len(times)} of {len(todo)} jobs, {sum(c in done for c in checks)} of {len(checks)} checks done, "
          f"{len(problems)} problems, {time.time() - args.started:.0f} s")  # fmt: skip
    print("slowest:", ", ".join(f"{s:.0f} s {j}" for s, j in sorted(times, reverse=True)[:4]))
    for problem in problems[:25]:
        print("PROBLEM", problem[:600])
    return problems


# ---- timing --------------------------------------------------------------------------------------------------


class Timer:
    """Medians of CUDA events; clearing the cache takes longer than the host needs for the launches."""

    def __init__(self, runs: int) -> None:
        self.cache, self.runs = torch.empty(768 << 20, dtype=torch.uint8, device="cuda"), runs

    def __call__(self, fn: Callable[[], object]) -> float:
        fn()
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(self.runs)]
        for start, end in pairs:
            self.cache.zero_()
            self.cache.zero_()
            start.record()
            fn()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in pairs)


def host_us(fn: Callable[[], object]) -> float:
    """Microseconds of host time a call, the device kept from holding it back."""
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(20):
            fn()
        best = min(best, (time.perf_counter() - started) / 20)
    torch.cuda.synchronize()
    return best * 1e6


def short(table: dict) -> str:
    parts = [
        f"{kernel}/{bucket} " + ",".join(f"{'k' if k == 'block_k' else k[:1]}{v}" for k, v in config.items())
        for kernel, buckets in table.items()
        for bucket, config in list(buckets.items())[:1]
    ]
    return " ".join(parts) or "table"


def time_case(
    name: str,
    inputs: Any,
    elements: int,
    timer: Timer,
    copy: float,
    near: float,
    odd: bool,
    results: list[dict],
) -> None:
    """Time a case with the table and its candidates, and print and keep the results."""
    from octavo.quantize import launch_tables

    case, times = CASES[name], []
    for table in [{}] + ([] if odd else case.candidates):
        with launch_tables.override(table):
            try:
                ms = timer(lambda: call(case.call, inputs, case.fmts))
            except Exception as error:
                print(f"{name} {short(table)}: {type(error).__name__} {str(error)[:200]}", flush=True)
                continue
        rate = elements * case.bytes / ms / 1e6
        times.append((ms, rate, short(table)))
        results.append({"case": name, "elements": elements, "config": table, "ms": ms, "gb_s": rate,
                        "of_copy": rate / copy, "of_same_copy": rate / near})  # fmt: skip
    if not times:
        return
    host = host_us(lambda: call(case.call, inputs, case.fmts))
    results[-1]["host_us"] = host
    parts = [f"{ms:.4f} {rate / copy:.0%} {text}" for ms, rate, text in sorted(times)[:3]]
    ms, rate, _ = times[0]
    print(f"{name:18s} table {ms:.4f} ms {rate:.0f} GB/s {rate / copy:.0%} ({rate / near:.0%} of its copy) | best "
          + " | ".join(parts) + f" | host {host:.0f} us", flush=True)  # fmt: skip


def copy_rate(timer: Timer, x: torch.Tensor) -> tuple[float, float]:
    """(GB/s read and written, milliseconds) of a copy of 16-bit x."""
    y = torch.empty_like(x)
    ms = timer(lambda: y.copy_(x))
    return x.numel() * 4 / ms / 1e6, ms


def time_all(args: argparse.Namespace, results: list[dict]) -> float:
    timer, deadline = Timer(args.runs), args.started + args.seconds
    copy, _ = copy_rate(timer, torch.randn(2**30, device="cuda", dtype=torch.bfloat16))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, large copy {copy:.0f} GB/s")
    work = [(shape, list(DENSE)) for shape in SHAPES]
    work += [((8192, FUSED[1]), list(PRODUCERS)), (GROUPED[:2], list(RAGGED))]
    for shape, names in work:
        near, ms = copy_rate(timer, torch.randn(*shape, device="cuda").bfloat16())
        print(
            f"== {shape}: copy {near:.0f} GB/s, {near / copy:.0%} of the large one ({ms:.4f} ms)", flush=True
        )
        results.append({"case": "copy", "elements": shape[0] * shape[1], "ms": ms, "gb_s": near})
        for name in names:
            kind, fmts = CASES[name].call, CASES[name].fmts
            if time.time() > deadline:
                print("out of time", flush=True)
                return copy
            if any(f is not None and f.element.packed > 1 for f in fmts) and (shape[0] % 2 or shape[1] % 2):
                continue
            elements = shape[0] * shape[1] // (2 if kind in ("swiglu", "back") else 1)
            if kind == "concat":
                elements = JOINED[0] * sum(JOINED[1])
            time_case(name, make(kind, *shape), elements, timer, copy, near, shape == SHAPES[3], results)
    return copy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=11)
    parser.add_argument("--workers", type=int, default=max(2, min(15, (os.cpu_count() or 4) - 1)))
    parser.add_argument(
        "--check-seconds", type=float, default=105.0, help="stop waiting for checks after this"
    )
    parser.add_argument("--seconds", type=float, default=165.0, help="stop timing after this many seconds")
    parser.add_argument("--skip-checks", action="store_true")
    args = parser.parse_args()
    args.started = time.time()
    args.out.mkdir(parents=True, exist_ok=True)
    problems = prepare(args)
    results: list[dict] = []
    copy = 0.0
    try:
        copy = time_all(args, results)
    finally:
        found = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "copy_gb_s": copy,
                 "problems": problems, "results": results}  # fmt: skip
        (args.out / "quantize_round.json").write_text(json.dumps(found, indent=0))
    print(f"total {time.time() - args.started:.0f} s; {len(problems)} problems")


if __name__ == "__main__":
    main()
