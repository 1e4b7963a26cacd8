"""Plots of a report as shapes: paths in a box of 1000 x 1000 and the places of their ticks in percent.

The box is stretched to the width there is while labels stay text of the page, so that one plot can be read on a
phone and on a wide screen.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.ticker import MaxNLocator

from octavo.trainer import report_view as view
from octavo.trainer.plot import running_mean

BOX = 1000.0
MOST_POINTS = 500
"""A curve with more steps shows the mean of as many as it takes."""

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Tick:
    """A mark at ``place`` percent from the left or the top."""

    place: float
    text: str


@dataclass(frozen=True)
class Line:
    """A curve: ``style`` counts the runs, the baseline's is "base"; ``faint`` is one beneath a smoothed one."""

    name: str
    style: str
    path: str
    faint: bool = False


@dataclass(frozen=True)
class Chart:
    """Curves over steps."""

    title: str
    note: str
    lines: list[Line]
    x: list[Tick]
    y: list[Tick]
    zero: float | None = None
    """Where the value 0 lies, in percent from the top, if it means something."""


@dataclass(frozen=True)
class Bar:
    """One run's bar, ``share`` percent of the longest."""

    name: str
    style: str
    share: float
    text: str


@dataclass(frozen=True)
class Bars:
    """One number of each run."""

    title: str
    note: str
    bars: list[Bar]


def styles(data: dict[str, Any]) -> dict[str, str]:
    """For each run the style of its curves: "base", or a number."""
    others = [run["name"] for run in data["runs"] if run["name"] != data["baseline"]]
    return {name: str(i) for i, name in enumerate(others)} | {data["baseline"]: "base"}


def finite_losses(run: dict[str, Any]) -> list[float]:
    """The losses up to the first that is no number, which ends a run."""
    found: list[float] = []
    for loss in run["loss"]:
        if loss is None or not math.isfinite(loss):
            break
        found.append(loss)
    return found


def thinned(points: Points) -> Points:
    """At most ``MOST_POINTS`` points, each the mean of equally many neighbours."""
    width = math.ceil(len(points) / MOST_POINTS)
    groups = [points[i : i + width] for i in range(0, len(points), width)] if width > 1 else []
    means = [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]
    return means or points


