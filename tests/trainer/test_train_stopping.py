"""Ctrl-C and SIGTERM: saved, how to go on is said, and the command that is said works."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from resume_support import COMMAND, Job, run

from octavo.trainer import loop
from octavo.trainer.stopping import Stopping

STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143}


def signalled(number: int, at: int, times: int = 1) -> Any:
    """A ``Trainer.step`` in which the process gets a signal, in step ``at`` (from 1)."""
    original = loop.Trainer.step

    def step(self: Any, n: int) -> Any:
        for _ in range(times if n + 1 == at else 0):
            os.kill(os.getpid(), number)
        return original(self, n)

    return step


@pytest.mark.parametrize("number", STATUS)
def test_the_first_signal_saves_and_says_how_to_go_on(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], number: int
) -> None:
    expected = run(job(steps=6))
    config = job(steps=6, checkpoint_dir=tmp_path / "saved", checkpoint_every=5)
    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "step", signalled(number, at=3))
        stopped = run(config)
    assert stopped.status == STATUS[signal.Signals(number)]
    assert f"octavo: {signal.Signals(number).name}: stopping after this step" in capfd.readouterr().err
    assert stopped.line("was interrupted") == (
        f"bf16 was interrupted after step 3; the last good checkpoint is "
        f"{str(tmp_path / 'saved/bf16/step-00000003')!r}; go on with: {COMMAND} --resume"
    )
    resumed = run(replace(config, resume=True))
    assert (resumed.status, resumed.losses) == (0, expected.losses)


def test_the_second_signal_stops_at_once(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = job(steps=6, checkpoint_dir=tmp_path / "saved", checkpoint_every=1)
    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "step", signalled(signal.SIGINT, at=3, times=2))
        stopped = run(config)
    assert stopped.status == 130
    assert "was interrupted after step 2; the last good checkpoint is" in stopped.shown
    assert run(replace(config, resume=True)).status == 0


def test_between_recipes_the_rest_is_left_for_later(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = job(recipes=("bf16", "rowwise"), steps=3, checkpoint_dir=tmp_path / "saved")
    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "step", signalled(signal.SIGTERM, at=3))
        stopped = run(config)
    assert (stopped.status, list(stopped.runs)) == (143, ["bf16"])
    assert stopped.line("interrupted after") == (
        f"interrupted after bf16 was finished; go on with: {COMMAND} --resume"
    )
    resumed = run(replace(config, resume=True))
    assert (resumed.status, list(resumed.runs)) == (0, ["bf16", "rowwise"])


def test_without_a_folder_nothing_is_promised(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop.Trainer, "step", signalled(signal.SIGINT, at=2))
    stopped = run(job())
    assert stopped.line("was interrupted") == (
        "bf16 was interrupted after step 2; nothing is kept without --checkpoint-dir"
    )


def test_handlers_are_put_back_and_ignored_signals_stay_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Stopping() as stopping:
            os.kill(os.getpid(), signal.SIGINT)
            assert not stopping()
            os.kill(os.getpid(), signal.SIGTERM)
            assert stopping()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.slow
def test_the_command_that_is_said_works(tmp_path: Path) -> None:
    """The real command line in a process of its own, stopped by Ctrl-C; folders with a space in their names."""
    text, saved = tmp_path / "a text.txt", tmp_path / "saved here"
    text.write_text("one two three four five six seven eight nine ten\n" * 100)
    octavo = Path(sys.executable).with_name("octavo")
    command = [
        str(octavo),
        "train",
        "--data",
        str(text),
        "--steps",
        "8",
        "--seq-len",
        "8",
        "--batch-size",
        "1",
    ]
    command += ["--recipe", "bf16", "--device", "cpu", "--checkpoint-dir", str(saved), "--out", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 200
        while not list(saved.glob("bf16/step-*")) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        shown, errors = process.communicate(timeout=200)
    assert process.returncode == 130, errors
    assert "octavo: SIGINT: stopping after this step; again to stop at once" in errors
    said = next(line for line in shown.splitlines() if "go on with: " in line).partition("go on with: ")[2]
    words = shlex.split(said)
    assert words[0] == "octavo"
    done = subprocess.run([str(octavo), *words[1:]], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "going on after step" in done.stdout
    assert "step 8/8" in done.stdout
