"""`octavo bench` and `octavo tune`: what they pass on, and one line for what cannot work."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import hardware
from octavo.bench import main
from octavo.operators import wins

Octavo = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["bench"], "no suite is named: choose from"),
        (["bench", "sort"], "unknown suite 'sort': choose from"),
        (["bench", "topk"], "suite 'topk' is timed on a GPU and torch sees none"),
        (["bench", "--all"], "is timed on a GPU and torch sees none"),
        (["tune"], "say what to tune: --wins"),
        (["tune", "--sizes", "--results", "{tmp}"], "no linear-*.json or matmul-round-*.json with sizes"),
        (["tune", "--launch", "topk"], "unknown room 'topk': choose from quantize, fused, matmul, or all"),
        (["tune", "--launch", "all"], "--launch times kernels on a GPU and torch sees none"),
        (["tune", "--wins"], "--wins times kernels on a GPU and torch sees none"),
        (["tune", "--wins", "--results", "{tmp}/absent"], "no folder"),
        (
            ["tune", "--wins", "--results", "{tmp}"],
            "no attention-*.json or gemm-*.json or grouped-bf16-*.json",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line(
    octavo: Octavo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], line: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("OCTAVO_WINS", str(tmp_path / "own"))
    status, shown, error = octavo(*(word.format(tmp=tmp_path) for word in arguments))
    assert (status, shown) == (2, "")
    assert line in error
    assert error.count("\n") == 1


def test_a_failing_suite_leaves_the_next_and_is_told_by_the_status(
    octavo: Octavo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, dict[str, Any]]] = []

    def run(suite: str, out: Path, **options: Any) -> Path:
        ran.append((suite, options))
        if suite == "rmsnorm":
            raise RuntimeError("1 of 2 cases failed")
        return out / "topk.json"

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(main, "run", run)
    status, shown, error = octavo(
        "bench", "rmsnorm", "topk", "--out", tmp_path, "--only", "k=8", "--no-compile"
    )
    assert status == 1
    assert str(tmp_path / "topk.json") in shown
    assert "1 of 2 cases failed" in error
    assert [suite for suite, _ in ran] == ["rmsnorm", "topk"]
    for _, options in ran:
        assert (options["only"], options["compile"], options["force"], options["host"]) == (
            "k=8",
            False,
            False,
            True,
        )


def test_wins_are_measured_and_written_for_the_owner(
    octavo: Octavo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the owner's card: every suite runs with every kernel, and `enable()` goes by what they showed."""

    def run(suite: str, out: Path, **options: Any) -> Path:
        assert options["force"]
        group, case = {
            "topk": ("models", "fp32 8192x256 k=8"),
            "rmsnorm": ("models_forward", "bf16 8192x4096"),
            "attention": ("forward_64", "bf16 B=16 H=64 L=512"),
            "gemm": ("published", "bf16 M=16 N=4096 K=4096"),
            "grouped-bf16": ("uniform", "rows 8x512 K=4096 N=4096"),
            "grouped-fp8": ("uniform_fast", "rows 8x512 K=4096 N=4096"),
            "mx": ("mxfp8", "M=32 N=4096 K=4096"),
            "scaled": ("rowwise", "e4m3 M=16 N=4096 K=4096"),
        }[suite]
        entry = {
            "group": group,
            "case": case,
            "ms": {"octavo": 1.0, "aten": 3.0},
            "checked": True,
            "taken": True,
        }
        machine = {"gpu": "AMD Instinct MI300X", "architecture": "gfx942"}
        content = {"suite": suite, "date": "2026-01-02", "machine": machine, "cases": [entry]}
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{suite}-mi300x.json").write_text(json.dumps(content))
        return out

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(main, "run", run)
    monkeypatch.setenv("OCTAVO_WINS", str(tmp_path))
    status, shown, _ = octavo("tune", "--wins", "--jobs", 0)
    assert status == 0
    assert f"wrote {tmp_path / 'gfx942.json'}" in shown.replace("\n", "")
    with hardware.assume_architecture("gfx942"):
        device = torch.device("cuda", 0)
        assert wins.why_not("topk", device, dtype="float32", m=8192, n=256, k=8) is None
        assert wins.why_not("rms_norm", device, dtype="bfloat16", m=8192, n=4096) is None
        assert wins.why_not("rms_norm_backward", device, dtype="bfloat16", m=8192, n=4096) is not None
        assert wins.why_not("mm", device, dtype="bfloat16", m=16, n=4096, k=4096) is None
    wins.reload()
