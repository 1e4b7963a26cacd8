"""Results of serve-bench as JSON, Markdown and a picture."""

from __future__ import annotations

import datetime
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from octavo import hardware
from octavo.bench.serving.contenders import DECODED, OCTAVO, STOCK
from octavo.bench.serving.measure import Check, Timing

Row = dict[str, Any]


def as_data(
    model: str, command: str, device: torch.device, checks: dict[str, Check], timings: Sequence[Timing]
) -> dict[str, Any]:
    """Everything that the other two are made of.

    Args:
        checks: by format and contender, ``"mxfp8 octavo"``.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU"
    return {
        "suite": "serving",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "protocol": "static batches, greedy, interleaved contenders, medians; one round before is not counted",
        "model": model,
        "engine": "transformers",
        "machine": {"device": name},
        "versions": {key: value for key, value in hardware.versions().items() if value is not None},
        "checks": {
            key: {"logits_db": _finite(c.logits_db), "agreed": list(c.agreed), "passed": c.passed}
            for key, c in checks.items()
        },
        "cases": [_with_ratios(timing.as_data(), timings) for timing in timings],
    }


def _finite(value: float) -> float | None:
    return value if abs(value) != float("inf") else None


def _with_ratios(row: Row, timings: Sequence[Timing]) -> Row:
    """Adds how many times as many requests a second this is as stock and as the same weights decoded first."""
    others = [t.as_data() for t in timings if t.load.concurrency == row["concurrency"]]
    for other in others:
        same_weights = other["contender"] == DECODED and other["format"] == row["format"]
        if other["contender"] == STOCK or same_weights:
            key = "over_stock" if other["contender"] == STOCK else "over_decoded_first"
            row[key] = row["requests_per_s"] / other["requests_per_s"]
    return row


def markdown(data: dict[str, Any]) -> str:
    """A table of the cases and a line for each check."""
    lines = [
        f"## {data['model']} on {data['machine']['device']}",
        "",
        f"{data['date']}, `{data['command']}`; {data['protocol']}.",
        "",
        "| concurrency | format | contender | requests/s | tokens/s | first token | each token "
        "| over stock | over decoded first |",
        "|---" * 9 + "|",
    ]
    for row in data["cases"]:
        ratios = [f"{row[key]:.2f}" if key in row else "-" for key in ("over_stock", "over_decoded_first")]
        lines.append(
            f"| {row['concurrency']} | {row['format']} | {row['contender']} | {row['requests_per_s']:.3g} | "
            f"{row['output_tokens_per_s']:.4g} | {row['time_to_first_token_ms']:.4g} ms | "
            f"{row['time_per_output_token_ms']:.3g} ms | {' | '.join(ratios)} |"
        )
    lines += [
        "",
        "| checked | logits against the reference | equal tokens | |",
        "|---|---|---|---|",
    ]
    for key, found in data["checks"].items():
        db = "equal" if found["logits_db"] is None else f"{found['logits_db']:.1f} dB"
        agreed = ", ".join(map(str, found["agreed"]))
        lines.append(f"| {key} | {db} | {agreed} | {'passed' if found['passed'] else 'FAILED'} |")
    return "\n".join(lines) + "\n"


def write(data: dict[str, Any], folder: Path) -> list[Path]:
    """``serving-<model>.json``, ``.md`` and ``.png`` in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"serving-{data['model'].replace('/', '-')}"
    paths = [stem.with_name(stem.name + suffix) for suffix in (".json", ".md", ".png")]
    paths[0].write_text(json.dumps(data, indent=1) + "\n")
    paths[1].write_text(markdown(data))
    _plot(data, paths[2])
    return paths


def _plot(data: dict[str, Any], path: Path) -> None:
    """Three panels over concurrency: throughput, time to first token, time per output token."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = (
        ("output_tokens_per_s", "output tokens a second"),
        ("time_to_first_token_ms", "time to first token, ms"),
        ("time_per_output_token_ms", "time per output token, ms"),
    )
    lines: dict[tuple[str, str], list[Row]] = {}
    for row in data["cases"]:
        lines.setdefault((row["format"], row["contender"]), []).append(row)
    formats = list(dict.fromkeys(row["format"] for row in data["cases"]))
    styles = {STOCK: ":", OCTAVO: "-", DECODED: "--"}
    for axes, (key, label) in zip(figure.subplots(1, 3), panels, strict=True):
        for (form, contender), rows in lines.items():
            axes.plot(
                [row["concurrency"] for row in rows], [row[key] for row in rows], styles[contender], marker="o",
                color=f"C{formats.index(form)}", label=f"{form}, {contender}",
            )  # fmt: skip
        axes.set(xscale="log", yscale="log", xlabel="concurrency", title=label)
        ticks = sorted({row["concurrency"] for row in data["cases"]})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9)
    figure.suptitle(f"{data['model']}, {data['machine']['device']}", fontsize=10)
    figure.savefig(path, dpi=120)
