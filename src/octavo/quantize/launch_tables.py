"""Launch configurations from committed tables: one JSON file an architecture, and nothing tuned at run time.

A table maps a kernel and a bucket to integers: ``{"tiles": {"both": {"block_m": 128, ...}}}``. Buckets name the
kind of work and the length of a row, never the number of tokens, so a new token count can neither leave its
bucket nor compile anything anew. A file ``quantize-<architecture>.json`` in the overlay folder
(:func:`overlay_folder`) replaces single entries, for cards that no committed table was measured on: ``octavo tune
--launch`` writes it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

Config = Mapping[str, int]
Table = Mapping[str, Mapping[str, Config]]

TABLES = Path(__file__).parent / "tables"
OVERLAY_VARIABLE = "OCTAVO_TABLES"
STAND_IN = "sm_90"
"""The table read where an architecture has none: Triton's interpreter on the CPU."""

_overrides: list[Table] = []


def overlay_folder() -> Path:
    """Where the owner's own launch tables are: ``$OCTAVO_TABLES``, or ``octavo/tables`` in the user's configuration."""
    named = os.environ.get(OVERLAY_VARIABLE)
    config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(named) if named else Path(config) / "octavo" / "tables"


@functools.cache
def load(arch: str) -> Table:
    """The table of ``arch``, with the local overlay's entries over the committed ones.

    Raises:
        ValueError: if a file holds something else than integers by kernel and bucket.
    """
    committed = TABLES / f"{arch}.json"
    table = _read(committed if committed.exists() else TABLES / f"{STAND_IN}.json")
    overlay = overlay_folder() / f"quantize-{arch}.json"
    return merge(table, _read(overlay)) if overlay.exists() else table


def _read(path: Path) -> Table:
    table = json.loads(path.read_text())
    for kernel, buckets in table.items():
        for bucket, config in buckets.items():
            if not all(isinstance(value, int) for value in config.values()):
                raise ValueError(f"{path}: {kernel}.{bucket} must map names to integers and is {config}")
    return table


def merge(table: Table, over: Table) -> Table:
    """``table`` with single configurations replaced by those of ``over``."""
    return {k: {**table.get(k, {}), **over.get(k, {})} for k in {**table, **over}}


@contextlib.contextmanager
def override(table: Table) -> Iterator[None]:
    """Use the entries of ``table`` first inside the block: how configurations are tried and compared."""
    _overrides.append(table)
    try:
        yield
    finally:
        _overrides.pop()


def lookup(arch: str, kernel: str, *buckets: str) -> Config:
    """The configuration of the first of ``buckets`` (most special first) that the table knows.

    Raises:
        ValueError: if it knows none of them.
    """
    for table in (*reversed(_overrides), load(arch)):
        known = table.get(kernel, {})
        for bucket in buckets:
            if bucket in known:
                return known[bucket]
    raise ValueError(f"no launch configuration of {kernel!r} for {' or '.join(buckets)} on {arch}")
