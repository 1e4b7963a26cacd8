"""Compile cases in processes of their own: a compiler that crashes ends its process and not the check.

`python -m octavo.check.worker` reads requests from standard input, one JSON line each, and answers each with one
line; text goes through the store. `compile_all` drives such processes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
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
    keys = [store.key(e.case, e.target) for e in found]
    outcomes: list[Outcome | None] = [store.read(k) for k in keys]
    waiting: SimpleQueue[int] = SimpleQueue()
    missing = [i for i, outcome in enumerate(outcomes) if outcome is None]
    for i in missing:
        waiting.put(i)

    def drive() -> None:
        process = _Process()
        try:
            while True:
                i = waiting.get_nowait()
                outcomes[i] = process.compile(found[i], keys[i])
                if done is not None:
                    done(found[i])
        except Empty:
            process.close()

    threads = [threading.Thread(target=drive) for _ in range(min(jobs, len(missing)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [
        o if o is not None else "it was never compiled: the thread that should have failed" for o in outcomes
    ]


class _Process:
    """One worker process, started at the first request and again after a crash."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._errors: Any = None

    def compile(self, entry: Entry, key: str) -> Outcome:
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
        message = json.loads(line)
        return (
            message or store.read(key) or f"the compiled text is not in {store.folder()}: is the disk full?"
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
    """Answer requests until standard input ends: an empty string, or the error of a case that does not compile."""
    # The compiler prints where it likes: keep the real standard output for answers alone.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        module, target, index = json.loads(line)
        try:
            store.compile_case(find(module, target, index), target)
            message = ""
        except (
            Exception
        ) as error:  # Whatever the compiler raises is the case's result and is reported as such.
            message = f"{type(error).__name__}: {error}"
        answers.write(json.dumps(message) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve()
