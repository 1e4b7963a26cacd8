"""Runs a function in several processes that form a gloo group, so that a hang is a failure and not a wait.

The processes are forked from a server that has imported PyTorch once (so a test costs no import) and that never
ran autograd or a thread pool (so forking is safe). They meet through a file, never through a port.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = 120
"""Seconds for everything a group does; a collective that waits for a rank gives up earlier."""
COLLECTIVE_TIMEOUT = datetime.timedelta(seconds=60)

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["ranks", "torch.distributed.fsdp", "torch.distributed.tensor", "octavo"])


def run(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT) -> list[Any]:
    """``function(*args)`` in ``world_size`` processes; what each returned, by rank.

    ``function`` and its results must be picklable. The process group exists when it is called.

    Raises:
        AssertionError: with every rank's traceback, if one raised, died or was still running after ``timeout`` s.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = _context.SimpleQueue()
        processes = [
            _context.Process(
                target=_rank, args=(rank, world_size, folder, results, function, args), daemon=True
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        return _collect(processes, results, time.monotonic() + timeout)


def _collect(processes: list[Any], results: Any, deadline: float) -> list[Any]:
    found: dict[int, tuple[bool, Any]] = {}
    try:
        while len(found) < len(processes):
            while not results.empty():
                rank, good, value = results.get()
                found[rank] = (good, value)
            missing = [r for r, p in enumerate(processes) if r not in found and not p.is_alive()]
            if missing and results.empty():
                codes = {r: processes[r].exitcode for r in missing}
                raise AssertionError(f"ranks died without a word (exit codes {codes}){_told(found)}")
            if time.monotonic() > deadline:
                late = [r for r in range(len(processes)) if r not in found]
                raise AssertionError(f"ranks {late} were still running at the timeout{_told(found)}")
            if any(not good for good, _ in found.values()):
                # The others wait for a collective that will not come; a moment for their own report.
                deadline = min(deadline, time.monotonic() + 3)
            time.sleep(0.02)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
    if any(not good for good, _ in found.values()):
        raise AssertionError(f"a rank failed{_told(found)}")
    return [found[rank][1] for rank in range(len(processes))]


def _told(found: dict[int, tuple[bool, Any]]) -> str:
    return "".join(
        f"\n--- rank {rank}:\n{value}" for rank, (good, value) in sorted(found.items()) if not good
    )


def _rank(
    rank: int, world_size: int, folder: str, results: Any, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), GLOO_SOCKET_IFNAME="lo"
    )
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{Path(folder) / 'rendezvous'}",
            rank=rank,
            world_size=world_size,
            timeout=COLLECTIVE_TIMEOUT,
        )
        value = function(*args)
        dist.barrier()
        results.put((rank, True, value))
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
        raise SystemExit(1) from None
    dist.destroy_process_group()
