"""Products behind PyTorch's operators on one GPU: checks, plans timed side by side, then the suites; under 4 minutes.

    PYTHONPATH=src python benchmarks/gemm_round.py OUT [--checks] [--plans] [--suites]      (all three by default)
    PYTHONPATH=src python benchmarks/gemm_round.py OUT --compiled         mx beside compiled decoding, minutes more
    PYTHONPATH=src python benchmarks/gemm_round.py OUT --choose            no GPU: plans from what was timed

Kernels are compiled first, in processes that share Triton's cache, while the checks of tests/operators/gemm_checks.py
run on the card. Each plan and each case of a suite is checked before it is timed; one that does not compile or is wrong
is a row that says so. Every row is written as it comes. The fastest plans go to ``OUT/tables/gemm-<arch>.json``, which
the suites of the same run read; ``octavo tune --wins --results OUT --to FOLDER`` makes the table of wins without a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

PARTS = {"checks": 75.0, "plans": 50.0, "suites": 110.0}
"""Most seconds of each part: checks and compilation, plans, suites; what one leaves goes to the next."""
SUITES = {"gemm": 0.26, "mx": 0.36, "grouped-bf16": 0.14, "grouped-fp8": 0.1, "scaled": 0.14}
"""Shares of the suites' time; what one leaves goes to the next."""
WARMED = ("grouped-bf16", "grouped-fp8", "scaled")
"""Suites whose kernels are not among the plans."""
CHECKS = Path(__file__).parents[1] / "tests" / "operators" / "gemm_checks.py"
GROUPS = ("mx", "mixed", "dense", "fp8", "values", "first", "calls")
WORKS = ("16-bit", "mxfp8", "mxfp4", "16-bit x mxfp8", "16-bit x mxfp4", "16-bit x block")
WEIGHTS = ((4096, 4096), (14336, 4096))
LIMITS = {16: 16, 64: 64, 256: 256, 512: 512, 2048: None}
"""Rows that are timed, and the ``up_to`` of the line that they decide."""
NARROW = {
    16: ((16, 64, 256, 4, 4, 1, 4), (16, 64, 128, 4, 4, 1, 4), (16, 64, 128, 4, 6, 1, 8), (16, 128, 128, 4, 4, 1, 8),
         (16, 64, 256, 4, 3, 1, 8), (16, 128, 256, 4, 3, 1, 4), (16, 32, 256, 4, 4, 0, 4)),
    64: ((64, 64, 128, 4, 4, 1, 4), (64, 64, 128, 4, 4, 0, 4), (64, 64, 256, 4, 3, 1, 4), (32, 64, 256, 4, 3, 1, 4),
         (64, 128, 128, 4, 3, 0, 4), (64, 128, 128, 8, 3, 1, 4)),
    256: ((64, 128, 128, 4, 3, 0, 4), (128, 128, 128, 8, 3, 0, 2), (128, 64, 128, 4, 4, 0, 4),
          (64, 128, 128, 4, 4, 0, 2), (128, 128, 128, 8, 3, 1, 2)),
    2048: ((128, 128, 128, 8, 3, 0, 1), (128, 256, 128, 8, 2, 0, 1), (128, 128, 128, 4, 3, 0, 1)),
}  # fmt: skip
"""(BLOCK_M, BLOCK_N, BLOCK_K, warps, stages, swap, split) of products that decode, by rows."""
DENSE_TILES = {
    16: ((16, 64, 256, 4, 4, 1, 4), (16, 64, 128, 4, 6, 1, 4), (16, 64, 128, 4, 6, 1, 8), (16, 128, 128, 4, 4, 1, 8),
         (16, 64, 256, 4, 3, 1, 8), (16, 32, 256, 4, 5, 0, 4)),
    64: ((64, 64, 128, 4, 4, 1, 4), (64, 64, 64, 4, 7, 1, 4)),
}  # fmt: skip
DENSE_BOXES = {
    16: ((16, 64, 256, 4, 4, 0, 4), (64, 64, 128, 4, 5, 0, 4), (64, 32, 256, 4, 4, 0, 4)),
    64: ((64, 64, 128, 4, 5, 0, 4), (64, 64, 128, 4, 5, 0, 2), (64, 128, 128, 4, 4, 0, 4), (64, 128, 64, 4, 7, 0, 4)),
    256: ((64, 128, 128, 4, 4, 0, 4), (128, 128, 64, 8, 4, 0, 2), (128, 64, 128, 4, 4, 0, 4),
          (64, 256, 64, 4, 4, 0, 2)),
    512: ((128, 128, 64, 8, 4, 0, 2), (128, 128, 128, 8, 3, 0, 1), (128, 256, 64, 8, 3, 0, 2),
          (128, 128, 64, 4, 5, 0, 1)),
    2048: ((128, 256, 64, 8, 3, 0, 1), (128, 256, 64, 8, 4, 0, 1), (256, 128, 64, 8, 4, 0, 1),
           (128, 128, 64, 8, 4, 0, 1)),
}  # fmt: skip


