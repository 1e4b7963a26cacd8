"""Committed budgets of registers, LDS and occupancy: `budgets/<target>.json`, per Triton release and case.

    {"3.9": {"quantize_rows [e4m3fn bf16]": {"registers": 40, "sgpr_spills": 0, "lds_bytes": 16, "occupancy": 8.0}}}

`registers` are vector registers a lane (VGPRs and AGPRs of the one file), rounded up to the granule of 8 in which
they are handed out; `sgpr_spills` are scalar registers kept in lanes of a vector register; `scratch_bytes` (sm_90
alone: on AMD there must be none) is local memory of a thread. `octavo check --all --write-budget` writes what it
finds; the diff is then the review. Kernels in FlyDSL have a file of their own, `<target>-flydsl.json`, by FlyDSL's
releases: it is written where FlyDSL is installed and judged there alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from octavo.check.compile import CompiledKernel
from octavo.check.expectations import Finding
from octavo.check.model import occupancy, registers

FOLDER = Path(__file__).parent / "budgets"

Budget = Mapping[str, float]
Budgets = dict[str, dict[str, dict[str, float]]]


def book(target: str, language: str) -> str:
    """The file, without `.json`, that holds the budgets of kernels in `language`."""
    return target if language == "triton" else f"{target}-{language}"


def read(target: str, folder: Path = FOLDER) -> Budgets:
    """Budgets of `target` by Triton release and case; empty if none is committed."""
    path = folder / f"{target}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def measure(kernel: CompiledKernel) -> dict[str, float]:
    """What a budget says of `kernel`."""
    spills = (
        {"scratch_bytes": kernel.scratch_bytes}
        if kernel.target == "sm_90"
        else {"sgpr_spills": kernel.sgpr_spills}
    )
    return {
        "registers": -(-registers(kernel) // 8) * 8,
        **spills,
        "lds_bytes": kernel.lds_bytes,
        "occupancy": occupancy(kernel),
    }


def judge(kernel: CompiledKernel, name: str, release: str, budgets: Budgets) -> list[Finding]:
    """Findings against the budget of case `name`; a compiler's release without any budget is a known limit."""
    if release not in budgets:
        known = ", ".join(budgets) or "no release"
        return [
            Finding(
                "budget", "limit", f"none for this compiler, {release} (there are budgets for {known})", "one"
            )
        ]
    budget = budgets[release].get(name)
    if budget is None:
        return [Finding("budget", "fail", "none for this case", "one: run octavo check --all --write-budget")]
    found = measure(kernel)
    return [_within(name, found[name], budget.get(name, 0)) for name in found]


def _within(name: str, found: float, allowed: float) -> Finding:
    # More waves are better, of all else less is.
    good, bound = (found >= allowed, "at least") if name == "occupancy" else (found <= allowed, "at most")
    return Finding(f"budget of {name}", "pass" if good else "fail", f"{found:g}", f"{bound} {allowed:g}")


def write(
    target: str, triton: str, found: Mapping[str, Budget], *, every: bool = False, folder: Path = FOLDER
) -> Path:
    """Put `found` (by case) into the budgets of `target`; with `every`, cases that are not in it are dropped."""
    budgets = read(target, folder)
    kept = {} if every else budgets.get(triton, {})
    budgets[triton] = {name: dict(b) for name, b in sorted({**kept, **found}.items())}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{target}.json"
    path.write_text(_text({release: budgets[release] for release in sorted(budgets)}))
    return path


def _text(budgets: Budgets) -> str:
    """JSON with one case a line, so that a change of one kernel is a change of its lines."""
    releases = []
    for release, cases in budgets.items():
        lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(b)}" for name, b in cases.items())
        releases.append(f"  {json.dumps(release)}: {{\n{lines}\n  }}")
    return "{\n" + ",\n".join(releases) + "\n}\n"
