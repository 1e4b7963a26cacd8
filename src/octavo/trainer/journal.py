"""A file with one JSON object for each step, continued on resume without a gap or a step twice."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo.trainer.files import finite, sync_folder, writing


class Journal:
    """JSON lines in ``path``, each one whole and flushed before the next step begins.

    Args:
        path: the file; folders on the way are made.
        keep: which objects already in the file stay, None for none; a line that a crash cut short goes.

    Raises:
        WriteError: the file cannot be written, here or in any method.
    """

    def __init__(self, path: Path, keep: Callable[[dict[str, Any]], bool] | None = None) -> None:
        self.path = path
        self.kept: list[dict[str, Any]] = []
        """What was in the file and stays."""
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                self._cut(keep)
            self._file = path.open("a", encoding="utf-8")

    def _cut(self, keep: Callable[[dict[str, Any]], bool] | None) -> None:
        self.kept = [record for record in read(self.path) if keep(record)] if keep else []
        partial = self.path.with_name(self.path.name + ".partial")
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in self.kept)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, self.path)
        sync_folder(self.path.parent)

    def write(self, record: dict[str, Any]) -> None:
        """Adds one object; NaN and inf become null."""
        with writing(self.path):
            self._file.write(json.dumps(finite(record), allow_nan=False) + "\n")
            self._file.flush()

    def sync(self) -> None:
        """Makes what was written durable."""
        with writing(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file."""
        with writing(self.path):
            self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read(path: Path) -> list[dict[str, Any]]:
    """The objects in ``path``, without lines that are none; nothing where there is no file.

    Raises:
        OSError: the file cannot be read.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return [record for record in map(_record, lines) if record is not None]


def _record(line: str) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
