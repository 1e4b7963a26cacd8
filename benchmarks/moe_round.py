"""Experts on one GPU: kernels compiled in many processes first, then the suites grouped, experts and moe-layer.

    PYTHONPATH=src python benchmarks/moe_round.py OUT [--tiles] [--grouped] [--experts] [--moe-layer]

All parts by default but ``--tiles``, under six minutes on an H200 with 16 cores; each ends after its share of
``--seconds``. What is needed most is timed first, results are written after each case, and what failed at its first
call stands in ``OUT/moe-first-calls.json`` with its traceback. ``--tiles`` times launch configurations of grouped
products and of quantization by groups, checked against the reference first: every row goes to
``OUT/moe-tiles.json``, what won to ``OUT/tables``, which the suites of the same and of a later run then read.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import time
import traceback
from pathlib import Path
from typing import Any

PARTS = {"tiles": 110.0, "grouped": 120.0, "experts": 100.0, "moe-layer": 65.0}
"""Seconds of each part."""
SUITES = ("grouped", "experts", "moe-layer")
FIRST_CALLS = 55.0
"""Seconds for compiling, before the parts."""
GRACE = 15.0
"""Seconds that the case in hand may take beyond its part."""
COMPILE_ONLY = {"moe-layer": "EP8"}
"""Part to what must be in a case's name for torch.compile to be timed, where a compilation takes many seconds."""
OURS = ("octavo", "octavo_triton", "octavo_torch", "torch_fp8", "aten")


def _small_cases(suite: str) -> list[Any]:
    """Cases of the suite on few rows; uneven groups need no kernel that even ones do not."""
    from octavo.bench import experts_suite, grouped_suite, moe_layer_suite

    modules = {"grouped": grouped_suite, "experts": experts_suite, "moe-layer": moe_layer_suite}
    return [case for case in modules[suite].small_cases() if "uniform" in case.case or "even" in case.case]


def _first_call(job: tuple[str, int]) -> list[dict[str, Any]]:
    """Call what is not under torch.compile of one case; a row for each call that failed."""
    import torch

    from octavo.bench import moe_layer_suite

    suite, number = job
    case, failed = _small_cases(suite)[number], []
    try:
        inputs = case.make()
        for name in OURS:
            if name in case.contenders:
                try:
                    case.contenders[name](*inputs)
                    torch.cuda.synchronize()
                except NotImplementedError:
                    continue  # a named kernel that does not serve these operands
                except Exception:
                    row = {"suite": suite, "group": case.group, "case": case.case, "contender": name}
                    failed.append({**row, "error": traceback.format_exc()[-2500:]})
    except Exception:
        failed.append({"suite": suite, "case": case.case, "error": traceback.format_exc()[-2500:]})
    moe_layer_suite._layer.cache_clear()
    torch.cuda.empty_cache()
    return failed


def first_calls(out: Path, parts: list[str], seconds: float, workers: int) -> None:
    """Compile every kernel of the parts into Triton's cache on disk; what fails is written down, not raised."""
    started, failed, done = time.monotonic(), [], 0
    jobs = [(part, number) for part in parts for number in range(len(_small_cases(part)))]
    pool = multiprocessing.get_context("spawn").Pool(workers)
    calls = pool.imap_unordered(_first_call, jobs)
    path = out / "moe-first-calls.json"
    try:
        for done in range(1, len(jobs) + 1):
            rows = calls.next(timeout=max(0.1, seconds - (time.monotonic() - started)))
            failed += rows
            for row in rows:
                print(
                    "FAILED",
                    row["case"],
                    row.get("contender"),
                    row["error"].strip().splitlines()[-1],
                    flush=True,
                )
            _write(path, {"done": done, "of": len(jobs), "failed": failed})
    except multiprocessing.TimeoutError:
        print(
            f"compiled {done} of {len(jobs)} cases in its time: the rest compiles while it is timed",
            flush=True,
        )
    # Not joined: a worker inside a driver call would be waited for.
    pool.terminate()
    print(f"== first calls: {time.monotonic() - started:.0f} s, {len(failed)} failed", flush=True)


