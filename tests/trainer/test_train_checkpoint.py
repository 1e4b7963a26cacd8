"""What is wrong with a checkpoint is said in one line, the last good one is gone on from, and nothing is lost."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from resume_support import Job, run, stop_after

from octavo.trainer import checkpoint, files, journal, loop, tensors
from octavo.trainer.checkpoint import MANIFEST, RESULT
from octavo.trainer.config import TrainConfig, UserError


@pytest.fixture
def cut(job: Job, tmp_path: Path) -> TrainConfig:
    """A job that was interrupted after step 5, with checkpoints of steps 2 and 4, to be resumed."""
    config = job(steps=6, checkpoint_dir=tmp_path / "saved", checkpoint_every=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Trainer, "step", stop_after(5))
        assert run(config).status == 130
    return replace(config, resume=True)


@pytest.fixture
def plain(job: Job) -> list[float]:
    """Losses of the same job, never interrupted."""
    return run(job(steps=6)).losses["bf16"]


def folder(config: TrainConfig) -> Path:
    assert config.checkpoint_dir
    return config.checkpoint_dir / "bf16"


def data_file(path: Path) -> Path:
    return next(path.glob("*.distcp"))


def sign(path: Path, **changes: Any) -> None:
    """Changes a manifest and gives it the checksum that belongs to it."""
    content = json.loads(path.read_text()) | changes
    content.pop("sha256")
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(content | {"sha256": digest}))


def flip(file: Path, at: float = 0.5) -> None:
    content = bytearray(file.read_bytes())
    content[int(at * len(content))] ^= 0x10
    file.write_bytes(content)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 100)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda c: truncate(data_file(c)), "is corrupt (__0_0.distcp has "),
    "a flipped bit": (
        lambda c: flip(data_file(c)),
        "is corrupt (__0_0.distcp has other content than was written)",
    ),
    "a flipped bit of the description": (
        lambda c: flip(c / ".metadata"),
        "is corrupt (.metadata has other content than was written)",
    ),
    "a missing file": (lambda c: data_file(c).unlink(), "is incomplete (__0_0.distcp is missing)"),
    "no manifest": (lambda c: (c / MANIFEST).unlink(), "is incomplete (no manifest)"),
    "an empty manifest": (lambda c: (c / MANIFEST).write_text(""), "is corrupt (manifest.json is damaged)"),
    "a list for a manifest": (lambda c: (c / MANIFEST).write_text("[]"), "is corrupt (manifest.json is damaged)"),
    "a flipped bit of the manifest": (lambda c: flip(c / MANIFEST, 0.2), "is corrupt (manifest.json "),
    "a newer format": (
        lambda c: sign(c / MANIFEST, schema=2, versions={"octavo": "9.0", "torch": "2.13"}),
        "was written by octavo 9.0, whose format differs",
    ),
    "another run": (
        lambda c: sign(c / MANIFEST, config=json.loads((c / MANIFEST).read_text())["config"] | {"lr": 0.5}),
        "is of another run: lr is 0.5 there and 0.001 here",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_the_last_good_checkpoint_is_gone_on_from(cut: TrainConfig, plain: list[float], kind: str) -> None:
    damage, message = DAMAGE[kind]
    damage(folder(cut) / "step-00000004")
    resumed = run(cut)
    assert resumed.status == 0
    line = resumed.line("going on from")
    assert line.startswith(f"step-00000004 {message}")
    assert line.endswith(f": going on from {str(folder(cut) / 'step-00000002')!r}")
    assert resumed.losses["bf16"] == plain
    # What could not be used is kept aside: it may be of use to somebody.
    assert (folder(cut) / "step-00000004.replaced-1").is_dir()


@pytest.mark.parametrize("kind", ["truncated", "no manifest", "another run"])
def test_where_none_can_be_used_one_line_says_so_and_nothing_is_lost(cut: TrainConfig, kind: str) -> None:
    damage, message = DAMAGE[kind]
    for step in (2, 4):
        damage(folder(cut) / f"step-{step:08d}")
    before = {path: path.read_bytes() for path in folder(cut).rglob("*") if path.is_file()}
    with pytest.raises(UserError) as caught:
        run(cut)
    text = str(caught.value)
    assert text.startswith(f"no checkpoint in {str(folder(cut))!r} can be used: step-00000004 {message}")
    assert "step-00000002" in text
    assert text.endswith("give another --checkpoint-dir, or train anew without --resume in an empty one")
    assert "\n" not in text
    assert {path: path.read_bytes() for path in folder(cut).rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": 0.5}, "lr is 0.001 there and 0.5 here"),
        ({"steps": 8}, "steps is 6 there and 8 here"),
        ({"seed": 3}, "seed is 0 there and 3 here"),
        ({"dtype": "bfloat16"}, "dtype is 'float32' there and 'bfloat16' here"),
        ({"batch_size": 8, "grad_accum": 2}, "batch_size is 4 there and 8 here"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_another_job_is_refused_by_name(cut: TrainConfig, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(replace(cut, **changes))


def test_another_text_is_refused(cut: TrainConfig, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("Whoever moves this text trains another model. " * 99)
    with pytest.raises(UserError, match=r"data is '.*\.\.\.' there and '.*\.\.\.' here"):
        run(replace(cut, data=tmp_path / "other.txt"))
    assert cut.data
    moved = cut.data.rename(tmp_path / "moved.txt")  # the same text elsewhere is the same text
    assert run(replace(cut, data=moved)).status == 0


def test_a_finished_run_of_another_job_is_refused(job: Job, tmp_path: Path) -> None:
    config = job(checkpoint_dir=tmp_path / "saved")
    run(config)
    with pytest.raises(
        UserError, match=r"the finished run in .* is of another run: lr is 0.001 there and 0.1 here"
    ):
        run(replace(config, resume=True, lr=0.1))


def test_a_damaged_result_is_written_again(job: Job, tmp_path: Path) -> None:
    config = job(checkpoint_dir=tmp_path / "saved")
    expected = run(config)
    flip(tmp_path / "saved/bf16" / RESULT)
    again = run(replace(config, resume=True))
    assert (again.status, again.losses) == (0, expected.losses)
    assert again.runs["bf16"]["validation_loss"] == expected.runs["bf16"]["validation_loss"]


def test_a_damaged_one_does_not_count_among_those_that_stay(cut: TrainConfig) -> None:
    """Steps 2 and 4, of which 4 is damaged; then 5 and 6 come, and of good ones two stay."""
    flip(data_file(folder(cut) / "step-00000004"))
    run(replace(cut, checkpoint_every=3, keep=2))
    names = {path.name for path in folder(cut).glob("step-*")}
    assert {"step-00000003", "step-00000006"} <= names
    assert "step-00000002" not in names


class Harmful:
    """Pickled, it runs code when it is read."""

    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/octavo-was-here",)


@pytest.mark.parametrize("where", ["metadata", "entry"])
def test_a_foreign_checkpoint_runs_no_code(tmp_path: Path, where: str) -> None:
    state = {"model": {"w": torch.ones(3)}}
    tmp_path.joinpath("saved").mkdir()
    if where == "entry":
        tensors.save({"model": {"w": torch.ones(3), "extra": Harmful()}}, tmp_path / "saved")
    else:
        tensors.save(state, tmp_path / "saved")
        (tmp_path / "saved/.metadata").write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(ValueError, match=r"which is no tensor|is no tensor there"):
        tensors.load(state, tmp_path / "saved")
    assert not Path("/tmp/octavo-was-here").exists()


@pytest.mark.parametrize(
    ("wanted", "message"),
    [({"w": torch.ones(4)}, "[Ss]ize"), ({"v": torch.ones(3)}, "v")],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path: Path, wanted: Any, message: str) -> None:
    tmp_path.joinpath("saved").mkdir()
    tensors.save({"model": {"w": torch.ones(3)}}, tmp_path / "saved")
    with pytest.raises(ValueError, match=message) as caught:
        tensors.load({"model": wanted}, tmp_path / "saved")
    assert "\n" not in str(caught.value)


def full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


SEAMS: dict[str, tuple[Any, str]] = {
    "tensors": (tensors, "save"),
    "archive": (torch, "save"),
    "manifest": (files.json, "dump"),
    "sync": (checkpoint, "sync_folder"),
    "move": (checkpoint.os, "replace"),
    "history": (journal.Journal, "write"),
    "removal": (checkpoint.shutil, "rmtree"),
}


@pytest.mark.parametrize("seam", SEAMS)
def test_a_full_disk_is_one_line_and_costs_nothing_saved(
    cut: TrainConfig, plain: list[float], monkeypatch: pytest.MonkeyPatch, seam: str
) -> None:
    place, name = SEAMS[seam]
    original = getattr(place, name)

    def fault(*args: Any, **options: Any) -> Any:
        if seam == "history":
            with files.writing(args[0].path):
                full()
        # The report, which some of these serve too, is another matter.
        report = "report.json" in str(args) or "out" in str(args[-1])
        return original(*args, **options) if report else full()

    original_step = loop.Trainer.step

    def step(self: Any, number: int) -> Any:
        done = original_step(self, number)
        if number == 4:  # after the history was cut, which is of no interest here
            patch.setattr(place, name, fault)
        return done

    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "step", step)
        failed = run(cut)
    assert failed.status == 1
    line = failed.line("bf16 stopped: cannot write ")
    assert "(No space left on device): make room; the last good checkpoint is " in line
    assert line.endswith("go on with: octavo train --test")
    assert not [
        path for path in folder(cut).iterdir() if path.name.endswith(".partial") and seam == "tensors"
    ]
    resumed = run(cut)
    assert (resumed.status, resumed.losses["bf16"]) == (0, plain)


QUOTA = """
import resource, sys
from octavo.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)), resource.RLIM_INFINITY))
main()
"""


@pytest.mark.slow
def test_a_limit_on_file_sizes_is_one_line_too(tmp_path: Path) -> None:
    """A real limit of the system, in a process of its own, against all that writes."""
    text = tmp_path / "text.txt"
    text.write_text("one two three four five six seven eight nine ten\n" * 200)
    command = [sys.executable, "-c", QUOTA, str(2**20), "train", "--data", str(text), "--steps", "2"]
    command += ["--seq-len", "16", "--batch-size", "1", "--device", "cpu", "--recipe", "bf16"]
    command += ["--checkpoint-dir", str(tmp_path / "saved"), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    line = next(line for line in done.stdout.splitlines() if "stopped" in line)
    assert "(File too large): raise the limit of a file's size (ulimit -f); go on with: octavo train" in line
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 2**20
    assert [path.name for path in (tmp_path / "saved/bf16").iterdir()] == ["steps.jsonl"]


def test_a_tokenizer_that_does_not_fit_stops_before_anything_is_touched(
    cut: TrainConfig, tmp_path: Path
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {f"w{n}": n for n in range(300)} | {"[UNK]": 300}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    before = {path: path.read_bytes() for path in folder(cut).rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=r"has 301 tokens but the model's vocabulary is 256") as caught:
        run(replace(cut, tokenizer=tmp_path / "tokenizer.json"))
    assert "\n" not in str(caught.value)
    assert {path: path.read_bytes() for path in folder(cut).rglob("*") if path.is_file()} == before
