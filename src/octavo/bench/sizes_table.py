"""From results files to the table of layers that are too small to gain (:mod:`octavo.training.sizes`).

A size [N, K] lost if Octavo took longer than BF16: the layer, forward and backward, in the suite ``linear`` with the
recipe's default accumulation, eager against eager; or the product alone, which quantization only adds to, in
``benchmarks/matmul_round.py`` with at least ``TOKENS`` rows. Kept are the largest losses below which nothing won.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

TOKENS = 4096
"""Fewest rows of a product that speaks for training."""

_LAYER = re.compile(r"bf16 \S+ \d+x(\d+)x(\d+)")
_PRODUCT = re.compile(r"(mxfp8|rowwise|tensorwise)\b")

Sizes = dict[str, dict[tuple[int, int], bool]]
"""Recipe to size [N, K] to whether 8 bits were slower."""


def measured(content: dict[str, Any]) -> Sizes:
    """What one results file says."""
    found: Sizes = {}
    if content["suite"] == "linear":
        for case in content["cases"]:
            match = _LAYER.fullmatch(case["case"])
            recipe, _, how = case["group"].partition(", ")
            if match and how == "default accumulation" and case["checked"]:
                size = int(match[1]), int(match[2])
                found.setdefault(recipe, {})[size] = case["ms"]["octavo"] > case["ms"]["aten"]
    elif content["suite"] == "matmul-round":
        for timing in content["round"]["timings"]:
            ms, shape = dict(timing["ms"]), timing["shape"]
            match, bf16 = _PRODUCT.match(timing["job"]), ms.pop("bf16", None)
            if (
                match
                and ms
                and bf16
                and len(shape) == 3
                and shape[0] >= TOKENS
                and "wide" not in timing["job"]
            ):
                found.setdefault(match[1], {})[shape[1], shape[2]] = min(ms.values()) > bf16
    return found


def largest_losses(sizes: dict[tuple[int, int], bool]) -> list[tuple[int, int]]:
    """Sizes that lost and have no win at or below them, without those that a larger one covers."""
    won = [size for size, slower in sizes.items() if not slower]
    lost = [s for s, slower in sizes.items() if slower and not any(_within(w, s) for w in won)]
    return sorted(s for s in lost if not any(t != s and _within(s, t) for t in lost))


def _within(size: tuple[int, int], of: tuple[int, int]) -> bool:
    return size[0] <= of[0] and size[1] <= of[1]


def table(paths: Iterable[Path]) -> dict[str, Any]:
    """A size table from results files of one architecture; a product's win is no win of a layer and is not counted.

    Raises:
        ValueError: if no file measured a layer or a product.
    """
    runs, found = [], {}
    for path in paths:
        content = json.loads(path.read_text())
        sizes = measured(content)
        if sizes:
            runs.append(f"{path.name} of {content['date']} on {content['machine']['gpu']}")
        for recipe, points in sizes.items():
            kept = {s: slower for s, slower in points.items() if slower or content["suite"] == "linear"}
            found.setdefault(recipe, {}).update(kept)
    if not runs:
        raise ValueError("no linear-*.json or matmul-round-*.json with sizes: run octavo bench linear first")
    slower = {recipe: largest_losses(points) for recipe, points in sorted(found.items())}
    return {
        "run": "; ".join(runs),
        "slower": {r: [list(s) for s in sizes] for r, sizes in slower.items() if sizes},
    }


def write(results: Path, folder: Path, arch: str) -> Path:
    """Write ``<folder>/<arch>.json`` from the results in ``results``; returns its path."""
    paths = sorted([*results.glob("linear-*.json"), *results.glob("matmul-round-*.json")])
    content = table(paths)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{arch}.json"
    rows = ",\n".join(f"  {json.dumps(r)}: {json.dumps(s)}" for r, s in content["slower"].items())
    path.write_text(f'{{\n "run": {json.dumps(content["run"])},\n "slower": {{\n{rows}\n }}\n}}\n')
    return path
