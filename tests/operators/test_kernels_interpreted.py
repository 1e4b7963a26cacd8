"""The Triton kernels in Triton's interpreter against the reference, on the CPU (the rows of CASES that need no GPU)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels are written in Triton")

HERE = Path(__file__).parent


def _run(group: str) -> int:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "operator_checks.py"), group]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    name, count = done.stdout.split()
    assert name == group
    return int(count)


@pytest.mark.case("B36")
@pytest.mark.case("B39")
@pytest.mark.slow
@pytest.mark.parametrize("group", ["topk_small", "topk_large"])
def test_topk_kernels(group: str) -> None:
    assert _run(group) > 10


@pytest.mark.case("B36")
def test_topk_layouts() -> None:
    assert _run("topk_layouts") == 9


@pytest.mark.slow
@pytest.mark.parametrize("group", ["norm_rows", "norm_long"])
def test_rms_norm_kernels(group: str) -> None:
    assert _run(group) >= 8


@pytest.mark.case("B44")
@pytest.mark.case("B45")
def test_rms_norm_inputs() -> None:
    assert _run("norm_inputs") == 8
