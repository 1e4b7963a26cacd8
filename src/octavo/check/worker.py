"""Compile cases in processes of their own: a compiler that crashes ends its process and not the check.

`python -m octavo.check.worker` reads requests from standard input, one JSON line each, and answers each with one
line; text goes through the store. `compile_all` drives such processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any

from octavo.check import store
from octavo.check.catalog import Entry, find
from octavo.check.compile import CompiledKernel

Outcome = CompiledKernel | str
"""The compiled kernel, or the compiler's message."""


def compile_all(
    found: Sequence[Entry], jobs: int, done: Callable[[Entry], None] | None = None
) -> list[Outcome]:
    """Compile `found` with `jobs` processes; outcomes in the same order. What the store has costs no process."""
    outcomes: list[Outcome | None] = [store.read(store.key(e.case, e.target)) for e in found]
    waiting: SimpleQueue[int] = SimpleQueue()
    missing = [i for i, outcome in enumerate(outcomes) if outcome is None]
    for i in missing:
        waiting.put(i)

    def drive() -> None:
        process = _Process()
        with contextlib.closing(process), contextlib.suppress(Empty):
            while True:
                i = waiting.get_nowait()
                outcomes[i] = process.compile(found[i])
                if done is not None:
                    done(found[i])

    drivers = min(jobs, len(missing))
    if drivers:
        with ThreadPoolExecutor(drivers) as pool:
            for future in [pool.submit(drive) for _ in range(drivers)]:
                future.result()
    return [outcome for outcome in outcomes if outcome is not None]


class _Process:
    """One worker process, started at the first request and again after a crash."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._errors: Any = None

    def compile(self, entry: Entry) -> Outcome:
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps([entry.module, entry.target, entry.index]) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            return self._crashed(process)
        # The worker names the entry: a source edited since this process read it is another one.
        name, message = json.loads(line)
        return (
            message or store.read(name) or f"the compiled text is not in {store.folder()}: is the disk full?"
        )

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
            self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed with the process)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "octavo.check.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=self._errors, text=True, env=environment,
            )  # fmt: skip
        return self._process

    def _crashed(self, process: subprocess.Popen[str]) -> str:
        status = process.wait()
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        self.close()
        told = next(
            (line for line in reversed(lines) if re.search("error|assert|fatal", line, re.IGNORECASE)), ""
        )
        return f"the compiler crashed (exit status {status}) {told[:300]}".strip()

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.close()
            self._process.stdout.close()
            self._process.wait()
            self._errors.close()
            self._process = None


def serve() -> None:
    """Answer requests until standard input ends: [name in the store, ""], or ["", error] of what does not compile."""
    # The compiler prints where it likes: keep the real standard output for answers alone.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        module, target, index = json.loads(line)
        try:
            case = find(module, target, index)
            store.compile_case(case, target)
            answer = store.key(case, target), ""
        # Whatever the compiler raises is the result of the case and is reported as such.
        except Exception as error:
            answer = "", f"{type(error).__name__}: {error}"
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve()
