"""Running a program that cannot be edited with operators switched on."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from octavo.operators import registry


def switch_on(operators: Sequence[str] = (), force: bool = False) -> None:
    """Enable ``operators``; without any, those of ``$OCTAVO_OPERATORS``, or all if that is unset.

    Raises:
        ValueError: for an unknown operator.
    """
    if operators or registry.ENVIRONMENT not in os.environ:
        registry.enable(*operators, force=force)
    else:
        registry.enable_from_environment(force=force)


def run_script(
    path: str,
    arguments: Sequence[str] = (),
    operators: Sequence[str] = (),
    *,
    switch: bool = True,
) -> None:
    """Run a Python file as ``__main__`` with operators enabled.

    Args:
        path: the file.
        arguments: what the file sees as ``sys.argv[1:]``.
        operators: names to enable, as for ``switch_on``.
        switch: False if operators are switched on already.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: for an unknown operator.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"no script at {path!r}")
    if switch:
        switch_on(operators)
    old_argv, old_path = sys.argv, sys.path[0]
    sys.argv = [path, *arguments]
    sys.path[0] = str(Path(path).resolve().parent)
    try:
        runpy.run_path(path, run_name="__main__")
    finally:
        sys.argv, sys.path[0] = old_argv, old_path
