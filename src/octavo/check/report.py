"""Results of `octavo check`: one `CaseReport` a case and target, and the `CheckReport` of a run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.check.expectations import Finding
from octavo.check.model import LoopModel

if TYPE_CHECKING:
    from rich.console import RenderableType

BOUND = "counts of one wave in one pass of the main loop, as issued: a bound, never a time"


@dataclass(frozen=True)
class Resources:
    """What the compiler states of a kernel: registers a lane, spills in registers, scratch and LDS in bytes."""

    vgprs: int
    agprs: int
    sgprs: int
    vgpr_spills: int
    sgpr_spills: int
    scratch_bytes: int
    lds_bytes: int
    code_bytes: int
    num_warps: int


@dataclass(frozen=True)
class CaseReport:
    """One kernel in one configuration for one target: every finding, what it uses, and the model of its main loop.

    `resources` and `main_loop` are None if it did not compile.
    """

    kernel: str
    configuration: str
    room: str
    kind: str
    target: str
    findings: tuple[Finding, ...]
    resources: Resources | None = None
    main_loop: LoopModel | None = None

    @property
    def name(self) -> str:
        return f"{self.kernel} [{self.configuration}]"

    @property
    def ok(self) -> bool:
        return not self.failures

    @property
    def failures(self) -> list[Finding]:
        return [f for f in self.findings if f.status == "fail"]

    @property
    def limits(self) -> list[Finding]:
        return [f for f in self.findings if f.status == "limit"]


@dataclass(frozen=True)
class CheckReport:
    """A run of `octavo check`. `ok` if at least one case was checked and none failed.

    `left_out` says in one line which kernels could not be looked at here, and why; "" if all were.
    """

    triton: str
    targets: tuple[str, ...]
    cases: tuple[CaseReport, ...]
    left_out: str = ""

    @property
    def ok(self) -> bool:
        return bool(self.cases) and all(case.ok for case in self.cases)

    @property
    def summary(self) -> str:
        failed = sum(not case.ok for case in self.cases)
        checks = sum(len(case.findings) for case in self.cases)
        limits = sum(len(case.limits) for case in self.cases)
        if not self.cases:
            return f"nothing to check: no module yields compile cases for {', '.join(self.targets)}"
        told = f", {limits} known compiler limits" if limits else ""
        return (
            f"{len(self.cases)} kernel configurations, {checks} checks, {failed} configurations failed{told} "
            f"(Triton {self.triton}, {', '.join(self.targets)})"
        )

    def failures(self) -> Iterator[str]:
        """A line for each failed check: kernel, configuration, target, what was found and what is needed."""
        for case in self.cases:
            for finding in case.failures:
                yield f"{case.name} on {case.target}: {finding}"

    def limits(self) -> Iterator[str]:
        """A line for each kind of known compiler limit that was met."""
        seen: dict[str, int] = {}
        for case in self.cases:
            for finding in case.limits:
                line = f"{case.target}, {finding.check}: {finding.found}"
                seen[line] = seen.get(line, 0) + 1
        for line, count in seen.items():
            yield f"{line} [{count} configurations]"

    def to_json(self) -> str:
        """The whole report as JSON, `bound` saying what its main-loop numbers are."""
        cases = []
        for case in self.cases:
            fields: dict[str, Any] = dataclasses.asdict(case)
            cases.append({**{k: fields[k] for k in ("kernel", "configuration", "room", "kind", "target")},
                          "ok": case.ok, **{k: fields[k] for k in ("findings", "resources", "main_loop")}})  # fmt: skip
        whole = {
            "triton": self.triton, "targets": list(self.targets), "ok": self.ok, "summary": self.summary,
            "left_out": self.left_out, "bound": BOUND, "cases": cases,
        }  # fmt: skip
        return json.dumps(whole, indent=1)

    def table(self) -> RenderableType:
        """A table for `rich`: one row a case and target."""
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE, caption=f"main loop: {BOUND}", caption_justify="left")
        table.add_column("kernel [configuration]", overflow="fold")
        table.add_column("target", no_wrap=True)
        columns = ("VGPR+AGPR", "LDS", "waves/SIMD", "matrix", "cycles", "LDS B", "global B", "FLOP/B")
        for heading in columns:
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("checks", no_wrap=True)
        for case in self.cases:
            table.add_row(*_row(case))
        return table


def _row(case: CaseReport) -> tuple[str, ...]:
    from rich.markup import escape

    verdict = "[green]ok[/]" if case.ok else f"[red]{len(case.failures)} failed[/]"
    verdict += f" ({len(case.limits)} known limits)" if case.ok and case.limits else ""
    used, loop = case.resources, case.main_loop
    if used is None or loop is None:
        return (escape(case.name), case.target, *("-",) * 8, verdict)
    cycles = "?" if loop.matrix_cycles is None else str(loop.matrix_cycles)
    return (
        escape(case.name),
        case.target,
        f"{used.vgprs}+{used.agprs}" if used.agprs else str(used.vgprs),
        str(used.lds_bytes),
        f"{loop.occupancy:g}",
        str(sum(loop.matrix_instructions.values())),
        cycles if loop.matrix_instructions else "-",
        str(loop.lds_bytes),
        str(loop.global_bytes),
        "-" if loop.flops_per_byte is None else f"{loop.flops_per_byte:g}",
        verdict,
    )
