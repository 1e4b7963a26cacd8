"""Operands and checks of matmul_round.py: what every candidate must compute, on the GPU, in processes of its own."""

from __future__ import annotations

import json
import math
import multiprocessing
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from octavo import quantize, quantize_grouped, scaled_grouped_mm, scaled_mm, use_kernels
from octavo.formats import ALL, E4M3FN, E5M2, MXFP4, MXFP8, MXFP8_E5M2, Format, ScaledTensor
from octavo.matmul import grouped_mm, launch_tables
from octavo.matmul.launch_tables import Config
from octavo.quantize import alignment
from octavo.quantize.grouped import capacity, padded_ends
from octavo.testing import outlier_matrix, sqnr, worst_row_sqnr

FLOOR = 50.0
ROUNDED_ROW_FLOOR = 40.0
"""Of the worst of thousands of rows where outputs have 16 bits: one flipped rounding of a row's one outlier costs
that much (42.8 dB seen on an H200). One wrong scale of a row would leave about 12."""
ROW, ONE = Format(E4M3FN, "rowwise", "power_of_two"), Format(E4M3FN, "tensorwise")
BLOCK, SQUARE = Format(E4M3FN, "1x128"), Format(E4M3FN, "128x128")
WIDE_ONE = Format(E5M2, "tensorwise")
Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Job:
    """One product at one shape: dense (M, N, K); rows (M, N, K, G); columns (M, N, rows, G)."""

    name: str
    product: str
    a: Format | None
    b: Format | None
    shape: tuple[int, ...]
    candidates: tuple[Config, ...] = ()
    fast: bool = False
    skew: bool = False

    @property
    def form(self) -> str:
        return self.product.split()[0]

    @property
    def flops(self) -> float:
        return 2.0 * math.prod(self.shape[:3])


@dataclass
class Checked:
    """What a job's process found: by candidate, its SQNR or its error."""

    configs: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def cfg(kind: str, tile: tuple[int, int, int], warps: int, stages: int, **more: Any) -> Config:
    """A candidate configuration."""
    return Config(kind, tile, warps, stages, **more)


# ---- operands -----------------------------------------------------------------------------------------------


def _random(shape: tuple[int, ...], fmt: Format, seed: int) -> ScaledTensor:
    """Random codes with scales near 1: what timing needs, without a pass of quantization."""
    generator = torch.Generator("cuda").manual_seed(seed)
    size = fmt.data_shape(shape)
    if fmt.element.packed > 1:
        codes = torch.randint(0, 256, size, generator=generator, device="cuda", dtype=torch.uint8)
        data = codes.view(fmt.element.dtype)
    else:
        values = torch.randn(size, generator=generator, device="cuda", dtype=torch.bfloat16)
        data = values.to(fmt.element.dtype)
    if fmt.is_mx:
        scale = torch.randint(
            120, 130, fmt.scale_shape(shape), generator=generator, device="cuda", dtype=torch.uint8
        ).view(fmt.scale_dtype)
    else:
        scale = torch.rand(fmt.scale_shape(shape), generator=generator, device="cuda") + 0.5
    return ScaledTensor(data, scale, fmt)


