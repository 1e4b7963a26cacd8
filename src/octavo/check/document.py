"""The table of kernels and targets in `docs/amd.md`, from the committed budgets and the kernels' own cases.

`python -m octavo.check.document docs/amd.md` writes it between its two markers; a test holds the two together.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from octavo.check import budget, catalog
from octavo.check.compile import TARGETS

BEGIN, END = "<!-- kernels: begin -->", "<!-- kernels: end -->"


def newest(targets: Sequence[str] = TARGETS, folder: Path = budget.FOLDER) -> str:
    """The newest Triton release that budgets are committed for, "" if none is."""
    releases = {release for target in targets for release in budget.read(target, folder)}
    return max(releases, key=lambda r: tuple(int(part) for part in r.split(".")), default="")


def table(
    targets: Sequence[str] = TARGETS, modules: Sequence[str] | None = None, folder: Path = budget.FOLDER
) -> str:
    """Markdown: a row for each kernel and kind, a cell for each target, with the worst of its configurations."""
    release = newest(targets, folder)
    cells: dict[tuple[str, str, str], dict[str, list[budget.Budget]]] = {}
    for target in targets:
        committed = budget.read(target, folder).get(release, {})
        for entry in catalog.entries(target, modules):
            # FlyDSL's kernels, which are listed where FlyDSL is installed alone, have a table in docs/flydsl.md.
            if entry.case.language != "triton":
                continue
            row = cells.setdefault((entry.case.room, entry.case.kernel, entry.case.kind), {})
            if entry.name in committed:
                row.setdefault(target, []).append(committed[entry.name])
    lines = [
        f"Compiled by Triton {release}. A cell holds the number of configurations and their worst case: vector "
        "registers a lane, bytes of LDS,",
        "waves a SIMD (warps a scheduler on sm_90).",
        "",
        f"| room | kernel | what it is | {' | '.join(targets)} |",
        f"| --- | --- | --- |{' --- |' * len(targets)}",
    ]
    for (room, kernel, kind), found in sorted(cells.items()):
        told = " | ".join(_cell(found.get(target, [])) for target in targets)
        lines.append(f"| {room} | `{kernel}` | {kind} | {told} |")
    return "\n".join(lines)


def _cell(budgets: Sequence[budget.Budget]) -> str:
    if not budgets:
        return "-"
    registers = max(b["registers"] for b in budgets)
    lds = max(b["lds_bytes"] for b in budgets)
    waves = min(b["occupancy"] for b in budgets)
    return f"{len(budgets)}: {registers:g} regs, {lds:g} B, {waves:g}"


def split(text: str) -> tuple[str, str, str]:
    """The document before the table, the table, and the document after it.

    Raises:
        ValueError: if a marker is missing.
    """
    before, begin, rest = text.partition(BEGIN)
    inside, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the document needs the lines {BEGIN} and {END} around its table")
    return before, inside.strip("\n"), after


def update(path: Path) -> None:
    """Write the table into the document at `path`."""
    before, _, after = split(path.read_text())
    path.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}")


if __name__ == "__main__":
    update(Path(sys.argv[1]))
