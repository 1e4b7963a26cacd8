"""Tables of wins from results files: what is a win, what a box may hold, and that the operators read it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from octavo import cli, hardware
from octavo.bench import wins_table
from octavo.bench.wins_table import Point
from octavo.operators import wins


def _case(case: str, ratio: float, group: str = "routers", wall: float | None = None) -> dict:
    entry = {
        "group": group,
        "case": case,
        "ms": {"octavo": 1.0, "aten": ratio},
        "checked": True,
        "taken": True,
    }
    if wall is not None:
        entry["wall_ms"] = {"octavo": 1.0, "aten": wall}
    return entry


def _content(suite: str, cases: list[dict], architecture: str = "sm_90") -> dict:
    machine = {"gpu": "NVIDIA H200", "architecture": architecture}
    return {"suite": suite, "date": "2026-01-02", "machine": machine, "cases": cases}


def test_a_win_is_faster_by_every_clock() -> None:
    assert wins_table.is_win(_case("fp32 8x8 k=2", 2.0, wall=1.5))
    assert not wins_table.is_win(_case("fp32 8x8 k=2", 2.0, wall=0.9))
    assert not wins_table.is_win(_case("fp32 8x8 k=2", 1.01))
    assert not wins_table.is_win({**_case("fp32 8x8 k=2", 2.0), "taken": False})


def test_boxes_never_hold_a_measured_loss() -> None:
    win, loss = True, False
    shapes = {
        Point("float32", 8, 256, 1024): win,
        Point("float32", 8, 256, 8192): win,
        Point("float32", 8, 512, 4096): win,
        Point("float32", 8, 1024, 4096): loss,
        Point("float32", 8, 2048, 4096): win,
        Point("float32", 8, 2048, 65536): loss,
        Point("float32", 6, 300, 9000): loss,
        Point("bfloat16", 8, 256, 64): loss,
    }
    found = wins_table.boxes(shapes)
    unlimited = wins_table.UNLIMITED
    assert {"dtype": ["float32"], "m": [1024, unlimited], "n": [256, 256], "k": [5, 8]} in found
    assert {"dtype": ["float32"], "m": [4096, 65535], "n": [2048, 2048], "k": [5, 8]} in found
    # Between 256 and 512 columns lies a loss of k=6, between 512 and 2048 one of k=8.
    assert all(box["n"][0] == box["n"][1] for box in found)
    for box in found:
        assert not any(wins_table.holds(box, p) for p, won in shapes.items() if not won)
    del shapes[Point("float32", 6, 300, 9000)]
    assert {"dtype": ["float32"], "m": [4096, unlimited], "n": [256, 512], "k": [5, 8]} in wins_table.boxes(
        shapes
    )


def test_command_writes_what_the_operators_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, overlay = tmp_path / "results", tmp_path / "own"
    results.mkdir()
    norm = [
        _case("bf16 8192x4096", 1.5, "models_forward"),
        _case("bf16 8192x4096", 0.8, "models_backward"),
    ]
    (results / "topk-h200.json").write_text(json.dumps(_content("topk", [_case("fp32 8192x256 k=8", 9.0)])))
    (results / "rmsnorm-h200.json").write_text(json.dumps(_content("rmsnorm", norm)))
    monkeypatch.setenv("OCTAVO_WINS", str(overlay))
    with pytest.raises(SystemExit) as ended:
        cli.main(["tune", "--wins", "--results", str(results)])
    assert not ended.value.code
    device = torch.device("cuda", 0)
    with hardware.assume_architecture("sm_90"):
        assert wins.why_not("topk", device, dtype="float32", m=8192, n=256, k=8) is None
        assert wins.why_not("topk", device, dtype="float32", m=8191, n=256, k=8) is not None
        assert wins.why_not("rms_norm", device, dtype="bfloat16", m=10**6, n=4096) is None
        reason = wins.why_not("rms_norm_backward", device, dtype="bfloat16", m=8192, n=4096)
        assert reason == "not measured faster for this shape"
        assert "topk-h200.json of 2026-01-02 on NVIDIA H200" in wins.tables("sm_90")["topk"].run
    wins.reload()


def test_results_that_make_no_table_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no attention-\*\.json or gemm"):
        wins_table.write(tmp_path, tmp_path)
    for i, architecture in enumerate(("sm_90", "gfx942")):
        (tmp_path / f"topk-{i}.json").write_text(json.dumps(_content("topk", [], architecture)))
    with pytest.raises(ValueError, match="exactly one architecture"):
        wins_table.write(tmp_path, tmp_path)
    with pytest.raises(ValueError, match="measures no operator"):
        wins_table.points([_content("sort", [_case("fp32 2x2", 2.0)])])
    with pytest.raises(ValueError, match="is not named"):
        wins_table.points([_content("topk", [_case("two by two", 2.0)])])
