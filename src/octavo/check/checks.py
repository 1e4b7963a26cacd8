"""Compile the chosen cases and check each: instructions, spills, LDS, budget, and the model of the main loop."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from octavo import hardware
from octavo.check import budget, catalog, model, worker
from octavo.check.compile import TARGETS, CompiledKernel
from octavo.check.expectations import Finding, expect
from octavo.check.inspect import read_code
from octavo.check.report import CaseReport, CheckReport, Resources
from octavo.compile_cases import CompileCase
from octavo.hardware import FLYDSL_ARCHITECTURES

JOBS = 2
MAX_THREADS = 1024  # Of a program (workgroup, block), on all three targets.
NO_LIMITS = (sys.maxsize, 0)


def run(
    targets: Sequence[str] | str = TARGETS,
    kernel: str | None = None,
    all: bool = False,
    *,
    write_budget: bool = False,
    modules: Sequence[str] | None = None,
    budgets: Path = budget.FOLDER,
    jobs: int | None = None,
    done: Callable[[str], None] | None = None,
) -> CheckReport:
    """Compile kernels for `targets` without a GPU and check what came out.

    Args:
        targets: any of gfx942, gfx950 and sm_90.
        kernel: check this kernel alone, in every configuration.
        all: every configuration of every kernel; without it and without `kernel`, the first one of each kernel and
            kind.
        write_budget: make what is found the committed budget (in `budgets`) instead of checking against it.
        modules: take cases from these modules instead of the package's own.
        jobs: compiler processes; by default `JOBS`, or the CPUs of this process if fewer.
        done: called with the name of each case that had to be compiled.

    Raises:
        ValueError: for an unknown target or kernel, Triton missing, or `TRITON_INTERPRET=1`.
    """
    targets = (targets,) if isinstance(targets, str) else tuple(targets)
    release = _triton_release(targets)
    found = [entry for target in targets for entry in catalog.entries(target, modules)]
    chosen = catalog.choose(found, kernel, all)
    jobs = jobs or min(JOBS, len(os.sched_getaffinity(0)))
    outcomes = worker.compile_all(
        chosen, jobs, None if done is None else lambda e: done(f"{e.name} {e.target}")
    )
    compiled = [(e, o) for e, o in zip(chosen, outcomes, strict=True) if isinstance(o, CompiledKernel)]
    releases = {"triton": release, "flydsl": ".".join(map(str, hardware.flydsl_version()))}
    books = {(e.target, e.case.language): budget.book(e.target, e.case.language) for e in chosen}
    if write_budget:
        for (target, language), book in books.items():
            of_book = [(e, o) for e, o in compiled if (e.target, e.case.language) == (target, language)]
            measured = {e.name: budget.measure(o) for e, o in of_book}
            budget.write(book, releases[language], measured, every=all and kernel is None, folder=budgets)
    committed = {place: budget.read(book, budgets) for place, book in books.items()}
    reports = [
        check(e.case, e.target, o, releases[e.case.language], committed[e.target, e.case.language])
        for e, o in zip(chosen, outcomes, strict=True)
    ]
    absent = catalog.left_out() if modules is None and set(targets) & set(FLYDSL_ARCHITECTURES) else None
    return CheckReport(release, targets, tuple(reports), absent or "")


def check(
    case: CompileCase, target: str, outcome: CompiledKernel | str, release: str, budgets: budget.Budgets
) -> CaseReport:
    """Every finding on a case compiled by `release` of its language, or the one that it did not compile."""
    about = (case.kernel, case.configuration, case.room, case.kind, target)
    if isinstance(outcome, str):
        lines = [line.strip() for line in outcome.splitlines() if line.strip()]
        told = " ... ".join(dict.fromkeys((lines[0], lines[-1]))) if lines else "no message"
        return CaseReport(*about, (Finding("compile", "fail", told[:400], "that it compiles"),))
    code = read_code(outcome.asm, outcome.name)
    major, minor = (int(part) for part in release.split(".")[:2])
    findings = (
        # Known limits are those of Triton's older releases: a kernel in FlyDSL is held to all expectations.
        *expect(code, case.kind, target, (major, minor) if case.language == "triton" else NO_LIMITS),
        *resource_findings(outcome),
        *budget.judge(outcome, case.name, release, budgets),
    )
    used = Resources(**{name: getattr(outcome, name) for name in Resources.__dataclass_fields__})
    return CaseReport(*about, findings, used, model.model(outcome, code))


def resource_findings(kernel: CompiledKernel) -> list[Finding]:
    """No spills to memory, LDS within the compute unit's, and at least one program that fits it.

    Two things are budgeted instead of banned (`octavo.check.budget`): scalar registers, which spill to lanes of a
    vector register and never to memory, and local memory on sm_90, where configurations are chosen by time.
    """
    limit = model.shared_limit(kernel.target)
    waves = model.occupancy(kernel)
    threads = kernel.num_warps * model.WAVE[kernel.target]
    return [
        _finding("spills", kernel.vgpr_spills == 0, f"{kernel.vgpr_spills} vector registers", "none"),
        *([] if kernel.target == "sm_90" else [_no_scratch(kernel)]),
        _finding("program size", threads <= MAX_THREADS, f"{threads} threads", f"at most {MAX_THREADS}"),
        _finding("LDS", kernel.lds_bytes <= limit, f"{kernel.lds_bytes} bytes", f"at most {limit}"),
        _finding("occupancy", waves > 0, f"{waves:g} waves a SIMD", "room for one program"),
    ]


def _no_scratch(kernel: CompiledKernel) -> Finding:
    return _finding("scratch", kernel.scratch_bytes == 0, f"{kernel.scratch_bytes} bytes a lane", "0")


def _finding(check: str, good: bool, found: str, needed: str) -> Finding:
    return Finding(check, "pass" if good else "fail", found, needed)


def _triton_release(targets: Sequence[str]) -> str:
    unknown = [t for t in targets if t not in TARGETS]
    if unknown or not targets:
        raise ValueError(f"target {', '.join(unknown) or 'missing'}: use {', '.join(TARGETS)}")
    if not hardware.has_triton():
        raise ValueError("octavo check needs Triton: pip install 'octavo[amd-check]'")
    if hardware.interpreted():
        raise ValueError("TRITON_INTERPRET=1 turns kernels into Python, which cannot be compiled: unset it")
    import triton

    return ".".join(triton.__version__.split(".")[:2])
