"""Killed at any moment, the writing of a checkpoint included, a run goes on and ends with the same weights."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.trainer.checkpoint import MANIFEST

PROGRAM = Path(__file__).with_name("killed_job.py")
JOB = {"recipes": ["rowwise"], "dtype": "bfloat16", "checkpoint_every": 2}


def killed(
    folder: Path, moments: list[tuple[str, float]], *, sweep: bool = False, **changes: Any
) -> dict[str, Any]:
    options = json.dumps({"moments": moments, "sweep": sweep, "config": JOB | changes})
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder), options],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def weights(folder: Path) -> dict[str, Any]:
    """Size and checksum of the tensors in the newest checkpoint below ``folder``, and its step."""
    manifest = json.loads((max(folder.glob("step-????????")) / MANIFEST).read_text())
    return {"step": manifest["step"]} | {n: f for n, f in manifest["files"].items() if n.endswith(".distcp")}


def check(folder: Path, which: str) -> None:
    """The run below ``which`` left what the one that was never killed left."""
    assert weights(folder / which / "rowwise") == weights(folder / "plain/rowwise")
    names = sorted(path.name for path in (folder / which / "rowwise").iterdir())
    assert names == sorted(path.name for path in (folder / "plain/rowwise").iterdir())
    histories = [
        [json.loads(line) for line in (folder / job / "rowwise/steps.jsonl").read_text().splitlines()]
        for job in ("plain", which)
    ]
    one, other = ([(s["number"], s["loss"], s["grad_norm"]) for s in steps] for steps in histories)
    assert one == other


@pytest.mark.slow
def test_killed_at_ten_random_moments(tmp_path: Path) -> None:
    draw = random.Random(2478)
    moments: list[tuple[str, float]] = [("time", draw.uniform(0.05, 0.3)) for _ in range(2)]
    moments += [("event", draw.randint(7, 24)) for _ in range(5)]  # a checkpoint takes about twelve
    moments += [("write", draw.randint(1, 60)) for _ in range(2)]
    moments += [("step", draw.randint(1, 3))]
    outcome = killed(tmp_path, moments, steps=24)
    assert [status for *_, status in outcome["ended"]] == [signal.SIGKILL] * 10
    assert outcome["status"] == 0, outcome["said"]
    check(tmp_path, "killed")


@pytest.mark.exhaustive
def test_killed_before_every_file_operation(tmp_path: Path) -> None:
    outcome = killed(tmp_path, [], sweep=True, steps=4)
    assert "os.rename .step-00000002.partial" in outcome["seen"]
    assert outcome["ended"] == [[signal.SIGKILL, 0]] * len(outcome["seen"])
    for number in range(1, len(outcome["seen"]) + 1):
        check(tmp_path, f"killed-{number}")
