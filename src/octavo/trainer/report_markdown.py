"""A report in Markdown: the tables and settings of the HTML page, and the picture of the losses."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from octavo.trainer import report_view as view

_SPECIAL = re.compile(r"([\\`*_\[\]|~#])")
_HTML = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}


def text(value: object) -> str:
    """``value`` on one line, so that nothing in it acts as Markdown, HTML or the border of a cell."""
    line = " ".join(str(value).split())
    return _SPECIAL.sub(r"\\\1", "".join(_HTML.get(character, character) for character in line))


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table whose first column is text and whose others are numbers; cells are escaped."""
    lines = [headers, *rows]
    marks = ["---", *["---:"] * (len(headers) - 1)]
    made = [f"| {' | '.join(map(text, line))} |" for line in lines]
    return [made[0], f"| {' | '.join(marks)} |", *made[1:], ""]


def fenced(code: str) -> list[str]:
    """``code`` between fences longer than any in it."""
    longest = max(map(len, re.findall(r"`+", code)), default=0)
    fence = "`" * max(3, longest + 1)
    return [fence, code, fence, ""]


def _result(data: dict[str, Any]) -> list[str]:
    columns = view.columns(data)
    failed = dict(view.failures(data))
    rows = []
    for run in data["runs"]:
        stopped = f" ({run['status']} at step {run['steps']})" if run["name"] in failed else ""
        rows.append([run["name"] + stopped, *(column.show(run) or view.NONE for column in columns)])
    meanings = [f"- {text(column.title)}: {text(column.meaning)}" for column in columns]
    return ["## Result", "", *table(["Recipe", *(c.title for c in columns)], rows), *meanings, ""]


def _heats(data: dict[str, Any]) -> list[str]:
    found = view.heats(data)
    lines = ["## Quantization, layer by layer", ""] if found else []
    for heat in found:
        headers = ["Layer", *(f"{run}: {tensor}" for run in heat.runs for tensor in view.TENSORS)]
        rows = [[layer, *(cell.text for cell in cells)] for layer, cells in heat.rows]
        shown = [view.HARMLESS, ""] if heat.harmless else table(headers, rows)
        lines += [f"### {text(heat.measure.title)}", "", text(heat.measure.meaning), "", *shown]
    return lines


def _made(data: dict[str, Any]) -> list[str]:
    lines = ["## How it was made", "", *(f"- {text(k)}: {text(v)}" for k, v in view.settings(data)), ""]
    names, rows = view.differing(data)
    if rows:
        lines += ["### Where the jobs differ", "", *table(["", *names], rows)]
    source, unit = data["data"], view.unit(data)
    lines += [
        f"Text: {text(source['source'])}, {source['files']:,} files; {source['train_tokens']:,} {unit} to train "
        f"on, {source['validation_tokens']:,} held out; SHA-256 {text(source['sha256'])}",
        "",
    ]
    for job in view.jobs(data):
        versions = ", ".join(f"{name} {version}" for name, version in job.versions.items())
        machine = job.machine
        lines += [
            f"### {text(job.name or 'Machine and command')}",
            "",
            f"{text(machine['device'])}, {machine['cpus']} CPUs, {text(machine['system'])}; {text(versions)}; "
            f"{text(job.date)}",
            "",
            *fenced(job.command),
        ]
    return lines


def render(data: dict[str, Any], picture: str | None = "loss.png") -> str:
    """The Markdown of the report ``data``; the same data give the same text.

    Args:
        picture: where the picture of the losses lies, from the file's folder; None for none.
    """
    config, model = data["config"], data["model"]
    steps = f"{config['steps']:,} steps" if "steps" in config else "steps"
    lines = [
        f"# {text(view.title(data))}",
        "",
        f"{model['parameters']:,} parameters, {steps} of {config['batch_size']} × {config['seq_len']} "
        f"{view.unit(data)}. {text(data['date'])}",
        "",
    ]
    for name, failure in view.failures(data):
        lines += [f"**{text(name)}** {text(failure)}", ""]
    lines += _result(data)
    if picture:
        lines += ["## Loss", "", f"![Training loss by step, and its difference]({picture})", ""]
    return "\n".join([*lines, *_heats(data), *_made(data)]).rstrip() + "\n"
