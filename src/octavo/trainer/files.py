"""Files that survive a crash: written beside their place, synced, then moved there."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REMEDIES = {
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
}


def remedy(error: OSError) -> str:
    """What helps against ``error`` in writing a file."""
    return REMEDIES.get(error.errno or 0, "make it writable")


class WriteError(Exception):
    """A file of the run could not be written. The message is one line: which one, why, and what to do.

    Args:
        path: the file, or the folder it was to go to.
        error: what the system said.
    """

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(f"cannot write {str(path)!r} ({error.strerror or error}): {remedy(error)}")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an ``OSError`` inside the block into a ``WriteError`` about ``path``."""
    try:
        yield
    except OSError as error:
        raise WriteError(path, error) from error


def sync_folder(folder: Path) -> None:
    """Makes the names in ``folder`` durable: a rename or a new file is lost in a power cut without it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, content: Any) -> None:
    """Writes ``content`` to ``path``, which then holds either the old or the new whole, after any crash."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    sync_folder(path.parent)


def copy(source: Path, target: Path) -> None:
    """Copies the content of ``source`` to ``target``, which then holds either the old or the new whole."""
    partial = target.with_name(target.name + ".partial")
    shutil.copyfile(source, partial)
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(partial, target)
    sync_folder(target.parent)


def finite(value: Any) -> Any:
    """``value`` with None for each number in it that JSON cannot hold."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not abs(value) < float("inf") else value