# ---- candidates -----------------------------------------------------------------------------------------------


def candidates(work: str, rows: int, arch: str) -> list[Any]:
    """The committed plan first, then what else is worth a try."""
    from octavo.operators.gemm import plan as plans

    def plan(kind: str, line: tuple[int, ...]) -> plans.Plan:
        m, n, k, warps, stages, swap, split = line
        k = 128 if work.endswith("block") else k
        return plans.Plan(kind, (m, n, k), warps, stages, split=split, swap=bool(swap))

    committed = plans.tables().get(arch, plans.tables()["other"])[work]
    found = [next(p for p in committed if p.up_to is None or rows <= p.up_to)]
    if work == plans.DENSE:
        found += [plan("tiles", line) for line in DENSE_TILES.get(rows, ())]
        found += [plan("boxes", line) for line in DENSE_BOXES[rows]]
    else:
        found += [plans.Plan("decode_first")] if rows > 64 else []
        found += [plan("tiles", line) for line in NARROW[rows]]
    unlimited = [plans.Plan(**{**asdict(p), "up_to": None}) for p in found]
    return list(dict.fromkeys(unlimited))


def shapes() -> list[tuple[str, int]]:
    """(work, rows) of every line that is decided."""
    return [(work, rows) for rows in LIMITS for work in WORKS if rows != 512 or work == "16-bit"]


def operands(work: str, rows: int, n: int, k: int) -> tuple[Any, Any]:
    """16-bit rows or MX ones, and a weight; MX scales of both lie swizzled, as PyTorch's CUDA kernels want them."""
    import torch

    from octavo import quantize
    from octavo.bench.mx_suite import FORMATS
    from octavo.formats import ScaledTensor, ScaleLayout
    from octavo.operators.gemm import reference

    def swizzled(x: ScaledTensor) -> ScaledTensor:
        flat = reference.swizzle(x.scale.view(torch.uint8)).view(torch.float8_e8m0fnu)
        return ScaledTensor(x.data, flat, x.format, ScaleLayout.SWIZZLED_32_4_4)

    x, weight = (torch.randn(size, k, device="cuda", dtype=torch.bfloat16) for size in (rows, n))
    if work == "16-bit":
        return x, weight
    fmt = FORMATS[work.split()[-1]]
    if work.startswith("16"):
        return x, quantize(weight, fmt)
    return swizzled(quantize(x, fmt)), swizzled(quantize(weight, fmt))


