"""What a report says, as texts and series that HTML and Markdown lay out alike."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from octavo.trainer.progress import duration

NONE = "–"
HARMLESS = "None, in any layer of any run."
SHARE_COLOURS = "Green at 0.0001 % and below, red at 10 % and above, by factors of ten between."
TENSORS = ("input", "weight", "grad_output")


@dataclass(frozen=True)
class Column:
    """A column of the table of runs: its title, what it means, and how it shows a run."""

    title: str
    meaning: str
    show: Callable[[dict[str, Any]], str | None]


@dataclass(frozen=True)
class Job:
    """A call of ``octavo train`` behind a report: what it ran on and with."""

    name: str
    date: str
    command: str
    versions: dict[str, str]
    machine: dict[str, Any]
    config: dict[str, Any]


def _form(key: str, form: str, scale: float = 1.0, unit: str = "") -> Callable[[dict[str, Any]], str | None]:
    return lambda run: None if run[key] is None else format(run[key] * scale, form) + unit


def jobs(data: dict[str, Any]) -> list[Job]:
    """The jobs whose runs ``data`` holds: itself, or those that were merged into it."""
    if "jobs" in data:
        names = [field.name for field in dataclasses.fields(Job)]
        return [Job(**{name: job[name] for name in names}) for job in data["jobs"]]
    return [
        Job("", data["date"], data["command"], data["versions"], data["machine"], data["config"]),
    ]


def unit(data: dict[str, Any]) -> str:
    """What a model reads: bytes, or a tokenizer's tokens."""
    return "tokens" if data["config"].get("tokenizer") else "bytes"


def title(data: dict[str, Any]) -> str:
    """The model and its runs, or how many they are if a line does not hold them."""
    names = [run["name"] for run in data["runs"]]
    return f"{data['model']['name']}: {', '.join(names) if len(names) <= 5 else f'{len(names)} runs'}"


def baseline(data: dict[str, Any]) -> dict[str, Any] | None:
    """The run that others are compared with."""
    found = (run for run in data["runs"] if run["name"] == data["baseline"])
    return next(found, None)


def columns(data: dict[str, Any]) -> list[Column]:
    """The columns that have something to say of a run of ``data``, the first one aside, which names it."""
    base = baseline(data)
    rate = base and base["tokens_per_second"]

    def ratio(run: dict[str, Any]) -> str | None:
        speed = run["tokens_per_second"]
        return f"{speed / rate:.2f}×" if rate and speed else None

    name, mean = data["baseline"], data["final_loss_steps"]
    every = [
        Column(
            "Final loss",
            f"Mean training loss of the last {mean} steps, nats a token",
            _form("final_loss", ".4f"),
        ),
        Column(
            "Difference",
            f"Final loss against {name}",
            _form("final_loss_difference_percent", "+.3f", unit=" %"),
        ),
        Column("Held-out loss", "Loss on text it was not trained on", _form("validation_loss", ".4f")),
        Column(
            "Held-out difference",
            f"Held-out loss against {name}",
            _form("validation_loss_difference_percent", "+.3f", unit=" %"),
        ),
        Column("Perplexity", "exp of the held-out loss", _form("perplexity", ",.3f")),
        Column("Tokens/s", "At the median step", _form("tokens_per_second", ",.0f")),
        Column("Speed", f"Tokens/s against {name}", ratio),
        Column("Peak memory", _memory_meaning(data), lambda run: size(run["peak_memory_bytes"])),
        Column("FP8 share", "Of a step's FLOPs", _form("fp8_flops_share", ".1f", 100, " %")),
        Column("MFU", "Share of the card's peak at the median step", _form("mfu", ".1f", 100, " %")),
        Column("Wall time", "Of the whole run", lambda run: duration(run["wall_seconds"])),
    ]
    return [column for column in every if any(column.show(run) is not None for run in data["runs"])]


def _memory_meaning(data: dict[str, Any]) -> str:
    devices = {str(job.config.get("device", "cpu")).partition(":")[0] for job in jobs(data)}
    if devices == {"cuda"}:
        return "Most that tensors held on the GPU"
    return (
        "Most that the process held"
        if devices == {"cpu"}
        else "Most that tensors held on a GPU, or the process"
    )


def size(count: int | None) -> str | None:
    """``count`` bytes in GiB, or MiB below one."""
    if count is None:
        return None
    return f"{count / 2**30:,.2f} GiB" if count >= 2**30 else f"{count / 2**20:,.0f} MiB"


def failures(data: dict[str, Any]) -> list[tuple[str, str]]:
    """Name of each run that did not finish, and what became of it."""
    found = []
    for run in data["runs"]:
        step, reason = run["steps"], run["failure"]
        if run["status"] == "non-finite":
            where = f"; first seen in {reason}" if reason else ""
            text = f"stopped at step {step}: its loss or gradient was no finite number{where}. "
            text += f"The {step - 1} steps before it are shown."
        elif run["status"] == "interrupted":
            text = f"was interrupted after step {step}."
        elif run["status"] == "unwritable":
            text = f"stopped after step {step}: {reason}."
        else:
            continue
        found.append((run["name"], text))
    return found


