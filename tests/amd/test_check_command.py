"""`octavo check` as a whole: discovery, the store, worker processes, budgets, reports and exit codes."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

pytest.importorskip("triton")
import check_kernels as kernels
import typer
from rich.console import Console
from typer.testing import CliRunner

from octavo import check
from octavo.check import budget, catalog, checks, command, store

pytestmark = pytest.mark.amd
RELEASE = ".".join(importlib.import_module("triton").__version__.split(".")[:2])


@pytest.fixture(scope="module", autouse=True)
def _store(tmp_path_factory: pytest.TempPathFactory) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(store.FOLDER_VARIABLE, str(tmp_path_factory.mktemp("compiled")))
        patch.setattr(catalog, "kernel_modules", lambda: ["check_kernels"])
        patch.setattr(catalog, "RECORDED", "check_kernels")  # Whose kernels are there already: nothing more.
        yield


def test_a_run_writes_budgets_then_holds_them_and_compiles_nothing_twice(tmp_path: Path) -> None:
    compiled: list[str] = []
    first = check.run("gfx950", all=True, write_budget=True, budgets=tmp_path, done=compiled.append)
    assert first.ok
    assert len(compiled) == len(first.cases) == 5
    written = json.loads((tmp_path / "gfx950.json").read_text())
    assert list(written) == [RELEASE]
    assert written == budget.read("gfx950", tmp_path)

    again = check.run(["gfx950"], all=True, budgets=tmp_path, done=compiled.append)
    assert again.ok
    assert len(compiled) == 5
    assert [c.resources for c in again.cases] == [c.resources for c in first.cases]

    path = tmp_path / "gfx950.json"
    path.write_text(path.read_text().replace('"registers": 16,', '"registers": 8,'))
    over = check.run("gfx950", all=True, budgets=tmp_path)
    assert not over.ok
    (line,) = over.failures()
    assert line.startswith("quantize [fp8e4nv bf16] on gfx950: budget of registers: found 16")
    assert line.endswith("needed at most 8")


def test_writing_one_kernels_budget_keeps_the_others_and_writing_all_drops_what_is_gone(
    tmp_path: Path,
) -> None:
    case = {"registers": 8, "lds_bytes": 0, "occupancy": 8.0}
    budget.write("gfx950", "3.6", {"old [x]": case}, folder=tmp_path)
    budget.write("gfx950", "3.9", {"gone [x]": case}, folder=tmp_path)
    check.run("gfx950", kernel="quantize", all=True, write_budget=True, budgets=tmp_path)
    kept = budget.read("gfx950", tmp_path)
    assert "old [x]" in kept["3.6"]
    assert "quantize [fp8e4nv bf16]" in kept[RELEASE]
    budget.write("gfx950", "3.9", {"new [x]": case}, every=True, folder=tmp_path)
    assert list(budget.read("gfx950", tmp_path)["3.9"]) == ["new [x]"]


def test_without_all_the_first_of_each_kernel_and_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [kernels.product_case("gfx942", tile=(m, 32, 64)) for m in (64, 32)]
    cases.append(kernels.product_case("gfx942", "product bf16", tile=(64, 32, 64)))
    entries = [catalog.Entry(case, "gfx942", "check_kernels", i) for i, case in enumerate(cases)]
    assert [e.index for e in catalog.choose(entries, None, False)] == [0, 2]
    assert [e.index for e in catalog.choose(entries, None, True)] == [0, 1, 2]
    assert [e.index for e in catalog.choose(entries, "product", False)] == [0, 1, 2]
    with pytest.raises(ValueError, match="no kernel is called 'mm'; kernels with compile cases: product"):
        catalog.choose(entries, "mm", False)

    monkeypatch.setattr(kernels, "compile_cases", lambda target: cases[:1] * 2)
    with pytest.raises(ValueError, match="is yielded twice for gfx942"):
        catalog.entries("gfx942")


def test_a_crash_of_the_compiler_fails_its_cases_and_nothing_else(tmp_path: Path) -> None:
    modules = ["check_crash"]
    report = check.run("gfx942", modules=modules, budgets=tmp_path, all=True, jobs=1)
    stored = [c for c in report.cases if c.resources is not None]
    crashed = [line for line in report.failures() if "the compiler crashed (exit status -6)" in line]
    assert len(stored) + len(crashed) == 2
    assert crashed
    assert all("LLVM ERROR: cannot select" in line for line in crashed)


def test_an_error_of_the_compiler_is_a_failure_that_tells_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = check.run("gfx942", modules=["check_broken"], budgets=tmp_path)
    (line,) = report.failures()
    assert line.startswith("quantize [no operation has a string] on gfx942: compile: found")
    assert report.cases[0].resources is None
    assert "1 configurations failed" in report.summary


def test_the_store_is_keyed_by_source_settings_and_target() -> None:
    case = kernels.quantize_case("gfx950")
    other = kernels.quantize_case("gfx950", limit=440.0)
    keys = {store.key(case, "gfx950"), store.key(case, "gfx942"), store.key(other, "gfx950")}
    assert len(keys) == 3
    assert store.key(kernels.quantize_case("gfx950"), "gfx950") in keys
    assert "octavo.formats" in store._modules(
        "octavo.check.store"
    ) or "octavo.compile_cases" in store._modules("octavo.check.store")


def test_a_damaged_entry_of_the_store_counts_as_none() -> None:
    name = store.key(kernels.quantize_case("gfx950"), "gfx950")
    store.compile_case(kernels.quantize_case("gfx950"), "gfx950")
    assert store.read(name) is not None
    path = store.folder() / f"{name}.json.gz"
    path.write_bytes(path.read_bytes()[:100])
    assert store.read(name) is None
    assert store.compile_case(kernels.quantize_case("gfx950"), "gfx950").vgprs > 0
    assert store.read(name) is not None


@pytest.fixture
def octavo() -> typer.Typer:
    app = typer.Typer()
    app.command("check")(command.check)
    app.callback()(lambda: None)
    return app


def _call(app: typer.Typer, *arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["check", *arguments], standalone_mode=False)
    assert done.exception is None, done.exception
    return done.return_value, done.output


def test_the_command_prints_a_table_or_json_and_its_exit_code_says_the_result(
    octavo: typer.Typer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(checks.run.__kwdefaults__, "budgets", tmp_path)
    status, text = _call(octavo, "--target", "gfx950", "--kernel", "quantize", "--write-budget")
    assert status == 0
    assert "a bound, never a time" in " ".join(text.split())
    assert "1 kernel configurations" in text

    status, text = _call(octavo, "--target", "gfx950", "--kernel", "quantize", "--json")
    assert status == 0
    (case,) = json.loads(text)["cases"]
    assert case["ok"] is True
    assert case["kernel"] == "quantize"
    assert "pass" in {f["status"] for f in case["findings"]} <= {"pass", "limit"}
    assert case["main_loop"]["global_bytes"] == 64 * (8 + 4)

    path = tmp_path / "gfx950.json"
    path.write_text(path.read_text().replace('"occupancy": 8.0', '"occupancy": 9.0'))
    status, text = _call(octavo, "--target", "gfx950", "--kernel", "quantize")
    assert status == 1
    assert (
        "failed: quantize [fp8e4nv bf16] on gfx950: budget of occupancy: found 8; needed at least 9" in text
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--target", "gfx90a"), "gfx90a: use gfx942, gfx950, sm_90"),
        (("--kernel", "nothing"), "no kernel is called 'nothing'; kernels with compile cases: product"),
    ],
)
def test_bad_input_ends_with_status_2(octavo: typer.Typer, arguments: tuple[str, ...], told: str) -> None:
    status, text = _call(octavo, *arguments)
    assert status == 2
    assert told in text


def test_the_interpreter_cannot_be_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.hardware.interpreted", lambda: True)
    with pytest.raises(ValueError, match=r"TRITON_INTERPRET=1 turns kernels into Python.*unset it"):
        check.run("gfx942")


def test_a_report_of_nothing_is_not_ok() -> None:
    report = check.run("gfx942", modules=["octavo.check.budget"])
    assert not report.ok
    assert "nothing to check" in report.summary
    Console(quiet=True).print(report.table())
