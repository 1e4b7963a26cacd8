"""Zeros over what PyTorch's grouped products leave: rows past the last end, and matrices of empty groups."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from octavo import hardware
from octavo.matmul import torch_kernels

interpreted = pytest.mark.skipif(not hardware.interpreted(), reason="runs in the interpreter's own process")
ENDS = [[7, 7, 30, 41], [0, 0, 0, 0], [53, 53, 53, 53], [0, 16, 16, 32], [1, 2, 3, 52]]


@pytest.mark.skipif(hardware.interpreted(), reason="is this very process")
def test_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-x", __file__]
    run = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert " passed" in run.stdout


def filled(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


@pytest.mark.parametrize("ends", ENDS, ids=str)
@pytest.mark.parametrize("columns", [8, 520, 1031])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_past_the_last_end(ends: list[int], columns: int, dtype: torch.dtype) -> None:
    guard = filled(56, columns, dtype=dtype)
    out = guard[:53]
    found = torch_kernels._zero_tail(out, torch.tensor(ends, dtype=torch.int32))
    assert found.data_ptr() == guard.data_ptr()
    assert out[: ends[-1]].isnan().all()
    assert torch.equal(out[ends[-1] :], torch.zeros_like(out[ends[-1] :]))
    assert guard[53:].isnan().all()


@pytest.mark.parametrize("ends", ENDS, ids=str)
@pytest.mark.parametrize("shape", [(8, 8), (3, 1031), (40, 2000)])
def test_matrices_of_empty_groups(ends: list[int], shape: tuple[int, int]) -> None:
    guard = filled(6, *shape, dtype=torch.bfloat16)
    out = guard[1:5]
    torch_kernels._zero_empty_groups(out, torch.tensor(ends, dtype=torch.int32))
    for group, (start, end) in enumerate(zip([0, *ends], ends)):
        if start == end:
            assert torch.equal(out[group], torch.zeros(shape, dtype=out.dtype))
        else:
            assert out[group].isnan().all()
    assert guard[[0, 5]].isnan().all()


def test_outputs_that_are_not_contiguous() -> None:
    out = filled(64, 53, dtype=torch.bfloat16).t()
    torch_kernels._zero_tail(out, torch.tensor([3, 40], dtype=torch.int32))
    assert out[:40].isnan().all()
    assert not out[40:].any()


@interpreted
def test_the_kernels_are_what_ran() -> None:
    from octavo.matmul import zero_launch

    assert hardware.why_no_triton(torch.device("cpu")) is None
    out = filled(2, 4, dtype=torch.float32)
    assert not zero_launch.zero_tail(out, torch.tensor([0], dtype=torch.int32)).any()
