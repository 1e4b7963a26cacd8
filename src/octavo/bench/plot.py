"""A picture of a results file: how many times as fast as PyTorch each contender is, a row of bars a case."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

MOST_CASES = 40
"""Cases in one picture; the Markdown beside it holds them all."""


def bars(content: dict[str, Any]) -> tuple[list[str], dict[str, list[float]]]:
    """(case names, speed over ``aten`` by contender; 0 where one did not run) of cases that have ``aten``."""
    cases = [case for case in content["cases"] if "aten" in case["ms"]][:MOST_CASES]
    found = {name for case in cases for name in case["ms"]} - {"aten"}
    names = sorted(found, key=lambda name: (not name.startswith("octavo"), name))
    ratios = {
        name: [case["ms"]["aten"] / case["ms"][name] if name in case["ms"] else 0.0 for case in cases]
        for name in names
    }
    return [f"{case['group']}: {case['case']}" for case in cases], ratios


def write(content: dict[str, Any], path: Path) -> Path | None:
    """Write the picture of a results file's content to ``path`` (PNG); None without matplotlib or without cases."""
    labels, ratios = bars(content)
    if not labels or importlib.util.find_spec("matplotlib") is None:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    thick = 0.8 / len(ratios)
    figure = Figure(figsize=(9, 1.5 + len(labels) * max(0.3, 0.14 * len(ratios))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for n, (name, values) in enumerate(ratios.items()):
        axes.barh([i + n * thick for i in range(len(labels))], values, height=thick, label=name)
    axes.set_yticks([i + 0.4 - thick / 2 for i in range(len(labels))], labels, fontsize=7)
    axes.invert_yaxis()
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("times as fast as PyTorch (aten)")
    axes.set_title(f"{content['suite']} on {content['machine']['gpu']}, {content['date'][:10]}", fontsize=9)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=120)
    return path