def _compile_candidate(job: tuple[int, int]) -> None:
    """Compile one candidate of one space by calling it; what fails, fails again where it is timed."""
    import contextlib

    import torch

    from octavo.bench import grouped_tuning

    space = list(grouped_tuning.spaces())[job[0]]
    with contextlib.suppress(Exception), space.override(({}, *space.candidates)[job[1]]):
        for inputs in space.make():
            space.call(*inputs)
        torch.cuda.synchronize()
    torch.cuda.empty_cache()


def tiles(out: Path, seconds: float, workers: int) -> None:
    """Check and time every candidate, compiled side by side first; rows and winners are written space by space."""
    from octavo.bench import grouped_tuning, launch_tuning, report

    started, rows, won = time.monotonic(), [], []
    jobs = [
        (i, j) for i, space in enumerate(grouped_tuning.spaces()) for j in range(1 + len(space.candidates))
    ]
    pool = multiprocessing.get_context("spawn").Pool(min(workers, 10))
    try:
        pool.map_async(_compile_candidate, jobs, chunksize=1).get(timeout=seconds * 0.5)
    except multiprocessing.TimeoutError:
        print("compiling took its share of the time: the rest compiles while it is timed", flush=True)
    pool.terminate()
    print(f"compiled in {time.monotonic() - started:.0f} s", flush=True)
    head = {"suite": "moe-tiles", "machine": report.machine(), "versions": report.versions()}
    for space in grouped_tuning.spaces():
        if time.monotonic() - started > seconds:
            print(f"out of time before {space.name}", flush=True)
            break
        found = launch_tuning.time_space(space)
        rows += found
        winner = launch_tuning.best(found)
        _write(out / "moe-tiles.json", {**head, "rows": rows})
        if winner is not None:
            won.append(winner)
            launch_tuning.write(won, out / "tables")
        for row in found:
            print(space.name, json.dumps(row["candidate"]), row.get("ms", row.get("error")), flush=True)


def _in_a_process(out: Path, seconds: float, workers: int) -> None:
    from octavo.bench import limited

    code = limited.run(tiles, (out, seconds, workers), seconds + GRACE)
    if code is None:
        print(f"out of time in tiles; {out} holds the spaces so far", flush=True)
    print("== tiles: exit", code, flush=True)


def _write(path: Path, content: Any) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(content, indent=1))
    fresh.replace(path)


def suite(name: str, out: Path, seconds: float) -> None:
    """A suite in a process of its own that starts no case after ``seconds``; what it has is on disk."""
    from octavo.bench import limited

    started = time.monotonic()
    code = limited.run(_suite, (name, str(out), seconds), seconds + GRACE)
    if code is None:
        print(f"out of time in suite {name}; {out} holds the cases so far", flush=True)
    print(f"== {name}: {time.monotonic() - started:.0f} s, exit {code}", flush=True)


def _suite(name: str, out: str, seconds: float) -> None:
    from octavo.bench import main

    try:
        main.run(
            name, out, host=False, compile_only=COMPILE_ONLY.get(name, ""), seconds=seconds,
            command=f"python benchmarks/moe_round.py OUT --{name}", progress=lambda line: print(line, flush=True),
        )  # fmt: skip
    except RuntimeError as error:
        print("FAILED", error, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    for part in PARTS:
        parser.add_argument(f"--{part}", action="store_true")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="of all parts that run, compiling included"
    )
    parser.add_argument("--workers", type=int, default=max(2, min(14, (os.cpu_count() or 4) - 2)))
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    chosen = [part for part in PARTS if getattr(arguments, part.replace("-", "_"))] or list(SUITES)
    suites = [part for part in chosen if part in SUITES]
    first = FIRST_CALLS * (0.4 + 0.6 * len(suites) / len(SUITES)) if suites else 0.0
    scale = min(1.0, arguments.seconds / (first + sum(PARTS[part] for part in chosen)))
    # Read by every process of this run, and written by its tiles.
    os.environ["OCTAVO_TABLES"] = str(out / "tables")
    if "tiles" in chosen:
        _in_a_process(out, PARTS["tiles"] * scale, arguments.workers)
    if suites:
        first_calls(out, suites, first * scale, arguments.workers)
    for part in suites:
        suite(part, out, PARTS[part] * scale)


if __name__ == "__main__":
    main()
