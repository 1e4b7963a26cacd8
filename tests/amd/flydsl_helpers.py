"""Shared by the tests of FlyDSL kernels: compile a case for gfx950 and execute it on NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from octavo.check import catalog, checks, store
from octavo.check.flydsl_compile import why_no_compiler
from octavo.check.gcn import launch
from octavo.compile_cases import CompileCase

REASON = why_no_compiler()
needs_flydsl = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def run(case: CompileCase, grid: tuple[int, ...], arguments: Sequence[Any]) -> Any:
    """Compile and execute; races raise. Returns the executor's report."""
    kernel = store.compile_case(case, "gfx950")
    report = launch(kernel, grid, arguments)
    report.raise_for_races()
    return report


def findings(case: CompileCase) -> list[str]:
    """What `octavo check` finds wrong with a case, budgets aside."""
    kernel = store.compile_case(case, "gfx950")
    report = checks.check(case, "gfx950", kernel, "0.0", {})
    return [str(f) for f in report.failures]


def cases(module: str) -> list[CompileCase]:
    return [e.case for e in catalog.entries("gfx950", [f"octavo.flydsl.{module}"])]
