"""Work that may hang in a driver, in a process that can be ended."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any


def run(target: Callable[..., Any], arguments: tuple[Any, ...], seconds: float) -> int | None:
    """Call ``target`` in a fresh process, which is killed after ``seconds``.

    Args:
        target: a function that the process can import by its name.
        arguments: what it is called with; they are pickled.
        seconds: how long it may take, its start included.

    Returns:
        The exit code of the process, or None if it had to be killed.
    """
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments)
    process.start()
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
        return None
    return process.exitcode
