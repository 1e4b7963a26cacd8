"""The picture of a training job: every recipe's loss, and how far each is from the baseline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike

COLOURS = ("#d1495b", "#00798c", "#edae49", "#6a4c93", "#3a7d44", "#8d5524")
BASELINE_COLOUR = "#9aa5b1"
INK = "#22272e"
FAINT = "#68727d"


def running_mean(values: ArrayLike, width: int) -> np.ndarray:
    """Mean of each value and up to ``width - 1`` before it."""
    array = np.asarray(values, dtype=np.float64)
    sums = np.cumsum(np.insert(array, 0, 0.0))
    end = np.arange(1, len(array) + 1)
    begin = np.maximum(end - width, 0)
    return (sums[end] - sums[begin]) / (end - begin)


def _style(axes: Axes, ylabel: str) -> None:
    axes.set_ylabel(ylabel, fontsize=12, color=INK)
    axes.tick_params(labelsize=11, colors=INK)
    axes.grid(color="#e3e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#b8c0c8")


def _label(run: dict[str, Any]) -> str:
    loss = "" if run["final_loss"] is None else f"   final loss {run['final_loss']:.4f}"
    share = f", {run['fp8_flops_share']:.0%} of FLOPs in FP8" if run["fp8_flops_share"] else ""
    return f"{run['name']}{loss}{share}"


def _floats(losses: list[float | None]) -> np.ndarray:
    """Losses as numbers, NaN for the null of a file."""
    return np.array(losses, dtype=np.float64)


def _steps(config: dict[str, Any]) -> str:
    """How many steps there were, if all runs had as many."""
    return f"{config['steps']} steps" if "steps" in config else "steps"


def _dtype(config: dict[str, Any]) -> str:
    return f"; {config['dtype']} outside FP8 products" if "dtype" in config else ""


def _plot_losses(
    axes: Axes, runs: list[dict[str, Any]], baseline: str | None, colours: dict[str, str], unit: str
) -> None:
    for run in runs:
        # The baseline lies wide and pale beneath, since the curves that matter cover it.
        width = 5.0 if run["name"] == baseline else 1.6
        steps = range(1, len(run["loss"]) + 1)
        axes.plot(steps, _floats(run["loss"]), color=colours[run["name"]], linewidth=width, label=_label(run))
    axes.legend(fontsize=11, frameon=False, labelcolor=INK)
    _style(axes, f"training loss (nats per {unit})")


def _plot_differences(
    axes: Axes, runs: list[dict[str, Any]], base: dict[str, Any], colours: dict[str, str]
) -> None:
    width = max(1, len(base["loss"]) // 20)
    axes.axhline(0.0, color=BASELINE_COLOUR, linewidth=2.0)
    for run in runs:
        if run is base:
            continue
        common = min(len(run["loss"]), len(base["loss"]))
        reference = _floats(base["loss"][:common])
        percent = 100.0 * (_floats(run["loss"][:common]) - reference) / reference
        steps = range(1, common + 1)
        colour = colours[run["name"]]
        axes.plot(steps, percent, color=colour, linewidth=0.9, alpha=0.45 if width > 1 else 1.0)
        if width > 1:
            axes.plot(steps, running_mean(percent, width), color=colour, linewidth=2.0)
    _style(axes, f"difference\nto {base['name']} (%)")
    if width > 1:
        note = f"thin: each step, thick: mean of {width} steps"
        axes.set_title(note, loc="right", fontsize=10, color=FAINT)


def write_png(data: dict[str, Any], path: Path) -> None:
    """Draws the report ``data`` of ``octavo.trainer.report.as_data`` into the PNG file ``path``.

    Above, each run's loss; below, where there is a baseline and another run, the difference to it in percent.
    """
    runs, baseline, config, model = data["runs"], data["baseline"], data["config"], data["model"]
    others = [run["name"] for run in runs if run["name"] != baseline]
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(others)}
    if baseline:
        colours[baseline] = BASELINE_COLOUR
    base = next((run for run in runs if run["name"] == baseline and run["loss"]), None)

    figure = Figure(
        figsize=(10, 6.8 if base and others else 4.8), dpi=150, layout="constrained", facecolor="white"
    )
    if base and len(runs) > 1:
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[2.2, 1])
        _plot_differences(lower, runs, base, colours)
    else:
        upper = lower = figure.subplots()
    unit = "token" if config.get("tokenizer") else "byte"
    _plot_losses(upper, runs, baseline, colours, unit)
    lower.set_xlabel("step", fontsize=12, color=INK)
    lower.set_xlim(1, max(2, *(len(run["loss"]) for run in runs)) if runs else 2)
    lower.xaxis.set_major_locator(MaxNLocator(integer=True))
    title = f"{model['name']}, {model['parameters'] / 1e6:,.1f} M parameters"
    upper.set_title(title, loc="left", pad=30, fontsize=16, fontweight="bold", color=INK)
    upper.text(
        0.0,
        1.035,
        f"{_steps(config)} of {config['batch_size']} x {config['seq_len']} {unit}s from "
        f"{data['data']['source']}{_dtype(config)}",
        transform=upper.transAxes,
        fontsize=11,
        color=FAINT,
    )
    figure.savefig(path)
