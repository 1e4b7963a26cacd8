"""Launch configurations of the matrix products: one committed JSON file an architecture, nothing tuned at run time.

A file names the machine (``processors``: multiprocessors or compute units, ``dies`` with a cache each), says
what its entries rest on (``about``), and holds under ``products`` a list for each kind of product, ordered by
``up_to``, the largest number of rows that an entry is for (dense: M; rows by expert: the mean of a group; over
groups: M of the output). The last entry has none, so no token count can leave the table.

A file ``matmul-<architecture>.json`` in the overlay folder (``quantize.launch_tables.overlay_folder``) maps products
to lists of entries that stand in place of a product's last entry, for what ``octavo tune`` measured on the card.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from octavo.quantize.launch_tables import overlay_folder

TABLES = Path(__file__).parent / "tables"
STAND_IN = "sm_90"
"""The table read where an architecture has none: Triton's interpreter on the CPU."""


@dataclass(frozen=True)
class Config:
    """How one product is launched.

    Args:
        kind: where the scales go, a KIND of :mod:`.operand_kernels`, or ``decode_first``: decode MX operands to
            bfloat16 in memory and multiply them by PyTorch's own product.
        tile: (BLOCK_M, BLOCK_N, BLOCK_K).
        warps, stages: of Triton.
        up_to: most rows that the entry is for; None for any number.
        band: row tiles that are walked down before the next column tile.
        split: most parts that the contraction is split into when tiles alone do not fill the machine.
        tma: load tiles by tensor memory accelerator where strides and addresses allow it.
        promote: FP8 products that Hopper may add up in its own accumulator before they go to float32.
        options: further launch options of the backend (``waves_per_eu``, ``matrix_instr_nonkdim``).
    """

    kind: str
    tile: tuple[int, int, int] = (0, 0, 0)
    warps: int = 4
    stages: int = 3
    up_to: int | None = None
    band: int = 8
    split: int = 1
    tma: bool = False
    promote: int = 128
    options: Mapping[str, int] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Table:
    """The configurations of one architecture."""

    processors: int
    dies: int
    products: Mapping[str, tuple[Config, ...]] = field(hash=False)


_overrides: list[Mapping[str, tuple[Config, ...]]] = []


@functools.cache
def load(arch: str) -> Table:
    """The committed table of ``arch``, or the stand-in's.

    Raises:
        ValueError: if a list of entries is not ordered or does not end with one for any number of rows.
    """
    path = TABLES / f"{arch}.json"
    path = path if path.exists() else TABLES / f"{STAND_IN}.json"
    found = json.loads(path.read_text())
    overlay = overlay_folder() / f"matmul-{arch}.json"
    own = json.loads(overlay.read_text()) if overlay.exists() else {}
    merged = {
        name: [*entries[:-1], *own.get(name, entries[-1:])] for name, entries in found["products"].items()
    }
    products = {name: tuple(map(_config, entries)) for name, entries in merged.items()}
    for name, configs in products.items():
        limits = [c.up_to for c in configs]
        if not limits or limits[-1] is not None or None in limits[:-1]:
            raise ValueError(
                f"{path}: the last entry of {name!r}, and only it, must have no up_to; got {limits}"
            )
        if limits[:-1] != sorted(limits[:-1], key=lambda x: x or 0):
            raise ValueError(f"{path}: the entries of {name!r} must be ordered by up_to; got {limits}")
    return Table(found["processors"], found["dies"], products)


def entry(config: Config) -> dict[str, Any]:
    """What a table holds of a configuration."""
    defaults = Config(config.kind)
    named = {f.name: getattr(config, f.name) for f in fields(config)}
    found = {k: v for k, v in named.items() if k == "kind" or v != getattr(defaults, k)}
    return {**found, "tile": list(config.tile)}


def _config(entry: dict[str, Any]) -> Config:
    return Config(**{**entry, "tile": tuple(entry.get("tile", (0, 0, 0)))})


@contextlib.contextmanager
def override(products: Mapping[str, tuple[Config, ...]]) -> Iterator[None]:
    """Use these entries first inside the block: how configurations are tried and compared."""
    _overrides.append(products)
    try:
        yield
    finally:
        _overrides.pop()


def lookup(arch: str, rows: int, *names: str) -> Config:
    """The configuration for that many rows of the first of the products ``names`` that the table knows.

    Raises:
        ValueError: if it knows none of them.
    """
    for products in (*reversed(_overrides), load(arch).products):
        for name in names:
            for config in products.get(name, ()):
                if config.up_to is None or rows <= config.up_to:
                    return config
    raise ValueError(f"no launch configuration of {' or '.join(map(repr, names))} on {arch}")
