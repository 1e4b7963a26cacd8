"""The package's own kernels: all have cases and budgets, the document tells them, and they pass `octavo check`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
import octavo  # noqa: E402
from octavo import check  # noqa: E402
from octavo.check import budget, catalog, checks, document, worker  # noqa: E402
from octavo.check.compile import TARGETS  # noqa: E402
from octavo.hardware import interpreted  # noqa: E402

RELEASE = ".".join(triton.__version__.split(".")[:2])
DOCUMENT = Path(octavo.__file__).parents[2] / "docs" / "amd.md"

pytestmark = [pytest.mark.amd, pytest.mark.skipif(interpreted(), reason="the interpreter compiles nothing")]
budgeted = pytest.mark.skipif(
    RELEASE not in budget.read("gfx942"), reason=f"no budgets are committed for Triton {RELEASE}"
)


def _jit_functions() -> dict[str, set[str]]:
    """Names that each `@triton.jit` function of the package refers to."""
    found = {}
    for module in catalog.kernel_modules():
        path = Path(octavo.__file__).parent.joinpath(*module.split(".")[1:]).with_suffix(".py")
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any(
                "jit" in ast.unparse(d) for d in node.decorator_list
            ):
                found[node.name] = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} - {node.name}
    return found


def test_every_kernel_that_can_be_launched_has_a_compile_case() -> None:
    functions = _jit_functions()
    launched = set(functions) - set().union(*functions.values(), set())
    cases = {e.case.function.__name__ for target in TARGETS for e in catalog.entries(target)}
    assert launched
    assert launched - cases == set()


@budgeted
@pytest.mark.parametrize("target", TARGETS)
def test_every_case_has_a_budget_and_no_budget_is_stale(target: str) -> None:
    names = {e.name for e in catalog.entries(target) if e.case.language == "triton"}
    assert names == set(budget.read(target)[RELEASE])


@pytest.mark.skipif(
    document.newest() != RELEASE, reason="the document tells of the newest Triton with budgets"
)
def test_the_document_tells_of_every_kernel() -> None:
    _, told, _ = document.split(DOCUMENT.read_text())
    assert told == document.table(), "run: python -m octavo.check.document docs/amd.md"


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
def test_one_configuration_of_each_quantization_kernel_passes(target: str) -> None:
    quantize = [e for e in catalog.entries(target) if e.case.room == "quantize"]
    chosen = catalog.choose(quantize, None, every=False)
    assert {"quantize_rows", "quantize_tiles"} <= {e.case.kernel for e in chosen}
    outcomes = worker.compile_all(chosen, jobs=2)
    for entry, outcome in zip(chosen, outcomes, strict=True):
        report = checks.check(entry.case, target, outcome, RELEASE, budget.read(target))
        assert not report.failures, f"{report.name}: {report.failures}"


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", TARGETS)
def test_every_configuration_of_every_kernel_passes(target: str) -> None:
    report = check.run(target, all=True)
    assert report.ok, "\n".join(report.failures())