def wanted(a: Any, b: Any) -> Any:
    """The product by the reference, in float32."""
    import torch

    from octavo.formats import ScaledTensor, ScaleLayout
    from octavo.operators.gemm import reference

    def values(x: Any) -> torch.Tensor:
        if not isinstance(x, ScaledTensor):
            return x.float()
        if x.layout is ScaleLayout.SWIZZLED_32_4_4:
            x = ScaledTensor(x.data, reference.unswizzle(x.scale, x.shape[0], x.shape[1] // 32), x.format)
        return reference.decode(x)

    return values(a) @ values(b).t()


# ---- compilation ----------------------------------------------------------------------------------------------


def _warm(job: tuple[int, int]) -> int:
    """Compile a share of all candidates and of the suites' kernels by calling them; how many could not be."""
    part, parts = job
    import torch

    from octavo import hardware
    from octavo.bench import cases

    arch, (n, k) = hardware.architecture("cuda"), WEIGHTS[0]
    todo: list[tuple[Any, ...]] = [
        ("plan", work, rows, plan) for work, rows in shapes() for plan in candidates(work, rows, arch)
    ]
    todo += [("case", case) for suite in WARMED for case in cases.cases(suite, force=True)]
    failed = 0
    for kind, *what in todo[part::parts]:
        try:
            if kind == "case":
                what[0].contenders["octavo"](*what[0].make())
            else:
                work, rows, plan = what
                _product(plan, *operands(work, rows, n, k))
            torch.cuda.synchronize()
        except Exception:  # fails again where it is timed, and is a row there
            failed += 1
        torch.cuda.empty_cache()
    return failed


def _product(plan: Any, a: Any, b: Any, out: Any = None) -> Any:
    import torch

    from octavo.operators.gemm import launch

    if out is None:
        out = torch.empty((a.shape[0], b.shape[0]), dtype=torch.bfloat16, device="cuda")
    return launch.product(a, b, None, out, plan)


def checks(seconds: float, workers: int) -> None:
    """Every group of the tests on this card, beside the compilation of what will be timed."""
    started = time.monotonic()
    commands = {group: [sys.executable, str(CHECKS), group] for group in GROUPS}
    commands["F.scaled_mm"] = [sys.executable, __file__, "-", "--calls"]
    running = {
        name: subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for name, command in commands.items()
    }
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pending = pool.map_async(_warm, [(i, workers) for i in range(workers)], chunksize=1)
        try:
            failed = sum(pending.get(timeout=max(1.0, seconds - 5)))
            print(f"compiled in {time.monotonic() - started:.0f} s; {failed} could not be", flush=True)
        except multiprocessing.TimeoutError:
            print("out of time: the rest compiles while it is timed", flush=True)
            pool.terminate()
    for name, process in running.items():
        try:
            text, _ = process.communicate(timeout=max(2.0, seconds - (time.monotonic() - started)))
        except subprocess.TimeoutExpired:
            process.kill()
            print(f"checks: {name} ran out of time", flush=True)
            continue
        print(
            "checks:",
            name,
            text.strip() if process.returncode == 0 else f"FAILED\n{text[-1500:]}",
            flush=True,
        )


def calls() -> None:
    """PyTorch's functions as a user calls them: MX operands, eager and compiled, and a linear layer under Inductor."""
    import torch
    import torch.nn.functional as F

    from octavo import operators, quantize
    from octavo.bench.agreement import TOLERANCE, relative_error
    from octavo.bench.mx_suite import FORMATS
    from octavo.matmul import reference as matmul_reference
    from octavo.operators.gemm import reference

    recipe, swizzle = F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4
    a, b = (quantize(torch.randn(n, 512, device="cuda"), FORMATS["mxfp8"]) for n in (96, 256))
    sa, sb = (reference.swizzle(x.scale.view(torch.uint8)).view(torch.float8_e8m0fnu) for x in (a, b))
    want = matmul_reference.scaled_mm(a, b, None, torch.bfloat16, False)

    def step(x: torch.Tensor) -> torch.Tensor:
        return F.scaled_mm(x, b.data.t(), sa, recipe, sb, recipe, swizzle, swizzle)

    operators.enable("gemm")
    for name, call in (("eager", step), ("compiled", torch.compile(step, fullgraph=True))):
        error = relative_error(call(a.data), want)
        print(name, f"{error:.2e}", flush=True)
        if error > TOLERANCE:
            raise SystemExit(f"F.scaled_mm, {name}, is wrong")
    _linear()
    print(*(f"{s.overload}: {s.taken} taken {s.refused}" for s in operators.status() if s.taken or s.refused))


def _linear() -> None:
    """Dense products as choices of Inductor: timed beside PyTorch's own, and alone."""
    import torch
    import torch.nn.functional as F

    from octavo import operators
    from octavo.bench.agreement import TOLERANCE, relative_error

    tuned = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "ATEN"}
    x, w = (torch.randn(n, 4096, device="cuda", dtype=torch.bfloat16) for n in (16, 4096))
    bias = torch.randn(4096, device="cuda", dtype=torch.bfloat16)
    for force, options in ((False, tuned), (True, None)):
        with operators.enabled("gemm", force=force):
            for tensors in ((x, w), (x, w, bias)):
                torch._dynamo.reset()
                got = torch.compile(F.linear, fullgraph=True, dynamic=False, options=options)(*tensors)
                error = relative_error(got, F.linear(*(t.double() for t in tensors)))
                print(
                    "compiled F.linear",
                    "alone" if force else "timed",
                    len(tensors),
                    f"{error:.2e}",
                    flush=True,
                )
                if error > TOLERANCE:
                    raise SystemExit("compiled F.linear is wrong")


# ---- plans ----------------------------------------------------------------------------------------------------


def _time(call: Any, sets: list[Any], want: Any) -> dict[str, Any]:
    import torch

    from octavo.bench.agreement import TOLERANCE, relative_error

    outs = [torch.empty(want.shape, dtype=torch.bfloat16, device="cuda") for _ in sets]
    try:
        call(*sets[0], outs[0])
        error = relative_error(outs[0], want)
        if not error <= TOLERANCE:
            return {"error": f"wrong by {error:.2e}"}
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for pair, out in zip(sets, outs):
                call(*pair, out)
        graph.replay()
        times = []
        for _ in range(9):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / len(sets))
        return {"ms": statistics.median(times)}
    except Exception as error:  # a plan that the compiler or the card refuses is a result, not an end
        return {"error": f"{type(error).__name__}: {str(error)[:200]}"}


