"""Check every quantization kernel against the reference on a GPU, then time candidate configurations.

    python3 benchmarks/quantize_round.py --out DIR

Kernels compile in a pool of processes first, which also run the checks; then one process times the candidates
with CUDA events, medians, the cache cleared before each run. Rates count the bytes that each case must move
and are given as a share of a large copy's rate. Writes ``quantize_round.json`` into DIR.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch

from octavo import formats as F
from octavo.formats import Format

SHAPES = [(8192, 4096), (8192, 14336), (28672, 4096), (8191, 4095)]
ODD_CANDIDATES = 6
GROUPED_SHAPES = [(32768, 2048, 32), (16384, 5120, 16)]
ROW = Format(F.E4M3FN, "rowwise", "power_of_two")
ONE = Format(F.E4M3FN, "tensorwise")
ONE_E5M2 = Format(F.E5M2, "tensorwise")
B1 = Format(F.E4M3FN, "1x128")
B128 = Format(F.E4M3FN, "128x128")
MX8, MX4 = F.MXFP8, F.MXFP4


# ---- cases and candidates ------------------------------------------------------------------------------------


def tiles(
    kind: str, sizes: list[tuple[int, int, int]], groups=(1,), evicts=(0,), reverses=(1,)
) -> list[dict]:
    return [
        {"tiles": {kind: {"block_m": m, "block_k": k, "warps": w, "group": g, "evict": e, "reverse": r}}}
        for (m, k, w), g, e, r in itertools.product(sizes, groups, evicts, reverses)
    ]


def amax(kind: str, sizes: list[tuple[int, int, int, int]]) -> list[dict]:
    return [{"amax": {kind: {"block_m": m, "block_k": k, "warps": w, "steps": s}}} for m, k, w, s in sizes]


def rows(options: list[tuple[int, int, int]]) -> list[dict]:
    out = []
    for r, w, p in options:
        config = {"rows": r, "warps": w} | ({"programs": p} if p else {})
        out.append({"rows": {str(2**n): config for n in range(7, 16)}})
    return out


def rows_first(options: list[tuple[int, int, int]]) -> list[dict]:
    return [
        {"rows_first": {"any": {"enabled": 1, "rows": r, "warps": w, "programs": p}}} for r, w, p in options
    ]


TURNED = [(128, 64, 8), (128, 64, 4), (128, 128, 8), (64, 64, 4), (256, 32, 8), (256, 64, 8), (64, 128, 8)]
TURNED += [(128, 32, 4)]
BOTH = [(128, 64, 8), (128, 64, 4), (128, 128, 8), (64, 64, 4), (64, 128, 8), (64, 128, 4), (128, 128, 16)]
DIRECT = [(16, 512, 8), (8, 1024, 8), (16, 512, 4), (8, 512, 4), (32, 256, 8), (4, 1024, 4), (64, 128, 8)]
AMAX_ONE = [(16, 512, 8, 1), (16, 512, 8, 4), (8, 1024, 8, 4), (16, 512, 4, 2), (32, 512, 8, 1)]
AMAX_COLUMN = [
    (64, 128, 8, 1),
    (64, 128, 8, 4),
    (128, 128, 8, 1),
    (128, 64, 8, 2),
    (32, 256, 8, 4),
    (64, 256, 8, 2),
]
AMAX_BOTH = [
    (64, 256, 8, 1),
    (64, 256, 8, 4),
    (32, 256, 8, 4),
    (64, 128, 8, 1),
    (32, 512, 8, 2),
    (16, 512, 8, 4),
]
MX_BOTH = [(32, 128, 4), (32, 256, 8), (32, 256, 4), (64, 64, 4), (128, 64, 8), (128, 32, 4), (64, 128, 8)]
ALL_OF = [(128, 128, 4), (128, 128, 8), (128, 128, 16), (128, 256, 16)]

# name: (function, formats, bytes an element, candidate overrides; {} is the committed table)
CASES = {
    "row": ("direct", (ROW,), 3, rows([(1, 4, 0), (1, 8, 0), (2, 4, 0), (2, 8, 0), (4, 8, 0), (1, 16, 0),
                                       (1, 4, 1056), (1, 8, 528), (2, 8, 528)])),
    "tensorwise": ("direct", (ONE,), 5, amax("one", AMAX_ONE) + tiles("direct", DIRECT, evicts=(0, 1))
                   + tiles("direct", DIRECT[:1], reverses=(0,))),
    "column^T": ("turned", (ROW,), 5, amax("column", AMAX_COLUMN) + tiles("turned", TURNED, groups=(1, 4))
                 + tiles("turned", TURNED[:3], evicts=(1,)) + tiles("turned", TURNED[:1], reverses=(0,))),
    "tensorwise both": ("both", (ONE, ONE), 6, tiles("both", BOTH, groups=(1, 4), evicts=(0, 1))),
    "rowwise both": ("both", (ROW, ROW), 6, amax("row+column", AMAX_BOTH) + tiles("both", BOTH, groups=(1, 4))
                     + tiles("both", BOTH[:3], evicts=(1,))
                     + rows_first([(1, 8, 264), (1, 8, 528), (1, 16, 264), (2, 16, 264), (1, 8, 1056), (2, 8, 528)])),
    "1x128": ("direct", (B1,), 3, tiles("direct", DIRECT)),
    "1x128^T": ("turned", (B1,), 3, tiles("turned", [(128, 64, 8), (128, 64, 4), (128, 128, 8), (128, 32, 4)], (1, 4))),
    "1x128 both": ("both", (B1, B1), 4, tiles("both", ALL_OF, (1, 4)) + tiles("both", [(128, 256, 8)])),
    "128x128": ("direct", (B128,), 3, tiles("direct", ALL_OF)),
    "128x128 both": ("both", (B128, B128), 4, tiles("both", ALL_OF, (1, 4))),
    "mxfp8": ("direct", (MX8,), 3, tiles("direct", DIRECT)),
    "mxfp8^T": ("turned", (MX8,), 3, tiles("turned", MX_BOTH, (1, 4))),
    "mxfp8 both": ("both", (MX8, MX8), 4, tiles("both", MX_BOTH, (1, 4))),
    "mxfp4": ("direct", (MX4,), 2.5, tiles("direct", DIRECT[:4])),
    "mxfp4 both": ("both", (MX4, MX4), 3, tiles("both", MX_BOTH[:4], (1, 4))),
}  # fmt: skip


def grouped(kind: str, sizes: list[tuple[int, int, int]]) -> list[dict]:
    return [{"grouped": {kind: {"block_m": m, "block_k": k, "warps": w}}} for m, k, w in sizes]


GROUPED_CASES = {
    "groups row^T": ((ROW, True), 5, grouped("columns", TURNED[:6])
                     + grouped("amax", [(64, 128, 8), (128, 128, 8), (64, 256, 8), (32, 256, 4)])),
    "groups 1x128^T": ((B1, True), 3, grouped("columns", [(128, 64, 8), (128, 64, 4), (128, 128, 8), (128, 32, 4)])),
    "groups mxfp8^T": ((MX8, True), 3, grouped("columns", MX_BOTH[:5])),
    "groups tensorwise": ((ONE, False), 5, grouped("rows", DIRECT[:4])),
}  # fmt: skip


def call(x: torch.Tensor, kind: str, fmts: tuple[Format, ...]):
    from octavo.quantize import triton_launch

    if kind == "both":
        return triton_launch.quantize_both(x, *fmts)
    return triton_launch.quantize(x, fmts[0], kind == "turned")


def call_grouped(x: torch.Tensor, offs: torch.Tensor, fmt: Format, transpose: bool):
    from octavo.quantize import alignment, triton_launch

    return triton_launch.quantize_groups(x, offs, fmt, transpose, alignment(fmt))


# ---- checks --------------------------------------------------------------------------------------------------


def adversarial(*shape: int, dtype: torch.dtype, seed: int, special: bool = True) -> torch.Tensor:
    """Every scale code, ties, zeros of both signs, subnormals, and rows that hold inf or NaN."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=g)
    spread = torch.randint(-150, 126, (*shape[:-1], 1), generator=g).float()
    wild = x * torch.exp2(spread.clamp(-126)) * torch.exp2((spread + 126).clamp(max=0))
    # With amax 448 (240, 6, ...) the multiplier is 1, and these hit the midpoints between codes.
    ties = (
        torch.randint(-64, 65, shape, generator=g).float()
        / 8
        * torch.exp2(torch.randint(-9, 6, shape, generator=g))
    )
    ties = ties.clamp(-448, 448)
    flat = ties.view(-1)
    flat[::31] = torch.tensor([448.0, -448.0, 240.0, 6.0])[torch.arange(flat[::31].numel()) % 4]
    choice = torch.randint(0, 3, (*shape[:-1], 1), generator=g)
    x = torch.where(choice == 0, x, torch.where(choice == 1, wild, ties))
    flat = x.reshape(-1)
    flat[::29] = 0.0
    flat[::37] = -0.0
    if special and flat.numel() > 2000:
        flat[flat.numel() // 3] = float("nan")
        flat[flat.numel() // 2] = float("inf")
        flat[flat.numel() // 2 + 1] = -float("inf")
    return flat.view(shape).to(dtype)


def same(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> str | None:
    for n, (a, b) in enumerate(zip(found, wanted, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"output {n}: {a.dtype} {tuple(a.shape)} for {b.dtype} {tuple(b.shape)}"
        a, b = a.cpu().contiguous(), b.cpu().contiguous()
        if a.dtype == torch.float32:
            wrong = ~((a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan()))
        else:
            a, b = a.view(torch.uint8), b.view(torch.uint8)
            wrong = a != b
        if wrong.any():
            where = wrong.nonzero()[0].tolist()
            values = f"{a[tuple(where)]} for {b[tuple(where)]}"
            return f"output {n}: {int(wrong.sum())} of {wrong.numel()} differ, first at {where}: {values}"
    return None


def all_formats() -> list[Format]:
    found = [
        Format(e, g, r)
        for e in F.ELEMENTS.values()
        if e.packed == 1
        for g in F.GRANULARITIES
        if g != "1x32"
        for r in F.FLOAT32_ROUNDINGS
    ]
    return found + [Format(e, "1x32", r) for e in (F.E4M3FN, F.E5M2, F.E2M1) for r in F.E8M0_ROUNDINGS]


def views(dtype: torch.dtype, device: str) -> list[tuple[str, torch.Tensor]]:
    def data(*shape: int, seed: int = 7) -> torch.Tensor:
        return adversarial(*shape, dtype=dtype, seed=seed).to(device)

    base = data(48, 6, 208)
    return [
        ("plain", data(304, 528)), ("odd", data(257, 134)), ("experts", data(3, 136, 264)),
        ("4-D", data(2, 2, 34, 96)), ("small", data(2, 2)), ("no rows", data(0, 64)), ("no columns", data(64, 0)),
        ("transposed", data(136, 264).mT), ("strided", data(64, 400)[:, ::2]), ("slice", data(64, 400)[:, 3:203]),
        ("permuted", base.permute(1, 0, 2)), ("inner batch", base.permute(0, 2, 1)),
        ("outer last", base.permute(1, 2, 0)),
        ("expanded", data(1, 6, 160)[:, :1].expand(2, 6, 160)), ("wide", data(4, 33000)), ("long", data(600, 40)),
    ]  # fmt: skip


def check_format(key: str, dtype_name: str, full: bool) -> list[str]:
    """Both layouts of one format, on every kind of input if ``full``."""
    from octavo.quantize import reference

    fmt, bad = Format.from_key(key), []
    for dtype in (getattr(torch, dtype_name),):
        for name, x in views(dtype, "cuda")[: None if full else 2]:
            for transpose in (False, True):
                if x.shape[-2 if transpose else -1] % fmt.element.packed:
                    continue
                try:
                    found = call(x, "turned" if transpose else "direct", (fmt,))
                    problem = same(found, reference.quantize(x.cpu(), fmt, transpose))
                except Exception:
                    problem = traceback.format_exc(limit=-2)
                if problem:
                    bad.append(f"{key} {name} {dtype} transpose={transpose}: {problem}")
    return bad


def check_both(key: str, key_t: str) -> list[str]:
    from octavo.quantize import launch_tables, reference

    fmt, fmt_t, bad = Format.from_key(key), Format.from_key(key_t), []
    first = {"rows_first": {"any": {"enabled": 1, "rows": 2, "warps": 4, "programs": 37}}}
    for table in ({}, first) if (fmt.granularity, fmt_t.granularity) == ("rowwise", "rowwise") else ({},):
        for name, x in (views(torch.bfloat16, "cuda")[i] for i in (0, 1, 2, 7)):
            if x.shape[-1] % fmt.element.packed or x.shape[-2] % fmt_t.element.packed:
                continue
            try:
                with launch_tables.override(table):
                    found = call(x, "both", (fmt, fmt_t))
                problem = same(found, reference.quantize_both(x.cpu(), fmt, fmt_t))
            except Exception:
                problem = traceback.format_exc(limit=-2)
            if problem:
                bad.append(f"both {key} {key_t} {name} {table}: {problem}")
    return bad


def check_groups(key: str) -> list[str]:
    from octavo.quantize import alignment
    from octavo.quantize import grouped as reference

    fmt, bad = Format.from_key(key), []
    for sizes, tail in (([5, 0, 9, 0], 0), ([44, 20, 0, 64, 1], 3), ([0, 0, 0], 5), ([300, 1, 130], 0), ([3], 0),
                        ([0, 0], 0), ([700], 9), ([1] * 70, 2)):  # fmt: skip
        offs = torch.tensor(sizes).cumsum(0).to(torch.int32)
        x = adversarial(sum(sizes) + tail, 200, dtype=torch.bfloat16, seed=3)
        x[sum(sizes) :] = float("nan")
        for align, transpose in itertools.product({alignment(fmt), 128}, (False, True)):
            if (transpose and fmt.block[1] == 1) or (not transpose and fmt.granularity != "tensorwise"):
                continue
            try:
                found = _groups(x.cuda(), offs.cuda(), fmt, transpose, align)
                problem = same(found, reference.quantize_groups(x, offs, fmt, transpose, align))
            except Exception:
                problem = traceback.format_exc(limit=-2)
            if problem:
                bad.append(f"groups {key} {sizes}+{tail} align={align} transpose={transpose}: {problem}")
    return bad


def _groups(x, offs, fmt, transpose, align):
    from octavo.quantize import triton_launch

    return triton_launch.quantize_groups(x, offs, fmt, transpose, align)


def check_large() -> list[str]:
    """Past 2^31 elements, by slices at the far end."""
    from octavo.quantize import reference

    bad, rows_, columns = [], 65664, 33024
    x = torch.empty(rows_, columns, dtype=torch.bfloat16, device="cuda").normal_()
    far = slice(-256, None)

    def compare(what: str, found, wanted) -> None:
        problem = same(found, wanted)
        if problem:
            bad.append(f"large {what}: {problem}")

    data, scale = call(x, "direct", (ROW,))
    compare("row", (data[far], scale[far]), reference.quantize(x[far], ROW))
    del data
    data, scale = call(x, "turned", (ROW,))
    wanted, wanted_scale = reference.quantize(x[:, far].contiguous(), ROW, True)
    compare("column", (data[far], scale[far]), (wanted, wanted_scale))
    del data
    for fmt in (B128, MX8):
        d, s, dt, st = call(x, "both", (fmt, fmt))
        compare(f"{fmt}", (d[far], s[-(256 // fmt.block[0]) :]), reference.quantize(x[far], fmt))
        wanted, wanted_scale = reference.quantize(x[:, far].contiguous(), fmt, True)
        compare(f"{fmt}^T", (dt[far], st[-(256 // fmt.block[0]) :]), (wanted, wanted_scale))
        del d, dt
    return bad


def check_main_sizes(name: str) -> list[str]:
    """The timed sizes with the committed configuration, against the reference run on the GPU."""
    from octavo.quantize import reference

    bad = []
    kind, fmts, _, _ = CASES[name]
    for shape in SHAPES[:1] + SHAPES[3:]:
        x = adversarial(*shape, dtype=torch.bfloat16, seed=11, special=False).cuda()
        if (kind != "direct" and shape[0] % fmts[-1].element.packed) or shape[1] % fmts[0].element.packed:
            continue
        wanted = (
            reference.quantize_both(x, *fmts)
            if kind == "both"
            else reference.quantize(x, fmts[0], kind == "turned")
        )
        problem = same(call(x, kind, fmts), wanted)
        if problem:
            bad.append(f"{name} {shape}: {problem}")
    return bad


def run_job(job: tuple) -> tuple[tuple, list[str], float]:
    started = time.time()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    name, *arguments = job
    try:
        bad = globals()[name](*arguments)
    except Exception:
        bad = [f"{job}: {traceback.format_exc(limit=-3)}"]
    return job, bad, time.time() - started


def warm(name: str, index: int) -> list[str]:
    """Compile one candidate on short inputs that specialise as the timed ones do."""
    from octavo.quantize import launch_tables

    torch.use_deterministic_algorithms(False)
    bad = []
    if name in GROUPED_CASES:
        (fmt, transpose), _, candidates = GROUPED_CASES[name]
        with launch_tables.override(([{}] + candidates)[index]):
            for _, columns, groups in GROUPED_SHAPES:
                x = torch.randn(512, columns, device="cuda").bfloat16()
                offs = torch.arange(1, groups + 1, dtype=torch.int32, device="cuda") * (512 // groups)
                call_grouped(x, offs, fmt, transpose)
        return bad
    kind, fmts, _, candidates = CASES[name]
    with launch_tables.override(([{}] + candidates)[index]):
        for columns, count in ((4096, 1024), (14336, 1024), (4095, 1023))[
            : 3 if index <= ODD_CANDIDATES else 2
        ]:
            if fmts[0].element.packed > 1 and columns % 2:
                continue
            call(torch.randn(count, columns, device="cuda").bfloat16(), kind, fmts)
    torch.cuda.synchronize()
    return bad


# ---- timing --------------------------------------------------------------------------------------------------


class Timer:
    def __init__(self) -> None:
        self.cache = torch.empty(768 << 20, dtype=torch.uint8, device="cuda")

    def __call__(self, fn, runs: int) -> float:
        """Median milliseconds; the clearing in between is long enough to hide the host's launches."""
        fn()
        starts = [torch.cuda.Event(enable_timing=True) for _ in range(runs)]
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(runs)]
        for start, end in zip(starts, ends, strict=True):
            self.cache.zero_()
            start.record()
            fn()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(s.elapsed_time(e) for s, e in zip(starts, ends, strict=True))


def host_us(fn) -> float:
    """Microseconds of host time a call, the device kept from holding it back."""
    fn()
    torch.cuda.synchronize()
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(20):
            fn()
        best = min(best, (time.perf_counter() - started) / 20)
        torch.cuda.synchronize()
    return best * 1e6


def short(table: dict) -> str:
    if not table:
        return "table"
    return " ".join(
        f"{kernel}/{bucket} " + ",".join(f"{k[:1] if k != 'block_k' else 'k'}{v}" for k, v in config.items())
        for kernel, buckets in table.items()
        for bucket, config in list(buckets.items())[:1]
    )


def time_cases(args: argparse.Namespace, results: list[dict], copy: float) -> None:
    from octavo.quantize import launch_tables

    timer = Timer()
    deadline = args.started + args.seconds
    for shape in SHAPES:
        x = torch.randn(*shape, device="cuda").bfloat16()
        y = torch.empty_like(x)
        ms = timer(lambda: y.copy_(x), args.runs)  # noqa: B023
        rate = x.numel() * 4 / ms / 1e6
        print(f"== {shape}: copy {rate:.0f} GB/s ({ms:.4f} ms)", flush=True)
        results.append({"case": "copy", "shape": shape, "ms": ms, "gb_s": rate})
        for name, (kind, fmts, size, candidates) in CASES.items():
            if fmts[0].element.packed > 1 and (shape[1] % 2 or (kind != "direct" and shape[0] % 2)):
                continue
            if time.time() > deadline:
                print("out of time", flush=True)
                return
            times = []
            odd = shape == SHAPES[-1]
            for table in [{}] + candidates[: ODD_CANDIDATES if odd else None]:
                with launch_tables.override(table):
                    try:
                        ms = timer(lambda: call(x, kind, fmts), args.runs)  # noqa: B023
                    except Exception as error:
                        print(f"{name} {short(table)}: {type(error).__name__} {str(error)[:200]}")
                        continue
                rate = x.numel() * size / ms / 1e6
                times.append((ms, rate, table))
                results.append(
                    {
                        "case": name,
                        "shape": shape,
                        "config": table,
                        "ms": ms,
                        "gb_s": rate,
                        "of_copy": rate / copy,
                    }
                )
            report(name, times, copy, host_us(lambda: call(x, kind, fmts)) if shape == SHAPES[0] else None)  # noqa: B023
    for rows_, columns, groups in GROUPED_SHAPES:
        x = torch.randn(rows_, columns, device="cuda").bfloat16()
        cuts = (
            torch.randint(0, rows_, (groups - 1,), generator=torch.Generator().manual_seed(0)).sort().values
        )
        offs = torch.cat([cuts, torch.tensor([rows_])]).to(torch.int32).cuda()
        print(f"== groups {(rows_, columns, groups)}", flush=True)
        for name, ((fmt, transpose), size, candidates) in GROUPED_CASES.items():
            if time.time() > deadline:
                print("out of time", flush=True)
                return
            times = []
            for table in [{}] + candidates:
                with launch_tables.override(table):
                    ms = timer(lambda: call_grouped(x, offs, fmt, transpose), args.runs)  # noqa: B023
                rate = x.numel() * size / ms / 1e6
                times.append((ms, rate, table))
                results.append(
                    {"case": name, "shape": (rows_, columns, groups), "config": table, "ms": ms, "gb_s": rate,
                     "of_copy": rate / copy}
                )  # fmt: skip
            report(name, times, copy, host_us(lambda: call_grouped(x, offs, fmt, transpose)))  # noqa: B023


def report(name: str, times: list, copy: float, host: float | None) -> None:
    table_ms, table_rate, _ = times[0]
    best = sorted(times, key=lambda t: t[0])[:3]
    line = f"{name:16s} table {table_ms:.4f} ms {table_rate:.0f} {table_rate / copy:.0%}"
    line += " | best " + " | ".join(
        f"{ms:.4f} {rate:.0f} {rate / copy:.0%} {short(t)}" for ms, rate, t in best
    )
    print(line + (f" | host {host:.0f} us" if host else ""), flush=True)


def pieces(results: list[dict]) -> None:
    """The amax pass and fills by themselves, to see where two-pass times go."""
    from octavo.quantize import launch_tables, triton_launch

    timer = Timer()
    x = torch.randn(8192, 14336, device="cuda").bfloat16().unsqueeze(0)
    kinds = {"one": (0, 0), "row": (1, 0), "column": (0, 1)}
    for kind, configs in (("one", AMAX_ONE), ("column", AMAX_COLUMN), ("row+column", AMAX_BOTH)):
        blocks = [kinds[k] for k in kind.split("+")]
        line = []
        for table in amax(kind, configs):
            with launch_tables.override(table):
                ms = timer(
                    functools.partial(triton_launch._amax, x, "sm_90", triton_launch._Amax(), blocks), 15
                )
            rate = x.numel() * 2 / ms / 1e6
            line.append((rate, short(table)))
            results.append({"case": f"amax {kind}", "config": table, "ms": ms, "gb_s": rate})
        print(
            f"amax {kind} alone (8192, 14336): " + " | ".join(f"{r:.0f} {t}" for r, t in sorted(line)[::-1])
        )


def large_copy_gb_s() -> float:
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / Timer()(lambda: target.copy_(source), 15) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--workers", type=int, default=max(2, min(14, (os.cpu_count() or 4) - 1)))
    parser.add_argument("--seconds", type=float, default=215.0, help="stop timing after this many seconds")
    parser.add_argument("--skip-checks", action="store_true")
    args = parser.parse_args()
    args.started = time.time()
    args.out.mkdir(parents=True, exist_ok=True)
    main_formats = [ROW, ONE, B1, B128, MX8, MX4, Format(F.E5M2, "columnwise"), Format(F.E4M3FN, "128x1")]
    checks = [("check_format", f.key, "bfloat16", True) for f in main_formats]
    checks += [("check_format", f.key, "float32", False) for f in all_formats()]
    checks += [("check_format", f.key, "float16", False) for f in (ROW, MX8)]
    pairs = [ROW, ONE, B1, B128, MX8, MX4, ONE_E5M2, Format(F.E4M3FN, "columnwise")]
    checks += [("check_both", a.key, b.key) for a, b in itertools.product(pairs, pairs)]
    checks += [("check_groups", f.key) for f in (ROW, ONE, ONE_E5M2, B1, B128, MX8, MX4)]
    checks += [("check_main_sizes", name) for name in CASES] + [("check_large",)]
    jobs = [] if args.skip_checks else checks
    jobs = [
        ("warm", name, i)
        for table in (CASES, GROUPED_CASES)
        for name, case in table.items()
        for i in range(len(case[-1]) + 1)
    ] + jobs
    problems, slowest = [], []
    with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
        arriving = pool.imap_unordered(run_job, jobs)
        try:
            for _ in jobs:
                left = args.started + args.seconds - 45 - time.time()
                job, bad, seconds = arriving.next(timeout=max(1.0, left))
                problems += bad
                slowest.append((seconds, job))
        except multiprocessing.TimeoutError:
            print(f"stopped waiting: {len(jobs) - len(slowest)} jobs unfinished")
            pool.terminate()
    done = {job for _, job in slowest}
    print(
        f"{len(slowest)} of {len(jobs)} jobs, {sum(c in done for c in checks)} of {len(checks)} checks done, "
        f"{len(problems)} problems, {time.time() - args.started:.0f} s"
    )
    print("slowest:", ", ".join(f"{s:.0f} s {j}" for s, j in sorted(slowest, reverse=True)[:4]))
    for problem in problems[:25]:
        print("PROBLEM", problem[:400])
    results: list[dict] = []
    copy = large_copy_gb_s()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, large copy {copy:.0f} GB/s")
    try:
        pieces(results)
        time_cases(args, results, copy)
    finally:
        (args.out / "quantize_round.json").write_text(
            json.dumps({"copy_gb_s": copy, "problems": problems, "results": results}, indent=0)
        )
    print(f"total {time.time() - args.started:.0f} s; {len(problems)} problems")


if __name__ == "__main__":
    main()