def value_text(value: Any) -> str:
    """A setting as words: yes and no, lists with commas."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return NONE if value is None else str(value)


def _about_recipes(key: str) -> bool:
    return key in ("recipe", "compare")


def settings(data: dict[str, Any]) -> list[tuple[str, str]]:
    """The options that all jobs share."""
    configs = [job.config for job in jobs(data)]
    shared = {
        k: v for k, v in configs[0].items() if all(k in other and other[k] == v for other in configs[1:])
    }
    return [(key.replace("_", "-"), value_text(value)) for key, value in shared.items()]


def differing(data: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Options, machine and versions in which the jobs differ: names of the jobs, and rows of name and values."""
    every = jobs(data)
    flat = [
        {k.replace("_", "-"): v for k, v in job.config.items() if not _about_recipes(k)}
        | job.machine
        | job.versions
        for job in every
    ]
    keys = list(dict.fromkeys(key for values in flat for key in values))
    rows = [[key, *(value_text(values.get(key)) for values in flat)] for key in keys]
    return [job.name for job in every], [row for row in rows if len(set(row[1:])) > 1]


@dataclass(frozen=True)
class Measure:
    """A number of the heat maps: how it is shown, which of two values is the worse, and how bad it is."""

    key: str
    title: str
    meaning: str
    colours: str
    worst: Callable[[list[float]], float]
    text: Callable[[float], str]
    badness: Callable[[float], float]
    """0 for harmless to 1."""


def _clamp(value: float) -> float:
    return min(1.0, max(0.0, value))


def share_text(share: float) -> str:
    """A share of 0 to 1 in percent, short, with 0 for none at all and for nothing else."""
    percent = 100 * share
    if percent == 0:
        return "0"
    return "<0.001" if percent < 0.001 else f"{percent:.3f}" if percent < 0.1 else f"{percent:.1f}"


def _share_badness(share: float) -> float:
    """In equal steps a factor of ten, from a millionth to a tenth."""
    return _clamp((math.log10(share) + 6) / 5) if share > 0 else 0.0


MEASURES = (
    Measure(
        "sqnr_db",
        "Signal to quantization noise, dB",
        "The worst of a tensor's products and watched steps. An E4M3 tensor with good scales has about 28 to 32 "
        "dB, E5M2 about 6 less.",
        "Red at 15 dB and below, green at 35 and above.",
        min,
        lambda value: f"{value:.1f}",
        lambda value: _clamp((35 - value) / 20),
    ),
    Measure(
        "saturated",
        "Saturated, % of elements",
        "Clipped by more than half a step of the format; the most of a tensor's products and watched steps.",
        SHARE_COLOURS,
        max,
        share_text,
        _share_badness,
    ),
    Measure(
        "underflowed",
        "Underflowed, % of elements",
        "Elements that are not zero and became zero; the most of a tensor's products and watched steps.",
        SHARE_COLOURS,
        max,
        share_text,
        _share_badness,
    ),
)
"""Colours have a fixed meaning, so that two reports compare."""


@dataclass(frozen=True)
class Cell:
    """One tensor of one layer of one run."""

    text: str
    badness: float | None
    detail: str


@dataclass(frozen=True)
class Heat:
    """A measure of every layer: for each of ``runs`` its tensors side by side."""

    measure: Measure
    runs: list[str]
    rows: list[tuple[str, list[Cell]]]

    @property
    def harmless(self) -> bool:
        """Whether not one element of any tensor suffered, so that a sentence says it all."""
        return all(not cell.badness for _, cells in self.rows for cell in cells)


def watched_runs(data: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs of which operands were watched."""
    return [run for run in data["runs"] if run["operands"]["layers"]]


def heats(data: dict[str, Any]) -> list[Heat]:
    """A heat map for each measure; none where nothing was watched."""
    runs = watched_runs(data)
    layers = list(dict.fromkeys(layer for run in runs for layer in run["operands"]["layers"]))
    return [
        Heat(
            measure,
            [run["name"] for run in runs],
            [
                (layer, [_cell(run, layer, tensor, measure) for run in runs for tensor in TENSORS])
                for layer in layers
            ],
        )
        for measure in MEASURES
        if runs
    ]


def _cell(run: dict[str, Any], layer: str, tensor: str, measure: Measure) -> Cell:
    products = run["operands"]["layers"].get(layer, {})
    found: dict[str, float] = {}
    for product, operands in products.items():
        values = [value for value in operands.get(tensor, {}).get(measure.key, ()) if value is not None]
        if values:
            found[product] = measure.worst(values)
    if not found:
        return Cell(NONE, None, f"{layer}, {tensor}, {run['name']}: not quantized, or nothing lost")
    worst = measure.worst(list(found.values()))
    parts = ", ".join(f"{measure.text(value)} in {product}" for product, value in found.items())
    return Cell(measure.text(worst), measure.badness(worst), f"{layer}, {tensor}, {run['name']}: {parts}")


def worst_over_steps(run: dict[str, Any], tensor: str) -> Iterator[tuple[int, float]]:
    """Step and the worst layer's SQNR of ``tensor`` in dB, for each watched step that has one."""
    for i, step in enumerate(run["operands"]["steps"]):
        values = [
            operands[tensor]["sqnr_db"][i]
            for products in run["operands"]["layers"].values()
            for operands in products.values()
            if tensor in operands
        ]
        present = [value for value in values if value is not None]
        if present:
            yield step, min(present)
