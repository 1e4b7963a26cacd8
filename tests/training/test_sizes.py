"""Layers measured too small to gain stay as they are, only on the GPU that was measured, and are told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import octavo
from octavo import hardware
from octavo.bench import sizes_table
from octavo.training import sizes

CUDA = torch.device("cuda", 0)


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    table = {"run": "r", "slower": {"rowwise": [[1024, 512], [256, 2048]]}}
    (tmp_path / "sm_90.json").write_text(json.dumps(table))
    monkeypatch.setattr(sizes, "TABLES", tmp_path)
    sizes.load.cache_clear()
    yield
    sizes.load.cache_clear()


@pytest.mark.usefixtures("measured")
@pytest.mark.case("B17")
def test_a_layer_no_larger_than_a_measured_loss_is_too_small() -> None:
    with hardware.assume_architecture("sm_90"):
        assert "rowwise was measured slower at 1024x512 on sm_90" in str(
            sizes.why_too_small((1024, 512), "rowwise", CUDA)
        )
        for small in ((1, 1), (256, 2048), (8, 128, 512)):
            assert sizes.why_too_small(small, "rowwise", CUDA)
        for large in ((1025, 512), (1024, 513), (257, 2048)):
            assert sizes.why_too_small(large, "rowwise", CUDA) is None
        assert sizes.why_too_small((1, 1), "tensorwise", CUDA) is None


@pytest.mark.usefixtures("measured")
def test_what_was_not_measured_is_never_too_small() -> None:
    with hardware.assume_architecture("gfx942"):
        assert sizes.why_too_small((1, 1), "rowwise", CUDA) is None
    for device in ("cpu", "meta"):
        assert sizes.why_too_small((1, 1), "rowwise", torch.device(device)) is None


def test_convert_asks_the_table_unless_told_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_small(shape: tuple[int, ...], recipe: str, device: torch.device) -> str | None:
        return f"{recipe} was measured slower" if max(shape) <= 64 else None

    monkeypatch.setattr(sizes, "why_too_small", too_small)

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 128))

    report = octavo.convert(model(), "rowwise")
    assert report.converted == ("1",)
    assert report.decisions[0].reason == "rowwise was measured slower"
    assert octavo.convert(model(), "rowwise", min_size=0).converted == ("0", "1")
    assert octavo.convert(model(), "rowwise", rules=[("0", "rowwise")]).converted == ("0", "1")
    with pytest.raises(ValueError, match="measured slower"):
        octavo.convert(nn.Sequential(nn.Linear(32, 32)))


def test_a_malformed_table_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sm_90.json").write_text(json.dumps({"run": "r", "slower": {"mxfp8": [[1, 0]]}}))
    monkeypatch.setattr(sizes, "TABLES", tmp_path)
    sizes.load.cache_clear()
    with pytest.raises(ValueError, match="mxfp8 must list pairs"):
        sizes.load("sm_90")
    sizes.load.cache_clear()


def _linear(**ms: tuple[float, float]) -> dict[str, Any]:
    cases = [
        {"group": "rowwise, default accumulation", "case": f"bf16 wo 8192x{size[1:].replace('_', 'x')}",
         "ms": {"octavo": octavo_ms, "aten": aten_ms}, "checked": True}
        for size, (octavo_ms, aten_ms) in ms.items()
    ]  # fmt: skip
    machine = {"gpu": "NVIDIA H200"}
    return {"suite": "linear", "date": "2026-01-01", "machine": machine, "cases": cases}


def test_the_table_keeps_the_largest_losses_with_no_win_below() -> None:
    content = _linear(s512_512=(2.0, 1.0), s1024_512=(2.0, 1.0), s4096_4096=(1.0, 2.0), s4096_8192=(3.0, 2.0))
    found = sizes_table.measured(content)["rowwise"]
    assert found[1024, 512]
    assert not found[4096, 4096]
    assert sizes_table.largest_losses(found) == [(1024, 512)]


def test_the_committed_table_follows_from_the_committed_results(tmp_path: Path) -> None:
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    made = sizes_table.write(results, tmp_path, "sm_90")
    assert json.loads(made.read_text()) == json.loads((sizes.TABLES / "sm_90.json").read_text())
    assert sizes.load("sm_90")["mxfp8"] == ((4096, 4096),)
