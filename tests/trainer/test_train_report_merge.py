"""Reports of several jobs made into one, and what is refused with one line."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_support import Content, run_of

from octavo import cli
from octavo.errors import UserError
from octavo.trainer import report_files, report_html, report_markdown, report_merge
from octavo.trainer import report_view as view
from octavo.trainer.records import Run

Save = Callable[[dict[str, Any], str], Path]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Writes a report into a folder of that name."""

    def write(content: dict[str, Any], name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "report.json").write_text(json.dumps(content))
        return folder

    return write


@pytest.fixture
def two(content: Content, save: Save) -> tuple[Path, Path]:
    """The folders of bf16 with rowwise, and of rowwise with mxfp8 at another learning rate."""
    first = content(run_of("bf16", [4.0, 2.0]), run_of("rowwise", [4.0, 2.02]), baseline="bf16")
    second = content(run_of("rowwise", [4.0, 2.04]), run_of("mxfp8", [4.0, 1.98]), lr=0.5, command="second")
    return save(first, "a"), save(second, "b")


def octavo(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    texts = [str(argument) for argument in arguments]
    monkeypatch.setattr(sys, "argv", ["octavo", *texts])
    with pytest.raises(SystemExit) as end:
        cli.main(texts)
    return int(end.value.code or 0)


def test_runs_of_several_jobs_are_compared_with_one_baseline(two: tuple[Path, Path]) -> None:
    data = report_merge.load([*two], None, "octavo report a b")
    assert [run["name"] for run in data["runs"]] == ["bf16", "rowwise (a)", "rowwise (b)", "mxfp8"]
    assert data["baseline"] == "bf16"
    found = [run["final_loss_difference_percent"] for run in data["runs"]]
    assert found == [None, *(pytest.approx(100 * d / 3) for d in (0.01, 0.02, -0.01))]
    assert [job.name for job in view.jobs(data)] == ["a", "b"]
    assert [job.command for job in view.jobs(data)] == ["octavo train", "second"]
    names, rows = view.differing(data)
    assert (names, rows) == (["a", "b"], [["lr", "0.001", "0.5"], ["monitor-every", "5", "0"]])
    assert "lr" not in dict(view.settings(data))
    assert dict(view.settings(data))["seq-len"] == "32"
    page, text = report_html.render(data), report_markdown.render(data)
    for shown in (page, text):
        assert "Where the jobs differ" in shown
        assert "mxfp8" in shown
        assert "octavo train" in shown


def test_another_baseline_can_be_asked_for(two: tuple[Path, Path]) -> None:
    data = report_merge.load([*two], "mxfp8", "")
    assert data["runs"][0]["final_loss_difference_percent"] == pytest.approx(100 * 0.01 / 2.99)
    assert data["runs"][3]["compared_with"] is None
    assert report_merge.load([two[0]], "rowwise", "")["baseline"] == "rowwise"


def test_one_report_stays_as_it_was_written(two: tuple[Path, Path]) -> None:
    assert report_merge.load([two[0]], None, "new") == json.loads((two[0] / "report.json").read_text())
    assert report_merge.load([two[0] / "report.json"], None, "new")["command"] == "octavo train"


def test_a_merged_report_merges_again(two: tuple[Path, Path], save: Save, content: Content) -> None:
    merged = save(report_merge.load([*two], None, "merge"), "merged")
    third = save(content(run_of("tensorwise", [4.0, 3.0]), command="third"), "c")
    data = report_merge.load([merged, third], None, "")
    assert [job.name for job in view.jobs(data)] == ["merged/a", "merged/b", "c"]
    assert len(data["runs"]) == 5
    with pytest.raises(UserError, match=r"is in two of the reports: leave one of them out"):
        report_merge.load([merged, two[0]], None, "")


def test_runs_of_unequal_length_or_that_failed_are_not_compared(content: Content, save: Save) -> None:
    base = save(content(run_of("bf16", [4.0, 2.0]), baseline="bf16"), "a")
    short = content(run_of("rowwise", [4.0]), run_of("mxfp8", [4.0, 2.0], "non-finite"), command="b")
    data = report_merge.load([base, save(short, "b")], None, "")
    assert [run["final_loss_difference_percent"] for run in data["runs"]] == [None] * 3
    assert "non-finite at step 2" in report_html.render(data)


def test_without_a_finished_run_nothing_is_the_baseline(content: Content, save: Save) -> None:
    places = [save(content(Run(n, [], "interrupted"), command=n), n) for n in ("bf16", "rowwise")]
    data = report_merge.load(places, None, "")
    assert data["baseline"] is None
    report_html.render(data)


def test_folders_of_one_name_are_told_apart(content: Content, save: Save) -> None:
    places = [save(content(run_of("bf16", [4.0]), command=n), f"{n}/out") for n in ("x", "y")]
    data = report_merge.load(places, None, "")
    assert [run["name"] for run in data["runs"]] == [f"bf16 ({place})" for place in places]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["data"].update(sha256="other"), r"the text \(SHA-256\) is .* and other in .*same text"),
        (lambda d: d["config"].update(seed=7), r"--seed is 0 in .*a' and 7 in .*c'"),
        (lambda d: d["config"].update(seq_len=16), r"--seq-len is 32 in .* and 16"),
        (lambda d: d["config"].update(batch_size=1), r"--batch-size is 4 in .* and 1"),
        (lambda d: d["config"].update(init_from="x"), r"--init-from is None in .* and x"),
        (lambda d: d["config"].update(tokenizer="x"), r"the unit is bytes in .* and tokens"),
        (lambda d: d["model"].update(name="llama3-1b"), r"the model is tiny in .* and llama3-1b"),
        (lambda d: d["model"].update(parameters=1), r"its parameters is 106816 in .* and 1"),
    ],
)
def test_jobs_whose_losses_do_not_compare_are_refused(
    two: tuple[Path, Path], save: Save, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    other = json.loads((two[1] / "report.json").read_text())
    change(other)
    with pytest.raises(UserError, match=message):
        report_merge.load([two[0], save(other, "c")], None, "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"is no JSON"),
        ("[" * 100_000, r"is no JSON"),
        ("[]", r"is no report of octavo train: give its report.json or the folder"),
        ('{"report": "octavo check", "schema": 2}', r"is no report of octavo train"),
        ('{"report": "octavo train", "schema": 1}', r"has schema 1 and this version reads 2: train again"),
        ('{"report": "octavo train", "schema": 2}', r"is damaged \(date is missing\)"),
    ],
)
def test_a_foreign_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(UserError, match=message):
        report_merge.load([tmp_path], None, "")