def _sets(work: str, rows: int, n: int, k: int) -> list[Any]:
    from octavo.bench import timing

    first = operands(work, rows, n, k)
    count = timing.copies(timing.nbytes(first), most=48)
    return [first, *(operands(work, rows, n, k) for _ in range(count - 1))]


def _multiply(a: Any, b: Any, out: Any) -> Any:
    import torch

    return torch.mm(a, b.t(), out=out)


def time_plans(out: Path, seconds: float) -> None:
    """Every candidate on both weights, the committed one first; rows of an earlier process are not timed again."""
    import torch

    from octavo import hardware
    from octavo.bench import report

    deadline = time.monotonic() + seconds
    path, arch = out / "product-plans.json", hardware.architecture("cuda")
    content = json.loads(path.read_text()) if path.exists() else None
    if content is None or content["machine"]["architecture"] != arch:
        content = {
            "suite": "product-plans",
            "machine": report.machine(),
            "versions": report.versions(),
            "rows": [],
        }
    rows = content["rows"]
    done = {(row["work"], row["m"], row["n"]) for row in rows}
    for (work, m), (n, k) in itertools.product(shapes(), WEIGHTS):
        if (work, m, n) in done:
            continue
        if time.monotonic() > deadline:
            print("out of time: the other lines stay as committed", flush=True)
            break
        place = {"work": work, "m": m, "n": n, "k": k}
        sets = _sets(work, m, n, k)
        want = wanted(*sets[0])
        # What a process that ends here leaves behind, so that the next one goes on after it.
        lost = [*rows, {**place, "plan": None, "error": "the process ended"}]
        path.write_text(json.dumps({**content, "rows": lost}, indent=1))
        found = []
        for plan in candidates(work, m, arch):
            timed = _time(lambda a, b, o, plan=plan: _product(plan, a, b, o), sets, want)
            found.append({**place, "plan": asdict(plan), **timed})
            if "CUDA error" in timed.get("error", ""):
                break
        if work == "16-bit":
            found.append({**place, "plan": None, **_time(_multiply, sets, want)})
        rows += found
        best = min((row for row in found if "ms" in row), key=lambda row: row["ms"], default={})
        print(place, "committed", found[0].get("ms", found[0].get("error")), "best", best.get("ms"),
              json.dumps(best.get("plan")), flush=True)  # fmt: skip
        path.write_text(json.dumps(content, indent=1))
        choose(out)
        torch.cuda.synchronize()  # raises where a plan broke the device: another process goes on
        torch.cuda.empty_cache()


def choose(out: Path) -> Path:
    """Lines of the fastest plans from ``OUT/product-plans.json``, beside the committed ones; needs no GPU."""
    from octavo.operators.gemm import plan as plans

    content = json.loads((out / "product-plans.json").read_text())
    arch = content["machine"]["architecture"]
    timed: dict[tuple[str, int], dict[plans.Plan, list[float]]] = {}
    for row in content["rows"]:
        if row["plan"] is not None and "ms" in row:
            plan = plans.Plan(**{**row["plan"], "tile": tuple(row["plan"]["tile"])})
            timed.setdefault((row["work"], row["m"]), {}).setdefault(plan, []).append(row["ms"])
    table = {}
    for work in WORKS:
        lines = [_line(timed.get((work, m), {}), work, m, arch) for w, m in shapes() if w == work]
        table[work] = [plans.entry(plan) for plan in lines]
    path = out / "tables" / f"gemm-{arch}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table, indent=1))
    return path