def _offs(rows: int, groups: int, skew: bool) -> torch.Tensor:
    if skew:
        weights = torch.tensor([0.0 if g % 8 == 5 else 1.0 / (1 + g % 11) for g in range(groups)])
        sizes = (weights / weights.sum() * rows * 0.98).long()
    else:
        sizes = torch.full((groups,), rows // groups)
    return sizes.cumsum(0).to(torch.int32).cuda()


def timed_operands(job: Job, seed: int) -> tuple[Any, Any, torch.Tensor | None]:
    m, n, k, *groups = job.shape
    if job.form == "dense":
        return _random((m, k), job.a, seed), _random((n, k), job.b, seed + 1), None
    offs = _offs(m if job.form == "rows" else k, groups[0], job.skew)
    if job.a is None or job.b is None:
        if job.form == "rows":
            shapes = ((m, k), (groups[0], n, k))
            return *(torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes), offs
        return *(torch.randn((k, s), device="cuda", dtype=torch.bfloat16).t() for s in (m, n)), offs
    if job.form == "rows":
        return _random((m, k), job.a, seed), _random((groups[0], n, k), job.b, seed + 1), offs
    align = alignment(job.a, job.b)
    ends, columns = padded_ends(offs, align), capacity(k, groups[0], align)
    sides = []
    for rows, fmt in ((m, job.a), (n, job.b)):
        x = _random((rows, columns), fmt, seed + rows)
        if fmt.block[1] == ALL:
            scale = torch.rand((groups[0], rows if fmt.block[0] == 1 else 1, 1), device="cuda") + 0.5
            x = ScaledTensor(x.data, scale, fmt)
        sides.append(ScaledTensor(x.data, x.scale, fmt, group_ends=ends))
    return sides[0], sides[1], None


def call(job: Job, operands: tuple[Any, Any, torch.Tensor | None], **more: Any) -> torch.Tensor:
    a, b, offs = operands
    if job.a is None:
        return grouped_mm(a, b, offs, **more)
    if job.form == "dense":
        return scaled_mm(a, b, fast_accum=job.fast, **more)
    return scaled_grouped_mm(a, b, offs, fast_accum=job.fast, **more)


def op_of(job: Job) -> str:
    return "grouped_mm" if job.a is None else "scaled_mm" if job.form == "dense" else "scaled_grouped_mm"


# ---- checks -------------------------------------------------------------------------------------------------


def _small_operands(job: Job, k: int = 1024) -> tuple[Any, Any, torch.Tensor | None]:
    """Outlier inputs at a size that is quick and keeps the timed launch's specialization."""
    m, n = 336, 272
    if job.form == "dense":
        a, b = (outlier_matrix((rows, k), seed=rows, device="cuda") for rows in (m, n))
        return quantize(a, job.a), quantize(b, job.b), None
    groups = job.shape[3]
    sizes = torch.tensor([(37 * g) % 160 if g % 3 else 0 for g in range(groups)])
    offs, rows = sizes.cumsum(0).to(torch.int32).cuda(), int(sizes.sum()) + 46 + int(sizes.sum()) % 2
    if job.form == "rows":
        x, w = outlier_matrix((rows, k), device="cuda"), outlier_matrix((groups, n, k), seed=1, device="cuda")
        if job.a is None:
            return x.bfloat16(), w.bfloat16(), offs
        return quantize_grouped(x, offs, job.a), quantize(w, job.b), offs
    g, x = outlier_matrix((rows, m), device="cuda"), outlier_matrix((rows, n), seed=1, device="cuda")
    if job.a is None:
        return g.bfloat16().t(), x.bfloat16().t(), offs
    align = alignment(job.a, job.b)
    left, right = (
        quantize_grouped(t, offs, f, transpose=True, align=align) for t, f in ((g, job.a), (x, job.b))
    )
    return left, right, None


def _expected(job: Job, operands: tuple[Any, Any, torch.Tensor | None], **more: Any) -> torch.Tensor:
    if job.a is None:
        # In float32 and rounded once: the reference rounds between product and bias.
        a, b, offs = operands
        with use_kernels(grouped_mm="reference"):
            return grouped_mm(a.float(), b.float(), offs).to(a.dtype).float()
    with use_kernels(**{op_of(job): "reference"}):
        return call(job, operands, **more).float()


def _quality(found: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    if found.shape != expected.shape:
        raise AssertionError(f"shape {tuple(found.shape)} instead of {tuple(expected.shape)}")
    return sqnr(found, expected), worst_row_sqnr(found, expected)


def check(job: Job) -> Checked:
    """Check every candidate of a job on the GPU, and run its timed launch once."""
    checked = Checked()
    operands = _small_operands(job)
    expected, timed = _expected(job, operands), timed_operands(job, 0)
    for config in job.candidates:
        entry: dict[str, Any] = {"config": asdict(config)}
        try:
            with use_kernels(**{op_of(job): "triton"}), launch_tables.override({job.product: (config,)}):
                entry["sqnr"], entry["worst_row"] = _quality(call(job, operands), expected)
                call(job, timed)
                torch.cuda.synchronize()
        except Exception as error:
            entry["error"] = f"{type(error).__name__}: {error}"[:300]
        # With fast accumulation the floor is what the round measures.
        floors = (20.0, 15.0) if job.fast else (FLOOR, ROUNDED_ROW_FLOOR)
        entry["ok"] = "error" not in entry and entry["sqnr"] >= floors[0] and entry["worst_row"] >= floors[1]
        checked.configs.append(entry)
    return checked


def _edges() -> list[str]:
    """Odd sizes, empty dimensions and groups, bias, output types, graphs and offsets beyond 2^31."""
    faults: list[str] = []
    pairs = [(ROW, ROW), (WIDE_ONE, ONE), (ROW, ONE), (BLOCK, SQUARE), (BLOCK, BLOCK), (SQUARE, BLOCK),
             (MXFP8, MXFP8), (MXFP8_E5M2, MXFP8), (MXFP4, MXFP4), (MXFP8, MXFP4)]  # fmt: skip
    for a, b in pairs:
        for dtype, shape in (
            (torch.float32, (129, 67, 402)),
            (torch.float16, (5, 130, 258)),
            (torch.bfloat16, (7, 3, 0)),
        ):
            job = Job("edge", "dense", a, b, shape)
            # Within float16: the largest outliers of both sides multiply to 9e6.
            x, w = (
                outlier_matrix((r, shape[2]), seed=r, device="cuda") / 64
                if shape[2]
                else torch.zeros(r, 0, device="cuda")
                for r in shape[:2]
            )
            operands = (quantize(x, a), quantize(w, b), None)
            bias = torch.randn(shape[1], device="cuda").to(dtype)
            _compare(faults, f"dense {shape} {dtype} {a} {b}", job, operands, bias=bias, out_dtype=dtype)
    _grouped_edges(faults)
    return faults


def _compare(faults: list[str], what: str, job: Job, operands: Any, **more: Any) -> None:
    try:
        with use_kernels(**{op_of(job): "triton"}):
            worst = _quality(call(job, operands, **more), _expected(job, operands, **more))[1]
        exact = more.get("out_dtype", torch.bfloat16) == torch.float32
        if not worst >= (FLOOR if exact else ROUNDED_ROW_FLOOR):
            faults.append(f"{what}: worst row {worst:.1f} dB")
    except Exception as error:
        faults.append(f"{what}: {type(error).__name__}: {error}"[:300])


def _grouped_edges(faults: list[str]) -> None:
    sizes = torch.tensor([44, 20, 0, 64, 1, 0, 130])
    offs = sizes.cumsum(0).to(torch.int32).cuda()
    x, w, g = (
        outlier_matrix(shape, seed=seed, device="cuda") / 64
        for seed, shape in enumerate(((282, 402), (7, 67, 402), (282, 37)))
    )
    x[259:] = float("nan")
    bias = torch.randn(7, 67, device="cuda")
    for a, b in ((ROW, ROW), (ONE, ONE), (BLOCK, SQUARE), (MXFP8, MXFP8), (MXFP4, MXFP4)):
        job = Job("edge", "rows", a, b, (282, 67, 402, 7))
        operands = (quantize_grouped(x, offs, a), quantize(w, b), offs)
        _compare(faults, f"rows {a} {b}", job, operands, bias=bias, out_dtype=torch.float32)
    for a, b in ((ROW, ROW), (ONE, ONE), (BLOCK, BLOCK), (MXFP8, MXFP8), (MXFP4, MXFP4)):
        job = Job("edge", "columns", a, b, (37, 402, 282, 7))
        align = alignment(a, b)
        sides = [quantize_grouped(t, offs, f, transpose=True, align=align) for t, f in ((g, a), (x, b))]
        _compare(faults, f"columns {a} {b}", job, (*sides, None), out_dtype=torch.float32)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for what, pair in (("rows", (x[:, :50], w[:, :, :50])), ("columns", (g.T, g.T))):
            job = Job("edge", f"{what} plain", None, None, (282, 67, 50, 7))
            _compare(faults, f"plain {what} {dtype}", job, (*(t.to(dtype) for t in pair), offs))


def _graph() -> list[str]:
    """Grouped products under CUDA-graph capture, replayed with other group ends: no synchronisation."""
    faults: list[str] = []
    x, w = (outlier_matrix(s, device="cuda", dtype=torch.bfloat16) for s in ((512, 256), (8, 128, 256)))
    offs = torch.tensor([64 * (g + 1) for g in range(8)], dtype=torch.int32, device="cuda")
    a, b = quantize(x, BLOCK), quantize(w, SQUARE)
    with use_kernels(scaled_grouped_mm="triton"):
        scaled_grouped_mm(a, b, offs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = scaled_grouped_mm(a, b, offs)
    offs.copy_(torch.tensor([0, 100, 101, 101, 300, 301, 400, 490], dtype=torch.int32))
    graph.replay()
    with use_kernels(scaled_grouped_mm="reference"):
        expected = scaled_grouped_mm(a, b, offs)
    worst = worst_row_sqnr(out, expected)
    if not worst >= ROUNDED_ROW_FLOOR:
        faults.append(f"graph replay with other group ends: worst row {worst:.1f} dB")
    return faults


def _far() -> list[str]:
    """A matrix of more than 2^31 elements: the last rows equal the same rows alone."""
    m, k = 270_000, 8192
    data = torch.randn(128, k, device="cuda").to(torch.float8_e4m3fn).repeat(m // 128 + 1, 1)[:m]
    scale = torch.rand(m, 1, device="cuda") + 0.5
    b = _random((256, k), ROW, 1)
    with use_kernels(scaled_mm="triton"):
        whole = scaled_mm(ScaledTensor(data, scale, ROW), b)[-200:]
        alone = scaled_mm(ScaledTensor(data[-200:], scale[-200:], ROW), b)
    quality = sqnr(whole, alone)
    return [] if quality >= FLOOR else [f"offsets beyond 2^31: {quality:.1f} dB"]


def _accuracy() -> list[dict[str, Any]]:
    """SQNR by K, float32 output, of each way to accumulate FP8 products; outlier inputs and normal ones."""
    rows = []
    for k in (256, 1024, 4096, 14336, 65536):
        for inputs in ("normal", "outliers"):
            x, w = (
                torch.randn(256, k, device="cuda") if inputs == "normal"
                else outlier_matrix((256, k), seed=s, device="cuda") for s in range(2)
            )  # fmt: skip
            a, b = quantize(x, ROW), quantize(w, ROW)
            p, q = quantize(x, BLOCK), quantize(w, SQUARE)
            r, s = quantize(x, MXFP8), quantize(w, MXFP8)
            found: dict[str, Any] = {"k": k, "inputs": inputs}
            tile = (128, 128, 128)
            for name, pair, fast, product, config in (
                ("fast", (a, b), True, "dense fast epilogue", cfg("epilogue", tile, 8, 3)),
                (
                    "promote 128",
                    (a, b),
                    False,
                    "dense epilogue",
                    cfg("epilogue", tile, 8, 3, promote=128),
                ),
                (
                    "promote 64",
                    (a, b),
                    False,
                    "dense epilogue",
                    cfg("epilogue", tile, 8, 3, promote=64),
                ),
                (
                    "promote 32",
                    (a, b),
                    False,
                    "dense epilogue",
                    cfg("epilogue", tile, 8, 3, promote=32),
                ),
                ("128-blocks", (p, q), False, "dense block", cfg("block", tile, 8, 3)),
                (
                    "mx dequantize",
                    (r, s),
                    False,
                    "dense mxfp8",
                    cfg("dequantize", (128, 128, 64), 8, 3),
                ),
                ("mx by 32-blocks", (r, s), False, "dense mxfp8", cfg("block", (128, 128, 32), 8, 4)),
            ):
                with use_kernels(scaled_mm="reference"):
                    expected = scaled_mm(*pair, out_dtype=torch.float32)
                with use_kernels(scaled_mm="triton"), launch_tables.override({product: (config,)}):
                    out = scaled_mm(*pair, out_dtype=torch.float32, fast_accum=fast)
                found[name] = [round(q, 1) for q in _quality(out, expected)]
            for name, fast in (("torch fast", True), ("torch", False)):
                with use_kernels(scaled_mm="torch"):
                    out = scaled_mm(a, b, fast_accum=fast)
                with use_kernels(scaled_mm="reference"):
                    found[f"{name} (bf16)"] = [
                        round(q, 1) for q in _quality(out, scaled_mm(a, b, out_dtype=torch.float32))
                    ]
            rows.append(found)
    return rows


WHOLE: dict[str, Callable[[], Any]] = {"edges": _edges, "graph": _graph, "far": _far, "accuracy": _accuracy}


def _worker(task: str, job: Job | None, out: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with use_kernels(quantize="reference", quantize_grouped="reference"):
            result: Any = WHOLE[task]() if job is None else asdict(check(job))
    except Exception:
        result = {"configs": [], "notes": [traceback.format_exc()[-1500:]]}
    Path(out).write_text(json.dumps(result))


def run_checks(found: list[Job], folder: Path, at_once: int, limit: float) -> dict[str, Any]:
    """Every task in a process of its own, so that a fault of one leaves the others alone."""
    context = multiprocessing.get_context("spawn")
    every = {str(index): job for index, job in enumerate(found)}
    waiting = [*WHOLE, *every]
    running: dict[str, Any] = {}
    started, results = time.time(), {}
    while waiting or running:
        while waiting and len(running) < at_once:
            task = waiting.pop(0)
            process = context.Process(
                target=_worker, args=(task, every.get(task), str(folder / f"check-{task}.json"))
            )
            process.start()
            running[task] = process
        for task, process in list(running.items()):
            if process.is_alive() and time.time() - started < limit:
                continue
            if process.is_alive():
                process.kill()
            process.join()
            path = folder / f"check-{task}.json"
            lost = {"configs": [], "notes": [f"ended with {process.exitcode} and no result"]}
            results[task] = json.loads(path.read_text()) if path.exists() else lost
            del running[task]
        time.sleep(0.05)
    return results