def ticks(low: float, high: float, most: int) -> list[float]:
    """At most about ``most`` round numbers in the range."""
    found = MaxNLocator(nbins=most, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
    slack = 1e-9 * (high - low)
    return [float(value) for value in found if low - slack <= value <= high + slack]


def tick_texts(values: Sequence[float]) -> list[str]:
    """``values`` in as few digits as tell each from its neighbours exactly."""
    steps = [abs(b - a) for a, b in itertools.pairwise(values)]
    step = min(steps, default=abs(values[0]) if values else 0.0)
    plain = [0.0 if abs(value) < 1e-6 * step else value for value in values]
    texts: list[str] = []
    for digits in range(1, 18):
        texts = [f"{value:.{digits}g}" for value in plain]
        if all(abs(float(text) - value) <= 1e-6 * step for text, value in zip(texts, plain)):
            break
    return [f"{float(text):,.0f}" if "e+" in text and abs(float(text)) < 1e7 else text for text in texts]


def chart(
    title: str, note: str, curves: Sequence[tuple[str, str, Points, bool]], zero: bool = False
) -> Chart | None:
    """A chart of ``curves``, each a name, a style, its points and whether it is faint; None if all are empty."""
    shown = [(name, style, thinned(points), faint) for name, style, points, faint in curves if points]
    if not shown:
        return None
    xs, ys = ([p[i] for _, _, points, _ in shown for p in points] for i in (0, 1))
    ys += [0.0] if zero else []
    left, right = min(xs), max(xs)
    low, high = min(ys), max(ys)
    room = 0.06 * (high - low) or 0.05 * abs(high) or 0.5
    low, high = low - room, high + room
    left, right = (left - 0.5, right + 0.5) if left == right else (left, right)

    steps = [v for v in ticks(left, right, 6) if v == int(v)]
    values = ticks(low, high, 5)

    def place(value: float) -> float:
        return round(100 * (high - value) / (high - low), 2)

    def path(points: Points) -> str:
        if len(points) == 1:  # a dash, since a point alone has no line
            x, y = points[0]
            points = [(x - 0.01 * (right - left), y), (x + 0.01 * (right - left), y)]
        pairs = (
            f"{BOX * (x - left) / (right - left):.1f} {BOX * (high - y) / (high - low):.1f}"
            for x, y in points
        )
        return "M" + "L".join(pairs)

    return Chart(
        title,
        note,
        [Line(name, style, path(points), faint) for name, style, points, faint in shown],
        [Tick(round(100 * (v - left) / (right - left), 2), f"{v:,.0f}") for v in steps],
        [Tick(place(v), text) for v, text in zip(values, tick_texts(values))],
        place(0.0) if zero else None,
    )


def _smoothed(
    name: str, style: str, values: Sequence[float], width: int
) -> list[tuple[str, str, Points, bool]]:
    """A curve of ``values`` from step 1, with its running mean above if that is not the curve itself."""
    points = [(float(i), float(v)) for i, v in enumerate(values, 1)]
    if width <= 1 or not points:
        return [(name, style, points, False)]
    mean = [(float(i), float(v)) for i, v in enumerate(running_mean(values, width), 1)]
    return [(name, style, points, True), (name, style, mean, False)]


def loss_charts(data: dict[str, Any]) -> list[Chart]:
    """Training loss, and the difference to the baseline where there is one."""
    named, base = styles(data), view.baseline(data)
    losses = {run["name"]: finite_losses(run) for run in data["runs"]}
    width = max(1, max(map(len, losses.values()), default=0) // 20)
    means = f" Thin: each step; thick: mean of {width} steps." if width > 1 else ""
    # The baseline lies beneath, wide and pale, since the others cover it.
    order = sorted(losses, key=lambda name: named[name] != "base")
    curves = [c for name in order for c in _smoothed(name, named[name], losses[name], width)]
    made = [chart("Training loss", f"Nats a {view.unit(data)[:-1]}, by step.{means}", curves)]
    if base:
        reference, curves = losses[base["name"]], []
        for name in losses:
            if name != base["name"]:
                percent = [100 * (a - b) / b for a, b in zip(losses[name], reference) if b]
                curves += _smoothed(name, named[name], percent, width)
        made.append(
            chart(f"Difference to {base['name']}", f"Percent of its loss, by step.{means}", curves, zero=True)
        )
    return [found for found in made if found]


def sqnr_charts(data: dict[str, Any]) -> list[Chart]:
    """The worst layer's SQNR over the run, a chart for each tensor."""
    named = styles(data)
    made = [
        chart(
            tensor,
            "dB by step",
            [
                (
                    run["name"],
                    named[run["name"]],
                    [(float(s), v) for s, v in view.worst_over_steps(run, tensor)],
                    False,
                )
                for run in view.watched_runs(data)
            ],
        )
        for tensor in view.TENSORS
    ]
    return [found for found in made if found]


def bars(data: dict[str, Any]) -> list[Bars]:
    """Throughput and peak memory."""
    columns = {column.title: column for column in view.columns(data)}
    speed = columns.get("Speed")
    made = []
    for title, column, key in (
        ("Throughput", "Tokens/s", "tokens_per_second"),
        ("Peak memory", "Peak memory", "peak_memory_bytes"),
    ):
        runs = [run for run in data["runs"] if run[key]]
        longest = max((run[key] for run in runs), default=0)
        texts = {run["name"]: columns[column].show(run) or "" for run in runs}
        if key == "tokens_per_second":
            for run in runs:
                ratio = speed.show(run) if speed else None
                texts[run["name"]] += " tokens/s" + (f", {ratio}" if ratio else "")
        found = [
            Bar(
                run["name"], styles(data)[run["name"]], round(100 * run[key] / longest, 1), texts[run["name"]]
            )
            for run in runs
        ]
        if found:
            made.append(Bars(title, columns[column].meaning, found))
    return made
