"""What follows a run beside the screen: one JSON object a step, and TensorBoard."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from resume_support import Job, run, stop_after

from octavo.trainer import files, loop
from octavo.trainer.config import UserError
from octavo.trainer.journal import Journal, read


def test_the_log_has_every_step_of_every_recipe_once(job: Job, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "steps.jsonl"
    config = job(
        recipes=("bf16", "rowwise"), steps=6, checkpoint_dir=tmp_path / "saved", checkpoint_every=2, log=log
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Trainer, "step", stop_after(5))
        cut = run(config)
    assert [r["step"] for r in read(log)] == [1, 2, 3, 4, 5]
    with log.open("a") as file:
        file.write('{"recipe": "bf16", "st')  # a crash in the middle of a line
    done = run(replace(config, resume=True))
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(r["recipe"], r["step"]) for r in records] == [
        (recipe, n) for recipe in ("bf16", "rowwise") for n in range(1, 7)
    ]
    assert [r["loss"] for r in records] == [*done.losses["bf16"], *done.losses["rowwise"]]
    assert done.losses["bf16"][:5] == cut.losses["bf16"]
    first = records[0]
    assert first["tokens_per_second"] == pytest.approx(4 * 32 / first["seconds"])
    assert {"grad_norm", "learning_rate", "peak_memory", "mfu", "validation_loss"} <= first.keys()


def test_a_new_job_starts_the_log_anew(job: Job, tmp_path: Path) -> None:
    config = job(log=tmp_path / "log.jsonl")
    run(config)
    run(config)
    assert [r["step"] for r in read(tmp_path / "log.jsonl")] == [1, 2, 3, 4]


def test_a_folder_in_the_place_of_the_log_is_refused(job: Job, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--log .* is a folder: give the name of a file"):
        run(job(log=tmp_path))


def test_numbers_that_json_lacks_are_null_and_lines_that_are_none_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    with Journal(path) as journal:
        journal.write({"a": math.nan, "b": [1.0, math.inf], "c": 2})
    assert read(path) == [{"a": None, "b": [1.0, None], "c": 2}]
    path.write_text('{"a": 1}\n[2]\n\nnull\n{"a"\n{"a": 3}')
    assert read(path) == [{"a": 1}, {"a": 3}]
    with pytest.raises(files.WriteError, match=r"cannot write .*: make it writable"):
        Journal(path / "inside")


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs octavo[tensorboard]"
    )
    events: Any = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_has_every_step_once_after_resuming(job: Job, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs octavo[tensorboard]")
    config = job(
        steps=6, checkpoint_dir=tmp_path / "s", checkpoint_every=2, tensorboard=tmp_path / "tb", eval_every=3
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Trainer, "step", stop_after(5))
        run(config)
    done = run(replace(config, resume=True))
    seen = scalars(tmp_path / "tb" / "bf16")
    assert [step for step, _ in seen["loss"]] == [1, 2, 3, 4, 5, 6]
    assert [value for _, value in seen["loss"]] == pytest.approx(done.losses["bf16"], rel=1e-6)
    assert [step for step, _ in seen["validation_loss"]] == [3, 6]
    assert {"grad_norm", "learning_rate", "seconds"} <= seen.keys()
