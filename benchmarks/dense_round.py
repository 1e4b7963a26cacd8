"""FP8 dense training on one GPU: launch configurations checked and timed side by side, then the suites.

    PYTHONPATH=src python benchmarks/dense_round.py OUT [--tiles] [--products] [--quantize] [--linear] [--block]

All parts by default but ``--products``; each ends after its share of ``--seconds``. ``--tiles`` checks every candidate
of quantization and of the fused producers against the reference before it is timed, writes every row to
``OUT/dense-tiles.json`` and what won to ``OUT/tables``, which the suites of the same run then read. ``--products``
does the same for dense products. Kernels are compiled first, in processes that share Triton's cache.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from pathlib import Path

PARTS = {"tiles": 170.0, "products": 60.0, "quantize": 70.0, "linear": 90.0, "block": 110.0}
"""Seconds of each part; without ``products`` they total less than 8 minutes."""


def _warm(job: tuple[str, int, int]) -> str | None:
    """Compile a share of the candidates of one room by calling them on their own inputs."""
    room, part, parts = job
    import torch

    from octavo.bench import launch_tuning

    todo = [(space, c) for space in launch_tuning.spaces((room,)) for c in ({}, *space.candidates)]
    for space, candidate in todo[part::parts]:
        try:
            with space.override(candidate):
                for inputs in space.make():
                    space.call(*inputs)
            torch.cuda.synchronize()
        except Exception:  # fails again where it is timed, and is a row there
            continue
        torch.cuda.empty_cache()
    return None


def tiles(out: Path, rooms: tuple[str, ...], seconds: float, workers: int) -> None:
    """Compile, check and time every candidate of ``rooms``; files of the winners and of all rows."""
    from octavo.bench import launch_tuning, report

    started = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers) as pool:
        pending = pool.map_async(_warm, [(room, i, workers) for room in rooms for i in range(workers)])
        try:
            pending.get(timeout=seconds * 0.55)
        except multiprocessing.TimeoutError:
            print("compiling took its share of the time: the rest compiles while it is timed", flush=True)
            pool.terminate()
    print(f"compiled in {time.monotonic() - started:.0f} s", flush=True)
    left = seconds - (time.monotonic() - started)
    paths, rows = launch_tuning.tune(rooms, out / "tables", left, lambda line: print(line, flush=True))
    content = {
        "suite": "dense-tiles",
        "rooms": rooms,
        "machine": report.machine(),
        "versions": report.versions(),
    }
    name = "dense-products" if rooms == ("matmul",) else "dense-tiles"
    (out / f"{name}.json").write_text(json.dumps({**content, "rows": rows}, indent=1))
    print("wrote", *(str(path) for path in paths), flush=True)
    for row in rows:
        if "error" in row:
            print("REFUSED", row["case"], json.dumps(row["candidate"]), row["error"], flush=True)


def suite(name: str, out: Path, seconds: float, workers: int) -> None:
    """A suite of ``octavo bench`` in a process of its own, ended after ``seconds``; what it has is kept."""
    from octavo.bench import limited

    if limited.run(_suite, (name, str(out), workers), seconds) is None:
        print(f"out of time in suite {name}; {out} holds the cases so far", flush=True)


def _suite(name: str, out: str, workers: int) -> None:
    from octavo.bench import main

    if name == "quantize":
        main.precompile(name, workers)
    try:
        main.run(
            name, out, host=name == "linear", compile=name != "quantize",
            command=f"python benchmarks/dense_round.py OUT --{name}", progress=lambda line: print(line, flush=True),
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
    parser.add_argument("--seconds", type=float, default=450.0, help="of all parts that run")
    parser.add_argument("--workers", type=int, default=max(2, min(14, (os.cpu_count() or 4) - 2)))
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    chosen = [part for part in PARTS if getattr(arguments, part)] or [p for p in PARTS if p != "products"]
    # The suites, in processes of their own, read what the tiles of this run wrote.
    os.environ["OCTAVO_TABLES"] = str(out / "tables")
    scale = min(1.0, arguments.seconds / sum(PARTS[part] for part in chosen))
    for part in chosen:
        started, seconds = time.monotonic(), PARTS[part] * scale
        if part == "tiles":
            tiles(out, ("quantize", "fused"), seconds, arguments.workers)
        elif part == "products":
            tiles(out, ("matmul",), seconds, arguments.workers)
        else:
            suite(part, out, seconds, arguments.workers)
        print(f"== {part}: {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
