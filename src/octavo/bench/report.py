"""Results files: what ``octavo bench`` writes, and their summary as Markdown.

The format is the one that reports, wins tables and checks of claims read: ``suite``, ``date``, ``command``,
``protocol``, ``machine``, ``versions`` and ``cases``, each case with ``group``, ``case``, ``ms`` by contender,
``bytes``, ``flops``, ``checked`` and ``taken``; where a launch's host cost can matter also ``event_ms``, ``wall_ms``
and ``host_us``.
"""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from octavo import hardware
from octavo.bench import peers, timing

Result = dict[str, Any]


def machine() -> Result:
    """Name and measured ceilings of the current GPU."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": properties.name,
        "architecture": hardware.architecture(torch.device("cuda")),
        "multiprocessors": properties.multi_processor_count,
        "copy_gb_s": round(timing.copy_gb_s()),
        "bf16_tflops": round(timing.bf16_tflops()),
    }


def versions() -> Result:
    """Versions of what was timed."""
    installed = {name: version for name, version in hardware.versions().items() if version is not None}
    return {**installed, "peers": peers.versions()}


def results(suite: str, command: str, protocol: str, on: Result, cases: list[Result]) -> Result:
    """A results file's content."""
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {
        "suite": suite,
        "date": date,
        "command": command,
        "protocol": protocol,
        "machine": on,
        "versions": versions(),
        "cases": cases,
    }


def card_name(gpu: str) -> str:
    """``"NVIDIA H200"`` as ``"h200"``, ``"AMD Instinct MI300X"`` as ``"mi300x"``."""
    words = re.sub(r"[^a-z0-9 ]", "", gpu.lower()).split()
    return next((word for word in words if re.search(r"\d", word)), "-".join(words) or "gpu")


def write(content: Result, folder: Path) -> Path:
    """Write ``<folder>/<suite>-<card>.json`` and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{content['suite']}-{card_name(content['machine']['gpu'])}.json"
    lines = ",\n  ".join(json.dumps(case) for case in content["cases"])
    head = json.dumps({key: value for key, value in content.items() if key != "cases"}, indent=1)
    # A run that is killed while it writes leaves the file as it was.
    fresh = path.with_suffix(".new")
    fresh.write_text(f'{head[:-2]},\n "cases": [\n  {lines}\n ]\n}}\n')
    fresh.replace(path)
    return path


def geomean(values: Iterable[float]) -> float:
    """Geometric mean; NaN of nothing."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def summary(content: Result) -> str:
    """Markdown: a row a case with the rate against the copy rate, and the geometric mean over ``aten`` by group."""
    copy = content["machine"]["copy_gb_s"]
    lines = [
        f"## {content['suite']} on {content['machine']['gpu']}",
        "",
        f"{content['protocol']}; copy {copy} GB/s.",
    ]
    groups: dict[str, list[Result]] = {}
    for case in content["cases"]:
        groups.setdefault(case["group"], []).append(case)
    for group, members in groups.items():
        names = sorted({name for case in members for name in case["ms"]}, key=lambda n: (n != "octavo", n))
        lines += [
            "",
            f"### {group}",
            "",
            "| case | taken | " + " | ".join(names) + " | of copy | over aten |",
        ]
        lines.append("|---" * (len(names) + 4) + "|")
        for case in members:
            ms = case["ms"]
            cells = [f"{ms[name] * 1e3:.1f} us" if name in ms else "-" for name in names]
            rate = case["bytes"] / ms["octavo"] / 1e6 / copy
            ratio = f"{ms['aten'] / ms['octavo']:.2f}" if "aten" in ms else "-"
            taken = "yes" if case["taken"] else "no"
            lines.append(f"| {case['case']} | {taken} | {' | '.join(cells)} | {rate:.0%} | {ratio} |")
        ratios = [case["ms"]["aten"] / case["ms"]["octavo"] for case in members if "aten" in case["ms"]]
        lines.append("")
        lines.append(f"Geometric mean over aten: {geomean(ratios):.2f}")
    return "\n".join(lines) + "\n"
