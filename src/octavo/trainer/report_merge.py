"""Reports read back, checked, and made into one: runs of several jobs that saw the same text."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from octavo.errors import UserError
from octavo.trainer import operand_stats, report
from octavo.trainer import report_view as view

MERGED = "octavo report"
FILE = "report.json"

MUST_AGREE = ("seq_len", "batch_size", "seed", "init_from")
"""Options that decide which text a step sees and what the weights start from: with others, the difference of two
losses would say nothing about the recipes."""

Keys = dict[str, Any]
NUMBER = (int, float)
OPTIONAL_NUMBER = (int, float, type(None))
OPTIONAL_TEXT = (str, type(None))
TOP: Keys = {
    "date": str,
    "command": str,
    "model": dict,
    "data": dict,
    "config": dict,
    "final_loss_steps": int,
    "baseline": OPTIONAL_TEXT,
    "runs": list,
}
JOB: Keys = {"date": str, "command": str, "versions": dict, "machine": dict, "config": dict}
MACHINE: Keys = {"device": str, "cpus": (int, type(None)), "system": str}
MODEL: Keys = {"name": str, "parameters": int}
DATA: Keys = {"source": str, "files": int, "sha256": str, "train_tokens": int, "validation_tokens": int}
CONFIG: Keys = {"seq_len": int, "batch_size": int, "seed": int}
RUN: Keys = {
    "name": str,
    "recipe": str,
    "status": str,
    "failure": OPTIONAL_TEXT,
    "steps": int,
    "loss": list,
    "operands": dict,
    "wall_seconds": NUMBER,
} | dict.fromkeys(
    (
        "final_loss",
        "validation_loss",
        "perplexity",
        "final_loss_difference_percent",
        "validation_loss_difference_percent",
        "tokens_per_second",
        "mfu",
        "peak_memory_bytes",
        "fp8_flops_share",
    ),
    OPTIONAL_NUMBER,
)


def read(place: Path) -> dict[str, Any]:
    """The report in the folder or file ``place``.

    Raises:
        UserError: there is none, or it is of another kind or version, or damaged.
    """
    path = place / FILE if place.is_dir() else place
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        what = f"no {FILE} in the folder" if place.is_dir() else "no such folder or file"
        raise UserError(f"{str(place)!r}: {what}; give the folder that --out named in octavo train") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise UserError(f"cannot read {str(path)!r} ({reason}): give a {FILE} or its folder") from None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{str(path)!r} is no JSON ({error}): give a {FILE} of octavo train") from None
    if not isinstance(content, dict) or content.get("report") not in (report.KIND, MERGED):
        raise UserError(f"{str(path)!r} is no report of octavo train: give its {FILE} or the folder of it")
    if content.get("schema") != report.SCHEMA:
        raise UserError(
            f"{str(path)!r} has schema {content.get('schema')!r} and this version reads {report.SCHEMA}: "
            f"train again, or use the version of octavo that wrote it"
        )
    wrong = _wrong(content)
    if wrong:
        raise UserError(f"{str(path)!r} is damaged ({wrong}): write it again with octavo train")
    return content


def _wrong(content: dict[str, Any]) -> str:
    """What a page could not be made of in ``content``; nothing if all is there."""
    found = _mistyped(content, TOP, "")
    if found:
        return found
    found = _mistyped(content["model"], MODEL, "model.") or _mistyped(content["data"], DATA, "data.")
    present: Keys = {"steps": int} if "steps" in content["config"] else {}
    found = found or _mistyped(content["config"], CONFIG | present, "config.")
    jobs = [content] if content["report"] == report.KIND else content.get("jobs")
    if found or not isinstance(jobs, list) or not all(isinstance(job, dict) for job in jobs):
        return found or "jobs is no list of objects"
    for i, job in enumerate(jobs):
        found = _mistyped(job, JOB if jobs == [content] else JOB | {"name": str}, f"jobs[{i}].")
        found = found or _mistyped(job["machine"], MACHINE, f"jobs[{i}].machine.")
        if found:
            return found
    for i, run in enumerate(content["runs"]):
        found = _mistyped(run, RUN, f"runs[{i}].") if isinstance(run, dict) else f"runs[{i}] is no object"
        if not found and not all(isinstance(loss, OPTIONAL_NUMBER) for loss in run["loss"]):
            found = f"runs[{i}].loss holds what is no number"
        found = found or _wrong_operands(run["operands"], f"runs[{i}].operands")
        if found:
            return found
    names = Counter(run["name"] for run in content["runs"])
    return next((f"two runs are named {name!r}" for name, count in names.items() if count > 1), "")


def _mistyped(content: dict[str, Any], keys: Keys, place: str) -> str:
    for key, kinds in keys.items():
        if key not in content:
            return f"{place}{key} is missing"
        if not isinstance(content[key], kinds) or isinstance(content[key], bool):
            return f"{place}{key} is {type(content[key]).__name__}"
    return ""


def _wrong_operands(operands: dict[str, Any], place: str) -> str:
    steps, layers = operands.get("steps"), operands.get("layers")
    if not isinstance(steps, list) or not isinstance(layers, dict):
        return f"{place} has no steps or layers"
    try:
        for products in layers.values():
            for named in products.values():
                for series in named.values():
                    for measure in operand_stats.MEASURES:
                        values = series[measure]
                        if len(values) != len(steps) or not all(
                            isinstance(v, OPTIONAL_NUMBER) for v in values
                        ):
                            return f"{place} has a {measure} that does not fit its steps"
    except (AttributeError, KeyError, TypeError):
        return f"{place} does not have the series of every operand"
    return ""


def load(places: list[Path], baseline: str | None, command: str) -> dict[str, Any]:
    """The report of all runs in ``places``: as it was written if there is one, else merged.

    Args:
        places: folders of ``octavo train --out`` or ``octavo report --out``, or files in them.
        baseline: name of the run that others are compared with; None for that of the first report that has one,
            else its first finished run.
        command: what asks for it.

    Raises:
        UserError: as :func:`read`; the reports do not fit each other; no run has that name.
    """
    same = [place for place, count in Counter(p.resolve() for p in places).items() if count > 1]
    if same:
        raise UserError(f"{str(same[0])!r} is given more than once: name each run folder once")
    contents = [read(place) for place in places]
    if len(contents) == 1 and baseline is None:
        return contents[0]
    for place, content in zip(places[1:], contents[1:], strict=True):
        _check_agreement(places[0], contents[0], place, content)
    merged = _merged(places, contents, command)
    return _compared(merged, _baseline(contents, merged["runs"], baseline))


def _check_agreement(first_place: Path, first: dict[str, Any], place: Path, content: dict[str, Any]) -> None:
    pairs = {
        "the model": (first["model"]["name"], content["model"]["name"]),
        "its parameters": (first["model"]["parameters"], content["model"]["parameters"]),
        "the text (SHA-256)": (first["data"]["sha256"], content["data"]["sha256"]),
        "the unit": (view.unit(first), view.unit(content)),
        "the number of tokens to train on": (first["data"]["train_tokens"], content["data"]["train_tokens"]),
    }
    for option in MUST_AGREE:
        pairs[f"--{option.replace('_', '-')}"] = (first["config"].get(option), content["config"].get(option))
    for what, (a, b) in pairs.items():
        if a != b:
            raise UserError(
                f"{what} is {a} in {str(first_place)!r} and {b} in {str(place)!r}: losses compare only between "
                f"runs of one model on the same text in the same order; leave one of them out"
            )


def _merged(places: list[Path], contents: list[dict[str, Any]], command: str) -> dict[str, Any]:
    labels = _labels(places)
    recipes = Counter(run["name"] for content in contents for run in content["runs"])
    jobs: list[dict[str, Any]] = []
    runs: list[dict[str, Any]] = []
    for label, content in zip(labels, contents, strict=True):
        own = {"name": ""} | {key: content[key] for key in JOB} if content["report"] == report.KIND else {}
        inner = content.get("jobs", [own])
        jobs += [job | {"name": f"{label}/{job['name']}" if job["name"] else label} for job in inner]
        for run in content["runs"]:
            name = run["name"] if recipes[run["name"]] == 1 else f"{run['name']} ({label})"
            while any(name == other["name"] for other in runs):
                name += "'"
            runs.append(run | {"name": name})
    seen = Counter((job["date"], job["command"]) for job in jobs)
    for (date, command_of_job), count in seen.items():
        if count > 1:
            raise UserError(
                f"the job of {date} ({command_of_job}) is in two of the reports: leave one of them out"
            )
    shared = {
        key: value
        for key, value in contents[0]["config"].items()
        if all(key in c["config"] and c["config"][key] == value for c in contents)
    }
    return {
        "report": MERGED,
        "schema": report.SCHEMA,
        "date": max(content["date"] for content in contents),
        "command": command,
        "model": contents[0]["model"],
        "data": contents[0]["data"],
        "config": shared,
        "final_loss_steps": contents[0]["final_loss_steps"],
        "jobs": jobs,
        "runs": runs,
    }


def _labels(places: list[Path]) -> list[str]:
    """A name for each place: its folder's, or the path as given where two folders have the same."""
    folders = [(place if place.is_dir() else place.parent).resolve().name or str(place) for place in places]
    return [
        name if folders.count(name) == 1 else str(place) for name, place in zip(folders, places, strict=True)
    ]


