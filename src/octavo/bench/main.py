"""Running suites: check every case first, then time its contenders together."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from octavo.bench import cases as suites
from octavo.bench import plot, report, timing
from octavo.bench.cases import Case
from octavo.bench.timing import Contender, Inputs

HOST_LIMIT_MS = 1.0
"""Host time is reported where the faster of octavo and aten takes less than this."""

ROUNDS = 9


def _usable(case: Case, inputs: Inputs, compile: bool) -> tuple[dict[str, Contender], dict[str, str]]:
    """Contenders that run on these inputs, and why the others do not."""
    contenders = {name: c for name, c in case.contenders.items() if compile or "compile" not in name}
    if compile:
        torch._dynamo.reset()
    if compile and case.compiled is not None:
        contenders["compile"] = Contender(torch.compile(case.compiled, dynamic=False))
    skipped = {}
    for name in list(contenders):
        if name in ("octavo", "aten"):
            continue
        try:
            contenders[name](*inputs)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            skipped[name] = str(error).strip().splitlines()[0][:200]
            del contenders[name]
    return contenders, skipped


def run_case(case: Case, compile: bool = True, host: bool = True) -> dict[str, Any]:
    """Check and time one case; its entry of a results file.

    Raises:
        AssertionError: if Octavo's result is wrong: a wrong kernel is not timed.
    """
    first = case.make()
    case.check(first, case.contenders["octavo"](*first))
    contenders, skipped = _usable(case, first, compile)
    taken = case.taken(first)
    if case.by_events:
        sets, ms = [first], timing.events_ms(contenders, [first])
    else:
        sets = [first] + [
            case.make() for _ in range(timing.copies(case.input_bytes or timing.nbytes(first)) - 1)
        ]
        ms = timing.replay_ms(contenders, sets, rounds=ROUNDS)
    result: dict[str, Any] = {
        "group": case.group,
        "case": case.case,
        "ms": ms,
        "bytes": case.bytes,
        "flops": case.flops,
        "checked": True,
        "taken": taken,
    }
    if case.by_events:
        result["protocol"] = timing.EVENTS.format(rounds=timing.EVENT_ROUNDS)
        result["peak_gb"] = timing.peak_gb(contenders, first)
    if host and min(ms.values()) < HOST_LIMIT_MS:
        both = {name: contenders[name] for name in ("octavo", "aten") if name in contenders}
        result["event_ms"] = timing.events_ms(both, sets)
        times = timing.host_times(both, first)
        result["wall_ms"] = {name: t.wall_ms for name, t in times.items()}
        result["host_us"] = {name: t.host_us for name, t in times.items()}
    if skipped:
        result["skipped"] = skipped
    if case.note:
        result["note"] = case.note
    return result


def _selected(suite: str, only: str, force: bool) -> list[Case]:
    return [case for case in suites.cases(suite, force) if only in case.group or only in case.case]


def _first_calls(suite: str, only: str, force: bool, part: int, parts: int) -> None:
    for case in _selected(suite, only, force)[part::parts]:
        # A case that fails here fails again when it is checked, and is reported then.
        with contextlib.suppress(Exception):
            case.contenders["octavo"](*case.make())
        torch.cuda.empty_cache()


def precompile(suite: str, jobs: int, only: str = "", force: bool = False) -> None:
    """Call every case once, spread over ``jobs`` processes, so that Triton's cache on disk holds their kernels."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        for future in [pool.submit(_first_calls, suite, only, force, i, jobs) for i in range(jobs)]:
            future.result()


def run(
    suite: str,
    out: Path | str = "benchmarks/results",
    *,
    only: str = "",
    compile: bool = True,
    compile_only: str = "",
    host: bool = True,
    force: bool = False,
    command: str | None = None,
    progress: Callable[[str], None] = lambda line: None,
    seconds: float = math.inf,
) -> Path:
    """Run a suite on the current GPU and write its results file.

    Args:
        suite: a name of ``octavo.bench.cases.SUITES``.
        out: the folder for ``<suite>-<card>.json`` and its summary ``.md`` and picture ``.png``.
        only: run the cases whose group or name contains this.
        compile: also time torch.compile, which takes seconds a case.
        compile_only: but only for cases whose name contains this.
        host: also measure event, wall and host time of short cases.
        force: take cases that no measurement says to take.
        command: how the run was started, for the file; made up from the arguments by default.
        progress: called with one line of text a case.
        seconds: start no case after so long.

    Returns:
        The path of the JSON file.

    Raises:
        ValueError: for an unknown suite, or if no case is left.
        RuntimeError: without a GPU.
        RuntimeError: at the end, if a case failed; a wrong result is not timed.
    """
    selected = _selected(suite, only, force)
    if not selected:
        raise ValueError(f"no case of suite {suite!r} contains {only!r}")
    if not torch.cuda.is_available():
        raise RuntimeError(f"suite {suite!r} is timed on a GPU and torch sees none")
    on = report.machine()
    words = [f"--only {only!r}"] * bool(only) + ["--force"] * force + ["--no-compile"] * (not compile)
    protocol = timing.GRAPH.format(rounds=ROUNDS)
    command = command or " ".join(["octavo bench", suite, *words])
    entries, failures = [], []
    path, started = None, time.monotonic()
    for case in selected:
        if time.monotonic() - started > seconds:
            progress(f"out of time: {len(entries)} of {len(selected)} cases were timed")
            break
        name = f"{case.group} {case.case}"
        try:
            entry = run_case(case, compile and compile_only in case.case, host)
        except Exception as error:
            failures.append(f"{name}: {type(error).__name__}: {error}")
            progress(f"FAILED {failures[-1]}")
            continue
        entries.append(entry)
        times = ", ".join(f"{name} {ms * 1e3:.1f}" for name, ms in entry["ms"].items())
        progress(f"{name}: {times} us{'' if entry['taken'] else ' (not taken)'}")
        torch.cuda.empty_cache()
        # Written as they come, so that a run cut short leaves what it has.
        content = report.results(suite, command, protocol, on, entries)
        path = report.write(content, Path(out))
        path.with_suffix(".md").write_text(report.summary(content))
    if path is not None:
        plot.write(report.results(suite, command, protocol, on, entries), path.with_suffix(".png"))
    if path is None and not failures:
        raise RuntimeError(f"no case of suite {suite!r} was timed: give it more than {seconds:.0f} s")
    if failures or path is None:
        raise RuntimeError(f"{len(failures)} of {len(selected)} cases failed, the first is {failures[0]}")
    return path
