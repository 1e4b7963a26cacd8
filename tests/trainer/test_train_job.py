"""A whole job: its files, its table, its picture, and what is left of one that ends early."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from io import StringIO
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import torch
from rich.console import Console

from octavo.trainer import job as jobs
from octavo.trainer import loop, plot, report, report_files
from octavo.trainer.config import TrainConfig
from octavo.trainer.progress import RunProgress
from octavo.trainer.records import Run, Step

Job = Callable[..., TrainConfig]


def run_job(config: TrainConfig, width: int = 100) -> tuple[int, str, dict[str, Any]]:
    output = StringIO()
    corpus = jobs.prepare(config)
    status = jobs.run(config, corpus, Console(file=output, width=width), command="octavo train --test")
    return status, output.getvalue(), json.loads((config.out / "report.json").read_text())


def test_a_comparison_writes_its_report(job: Job) -> None:
    config = job(recipes=("bf16", "rowwise"), baseline="bf16")
    status, shown, content = run_job(config)
    assert status == 0
    assert set(content) == {
        *("report", "schema", "date", "command", "versions", "machine", "model", "data", "config"),
        *("final_loss_steps", "baseline", "runs"),
    }
    assert (content["report"], content["schema"], content["command"]) == (
        "octavo train",
        2,
        "octavo train --test",
    )
    assert content["config"]["steps"] == 4
    assert content["model"] == {"name": "tiny", "parameters": 106_816}
    exact, fp8 = content["runs"]
    assert (exact["recipe"], fp8["recipe"]) == ("bf16", "rowwise")
    for run in content["runs"]:
        assert run["status"] == "finished"
        assert {len(run[k]) for k in ("loss", "grad_norm", "learning_rate", "step_seconds")} == {4}
        assert run["final_loss"] == pytest.approx(sum(run["loss"]) / 4)
        assert run["tokens_per_second"] > 0
        assert run["wall_seconds"] >= sum(run["step_seconds"])
        assert sum(run["flops_per_step"].values()) > 0
    assert (exact["compared_with"], exact["final_loss_difference_percent"]) == (None, None)
    assert exact["fp8_flops_share"] == 0.0
    assert fp8["compared_with"] == "bf16"
    assert fp8["converted_layers"] == 14  # seven in each of two layers; the output head stays
    assert fp8["fp8_flops_share"] > 0.5
    for loss in ("final_loss", "validation_loss"):
        expected = 100 * (fp8[loss] - exact[loss]) / exact[loss]
        assert fp8[f"{loss}_difference_percent"] == pytest.approx(expected)
    files = ", ".join(str(config.out / name) for name in report_files.NAMES)
    assert f"written: {files}" in shown


def test_a_comparison_ends_with_a_table(job: Job) -> None:
    _, shown, content = run_job(job(recipes=("bf16", "rowwise"), baseline="bf16"))
    fp8 = content["runs"][1]
    row = next(line for line in shown.splitlines() if line.split()[:1] == ["rowwise"] and "step" not in line)
    assert f"{fp8['final_loss']:.4f}" in row
    assert f"{fp8['final_loss_difference_percent']:+.3f}" in row
    assert f"{fp8['fp8_flops_share']:.1%}" in row
    assert f"{fp8['tokens_per_second']:,.0f}" in row


def test_the_table_of_the_longest_recipe_fits_eighty_columns(job: Job) -> None:
    run = Run("rowwise_with_gw_hp", [Step(1, 2.0, 1.0, 1.0, 0.1)], "finished", {"aten.mm": 1}, 1, 2.0, 1234.5)
    base = Run("bf16", [Step(1, 2.5, 1.0, 1.0, 0.1)], "finished", {"aten.mm": 1}, 0, 2.0, 1234.5)
    config = job(recipes=("bf16", "rowwise_with_gw_hp"), baseline="bf16")
    output = StringIO()
    Console(file=output, width=80).print(
        report.table(report.as_data(config, jobs.prepare(config), [base, run], "octavo train"))
    )
    assert "…" not in output.getvalue()
    assert "rowwise_with_gw_hp" in output.getvalue()
    assert "-20.000" in output.getvalue()
    assert max(map(len, output.getvalue().rstrip().splitlines())) <= 80


def test_a_single_recipe_has_no_comparison(job: Job) -> None:
    status, shown, content = run_job(job())
    assert status == 0
    assert content["baseline"] is None
    assert content["runs"][0]["final_loss_difference_percent"] is None
    assert "diff" not in shown
    assert matplotlib.image.imread(job().out / "loss.png").shape[2] in (3, 4)


def test_the_picture_shows_both_losses_and_their_difference(job: Job) -> None:
    config = job(recipes=("bf16", "rowwise"), baseline="bf16")
    run_job(config)
    picture = matplotlib.image.imread(config.out / "loss.png")
    height, width = picture.shape[:2]
    assert width >= 1200
    assert height >= 800
    for colour in (plot.BASELINE_COLOUR, plot.COLOURS[0]):
        wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        rows = np.nonzero((np.abs(picture[:, :, :3] - wanted).max(-1) < 0.02).any(1))[0]
        assert rows.min() < 0.6 * height < 0.7 * height < rows.max(), colour  # in the upper and lower panel


def test_a_job_leaves_no_other_files_and_can_be_repeated(job: Job) -> None:
    first = run_job(job())[2]
    second = run_job(job())[2]
    assert sorted(path.name for path in job().out.iterdir()) == sorted(report_files.NAMES)
    assert first["runs"][0]["loss"] == second["runs"][0]["loss"]


def stop_at(
    monkeypatch: pytest.MonkeyPatch, call: int, action: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    original, calls = loop.next_token_loss, iter(range(1000))

    def changed(*args: Any) -> torch.Tensor:
        value = original(*args)
        return action(value) if next(calls) == call else value

    monkeypatch.setattr(loop, "next_token_loss", changed)


def test_a_non_finite_loss_ends_with_one_line_and_the_steps_so_far(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_at(monkeypatch, 3, lambda loss: loss * float("inf"))
    status, shown, content = run_job(job(recipes=("bf16", "rowwise"), baseline="bf16"))
    assert status == 1
    assert [run["status"] for run in content["runs"]] == ["non-finite"]
    assert content["runs"][0]["loss"][:2] != [None, None]
    assert content["runs"][0]["loss"][2] is None  # JSON has no infinity
    assert "bf16 stopped at step 3: loss inf, gradient norm" in shown
    assert "lower --lr" in shown
    assert (job().out / "loss.png").stat().st_size > 0


def test_an_interruption_is_reported_with_the_steps_so_far(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(loss: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    stop_at(monkeypatch, 3, interrupt)
    status, shown, content = run_job(job())
    assert status == 130
    assert (content["runs"][0]["status"], content["runs"][0]["steps"]) == ("interrupted", 2)
    assert "interrupted after step 2" in shown


def test_an_interruption_before_the_first_step_still_ends_well(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(loss: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    stop_at(monkeypatch, 0, interrupt)
    status, _, content = run_job(job())
    assert status == 130
    assert content["runs"][0]["final_loss"] is None


def test_a_disk_that_fills_up_costs_the_files_but_not_the_table(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "report.json.partial")

    config, output = job(), StringIO()
    monkeypatch.setattr(report, "write_json", full)
    status = jobs.run(config, jobs.prepare(config), Console(file=output, width=100), command="octavo train")
    assert status == 1
    assert "cannot write report.json.partial (No space left on device): make room" in output.getvalue()
    assert "held-out" in output.getvalue()


def test_progress_prints_plain_lines_without_a_terminal(job: Job) -> None:
    output = StringIO()
    with RunProgress(Console(file=output, width=40), job(steps=100), "bf16") as progress:
        for number in range(1, 101):
            progress(Step(number, 2.5, 1.25, 1e-3, 0.5))
    lines = output.getvalue().splitlines()
    assert len(lines) == 11
    assert lines[0] == "bf16  step 1/100  loss 2.5000  grad norm 1.25  256 tokens/s  50 s left"
    assert lines[-1] == "bf16  step 100/100  loss 2.5000  grad norm 1.25  256 tokens/s  0 s left"


def test_progress_redraws_one_line_on_a_terminal(job: Job) -> None:
    output = StringIO()
    console = Console(file=output, width=120, force_terminal=True, legacy_windows=False)
    with RunProgress(console, job(steps=3), "rowwise") as progress:
        for number in range(1, 4):
            progress(Step(number, 2.5, 1.25, 1e-3, 0.5))
    assert "step 3/3" in output.getvalue()
    assert output.getvalue().count("\n") <= 2


def test_difference_in_percent() -> None:
    assert report.difference_percent(1.01, 1.0) == pytest.approx(1.0)
    assert report.difference_percent(None, 1.0) is None
    assert report.difference_percent(float("nan"), 1.0) is None
    assert report.difference_percent(1.0, None) is None


def test_running_mean() -> None:
    assert plot.running_mean([2.0, 4.0, 6.0, 8.0], 2).tolist() == [2.0, 3.0, 5.0, 7.0]


def test_memory_that_does_not_suffice_is_one_line_and_keeps_the_steps(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = loop.Trainer.step

    def fails_at_the_third(trainer: loop.Trainer, number: int) -> Step:
        if number == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nSee documentation")
        return step(trainer, number)

    monkeypatch.setattr(loop.Trainer, "step", fails_at_the_third)
    status, shown, content = run_job(job(recipes=("bf16", "rowwise"), steps=4))
    assert status == 1
    said = " ".join(shown.split())
    assert "bf16 stopped: CUDA out of memory; raise --grad-accum, lower --batch-size" in said
    assert [run["status"] for run in content["runs"]] == ["out-of-memory"]
    assert content["runs"][0]["steps"] == 2
