"""Layers too small to gain: what ``convert`` leaves alone because 8 bits were measured slower at that size.

``size_tables/<architecture>.json`` names the runs that it rests on and, by recipe, the largest sizes [N, K] that lost:

    {"run": "linear-h200.json of 2026-12-01 on NVIDIA H200", "slower": {"mxfp8": [[4096, 4096]]}}

A layer no larger than such a size in both dimensions has less to gain and loses, too. An architecture without a table,
or a recipe that is not in it, leaves nothing alone: nothing is guessed. ``octavo tune --sizes`` makes the table.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import torch

from octavo import hardware

TABLES = Path(__file__).parent / "size_tables"


@functools.cache
def load(arch: str) -> dict[str, tuple[tuple[int, int], ...]]:
    """Sizes [N, K] that were slower, by recipe; empty for an architecture that was not measured.

    Raises:
        ValueError: if the file holds something else than pairs of positive integers.
    """
    path = TABLES / f"{arch}.json"
    if not path.exists():
        return {}
    found = json.loads(path.read_text())["slower"]
    for recipe, sizes in found.items():
        if not all(len(s) == 2 and all(isinstance(n, int) and n > 0 for n in s) for s in sizes):
            raise ValueError(f"{path}: {recipe} must list pairs [N, K] of positive integers and is {sizes}")
    return {recipe: tuple((n, k) for n, k in sizes) for recipe, sizes in found.items()}


def why_too_small(shape: tuple[int, ...], recipe: str, device: torch.device) -> str | None:
    """Why a layer [N, K] (or experts [..., N, K]) gains nothing by ``recipe`` on ``device``; None where it may.

    Only GPUs are measured: on the CPU, the meta device and elsewhere nothing is too small.
    """
    if device.type != "cuda":
        return None
    arch = hardware.architecture(device)
    n, k = shape[-2:]
    for most_n, most_k in load(arch).get(recipe, ()):
        if n <= most_n and k <= most_k:
            return f"{recipe} was measured slower at {most_n}x{most_k} on {arch} (min_size=0 converts it all the same)"
    return None