def test_what_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no report\.json in the folder; give the folder that --out named"):
        report_merge.load([tmp_path], None, "")
    with pytest.raises(UserError, match=r"no such folder or file"):
        report_merge.load([tmp_path / "nothing"], None, "")
    (tmp_path / "loss.png").write_bytes(b"\x89PNG\xff")
    with pytest.raises(UserError, match=r"it is no text"):
        report_merge.load([tmp_path / "loss.png"], None, "")


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in ``value`` where something stands, but for options and machine and the numbers in lists."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [path] if path else []
    for key, part in inner:
        if not (isinstance(value, list) and isinstance(part, float | None)):
            found += paths_of(part, (*path, key))
    return found


@pytest.mark.parametrize("damage", ["removed", "text", "list", "number"])
def test_a_damaged_report_is_refused_or_shown_but_never_a_traceback(
    two: tuple[Path, Path], save: Save, damage: str
) -> None:
    whole = json.loads((two[0] / "report.json").read_text())
    refused = 0
    layers = whole["runs"][1]["operands"]["layers"]
    whole["runs"][1]["operands"]["layers"] = dict(list(layers.items())[:1])
    place = save(whole, "damaged") / "report.json"
    for path in paths_of(whole):
        broken = copy.deepcopy(whole)
        holder = broken
        for key in path[:-1]:
            holder = holder[key]
        if damage == "removed":
            del holder[path[-1]]
        else:
            holder[path[-1]] = {"text": "x", "list": ["x"], "number": -1.5}[damage]
        place.write_text(json.dumps(broken))
        try:
            data = report_merge.load([place], None, "")
            report_html.render(data)
            report_markdown.render(data)
            report_merge.load([place, two[1]], None, "")
        except UserError:
            refused += 1
    assert refused > 20


def test_the_command_writes_the_four_files(
    two: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    assert octavo(monkeypatch, "report", *two, "--out", out) == 0
    shown = capsys.readouterr().out
    assert f"written: {', '.join(str(out / name) for name in report_files.NAMES)}" in shown
    assert "rowwise (b)" in shown
    assert json.loads((out / "report.json").read_text())["command"].startswith("octavo report ")
    assert octavo(monkeypatch, "report", out, "--out", tmp_path / "again") == 0
    for name in report_files.NAMES:
        assert (tmp_path / "again" / name).read_bytes() == (out / name).read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "b", "--out", "a"], "holds one of the reports to merge, which would be lost"),
        (["a", "a"], "is given more than once: name each run folder once"),
        (
            ["a", "b", "--baseline", "fp4"],
            "--baseline is 'fp4' but the runs are bf16, rowwise (a), rowwise (b)",
        ),
        (["missing"], "no such folder or file"),
        ([], "Missing argument 'RUN...'"),
    ],
)
def test_what_the_command_refuses_in_one_line(
    two: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(two[0].parent)
    before = (two[0] / "report.json").read_bytes()
    assert octavo(monkeypatch, "report", *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert (two[0] / "report.json").read_bytes() == before


def test_names_with_markup_are_shown_as_they_are(
    two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = two[0].rename(two[0].parent / "[red]x")
    monkeypatch.chdir(two[0].parent)
    assert octavo(monkeypatch, "report", place, two[1]) == 0
    assert "rowwise ([red]x)" in capsys.readouterr().out