def _baseline(
    contents: list[dict[str, Any]], runs: list[dict[str, Any]], wanted: str | None
) -> dict[str, Any] | None:
    if wanted is not None:
        found = next((run for run in runs if run["name"] == wanted), None)
        if found is None:
            names = ", ".join(run["name"] for run in runs)
            raise UserError(f"--baseline is {wanted!r} but the runs are {names}: give one of these names")
        return found
    named = [run["name"] == content["baseline"] for content in contents for run in content["runs"]]
    finished = [run for run in runs if run["status"] == "finished"]
    first = (run for run, is_baseline in zip(runs, named, strict=True) if is_baseline and run in finished)
    return next(first, finished[0] if finished else None)


def _compared(merged: dict[str, Any], base: dict[str, Any] | None) -> dict[str, Any]:
    """``merged`` with every run compared with ``base``, where both finished as many steps."""
    runs = []
    for run in merged["runs"]:
        fits = (
            base is not None
            and run is not base
            and {run["status"], base["status"]} == {"finished"}
            and run["steps"] == base["steps"]
        )
        changed = {"compared_with": base["name"] if base and fits else None}
        for loss in ("final_loss", "validation_loss"):
            against = base[loss] if base and fits else None
            changed[f"{loss}_difference_percent"] = report.difference_percent(run[loss], against)
        runs.append(run | changed)
    return merged | {"baseline": base["name"] if base else None, "runs": runs}
