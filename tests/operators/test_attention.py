"""Attention: the kernels in Triton's interpreter, and the overrides on the CPU with the reference in their place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from octavo.operators import attention

HERE = Path(__file__).parent


def _run(script: str, group: str, **environment: str) -> list[str]:
    command = [sys.executable, str(HERE / script), group]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()


@pytest.mark.case("B50")
@pytest.mark.case("B52")
@pytest.mark.parametrize(("group", "count"), [("shapes", 12), ("layouts", 6), ("values", 7), ("cuts", 1)])
def test_kernels_in_the_interpreter(group: str, count: int) -> None:
    pytest.importorskip("triton", reason="the kernels are written in Triton")
    assert _run("attention_checks.py", group, TRITON_INTERPRET="1") == [group, str(count)]


@pytest.mark.parametrize("group", ["pairs", "refusals", "compiled"])
def test_overrides_on_the_cpu(group: str) -> None:
    assert _run("attention_registry.py", group) == [group, "passed"]


def _tensors(
    heads: int = 6, kv_heads: int = 3, dim: int = 16, value_dim: int = 16, **kind
) -> list[torch.Tensor]:
    kind = {"dtype": torch.bfloat16, "device": "meta", **kind}
    return [
        torch.empty(2, h, 8, d, **kind) for h, d in ((heads, dim), (kv_heads, dim), (kv_heads, value_dim))
    ]


@pytest.mark.case("B50")
@pytest.mark.parametrize(
    ("tensors", "options", "reason"),
    [
        (_tensors(kv_heads=4), {}, "no multiple of the heads of the key"),
        (_tensors(dim=20), {}, "no multiple of 8"),
        (_tensors(value_dim=264), {}, "no multiple of 8 from 16 to 256"),
        (_tensors(dtype=torch.float32), {}, "not all bfloat16 or all float16"),
        (_tensors(), {"dropout_p": 0.1}, "dropout"),
        (_tensors(), {"scale": -1.0}, "scale is not a positive number"),
        (_tensors(), {"return_debug_mask": True}, "debug mask"),
        ([x[..., ::2] for x in _tensors(dim=32, value_dim=32)], {}, "last dimension of query, key or value"),
        ([x[0] for x in _tensors()], {}, "4-D"),
    ],
)
def test_what_the_kernels_are_not_right_for_is_refused(tensors, options, reason: str) -> None:
    answer = attention.why_not_flash(*tensors, **options)
    assert answer is not None
    assert reason in answer
    assert attention.why_not_cudnn(*tensors, None, True, **options) == answer


def test_a_mask_is_refused() -> None:
    tensors = _tensors()
    answer = attention.why_not_cudnn(*tensors, torch.empty(8, 8, device="meta"), True)
    assert answer == "a mask or bias is not served"