def _line(timed: dict[Any, list[float]], work: str, rows: int, arch: str) -> Any:
    from octavo.operators.gemm import plan as plans

    committed = candidates(work, rows, arch)[0]
    means = {plan: math.prod(ms) ** (1 / len(ms)) for plan, ms in timed.items() if len(ms) == len(WEIGHTS)}
    best = min(means, key=lambda plan: means[plan], default=committed)
    # The committed plan stays where nothing beats it by more than the noise.
    if committed in means and means[committed] <= 1.01 * means[best]:
        best = committed
    return plans.Plan(**{**asdict(best), "up_to": LIMITS[rows]})


# ---- suites ---------------------------------------------------------------------------------------------------


def time_suites(out: Path, names: list[str], deadline: float) -> None:
    """Each suite until its share of the time is used; the process ends with one that broke the device."""
    import torch

    from octavo.bench import main as bench

    for position, name in enumerate(names):
        left, shares = deadline - time.time(), sum(SUITES[other] for other in names[position:])
        try:
            bench.run(
                name, out, compile=False, force=True, seconds=left * SUITES[name] / shares,
                command="python benchmarks/gemm_round.py OUT --suites", progress=lambda line: print(line, flush=True),
            )  # fmt: skip
        except RuntimeError as error:
            print("FAILED", name, error, flush=True)
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            print("the device is lost:", error, flush=True)
            os._exit(10 + position)


def compiled(out: Path) -> None:
    """The MX cases beside torch.compile's decoding and product, in a folder of their own."""
    from octavo.bench import main as bench

    bench.run(
        "mx",
        out / "compiled",
        only="mxfp",
        host=False,
        force=True,
        progress=lambda line: print(line, flush=True),
    )


def _limited(target: Any, arguments: tuple[Any, ...], seconds: float) -> int | None:
    from octavo.bench import limited

    code = limited.run(target, arguments, seconds)
    if code is None:
        print(f"out of time; {arguments[0]} holds what there is", flush=True)
    return code


def _plans_part(out: Path, seconds: float) -> None:
    end = time.monotonic() + seconds
    for _ in range(3):
        left = end - time.monotonic()
        if left < 12 or not _limited(time_plans, (out, left - 10), left):
            return
        print("a plan broke the device: the next process goes on after it", flush=True)


def _suites_part(out: Path, seconds: float) -> None:
    end, names = time.time() + seconds, list(SUITES)
    while names and end - time.time() > 10:
        code = _limited(time_suites, (out, names, end - 8), end - time.time())
        if code is None or code < 10:
            return
        names = names[code - 10 + 1 :]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    for part in (*PARTS, "compiled", "choose", "calls"):
        parser.add_argument(f"--{part}", action="store_true")
    parser.add_argument("--seconds", type=float, default=sum(PARTS.values()), help="of the parts that run")
    parser.add_argument("--workers", type=int, default=max(2, min(12, (os.cpu_count() or 4) - 4)))
    chosen = parser.parse_args()
    if chosen.calls:
        return calls()
    out = chosen.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if chosen.choose:
        return print(choose(out))
    os.environ["OCTAVO_TABLES"] = str(out / "tables")
    parts = [part for part in PARTS if getattr(chosen, part)] or ([] if chosen.compiled else list(PARTS))
    scale = chosen.seconds / max(1.0, sum(PARTS[part] for part in parts))
    end = time.monotonic()
    for part in parts:
        started, end = time.monotonic(), end + PARTS[part] * scale
        seconds = end - started
        if part == "checks":
            checks(seconds, chosen.workers)
        else:
            (_plans_part if part == "plans" else _suites_part)(out, seconds)
        print(f"== {part}: {time.monotonic() - started:.0f} s", flush=True)
    if chosen.compiled:
        compiled(out)
    return None


if __name__ == "__main__":
    main()
