"""A model small enough to train in a test, and jobs for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_support import Content, run_of

from octavo import models
from octavo.models import Llama3Config
from octavo.trainer import data, report
from octavo.trainer.config import TrainConfig
from octavo.trainer.records import Run

TINY = Llama3Config(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=128, vocab_size=256, max_seq_len=64)
TEXT = "".join(
    f"{n} bottles of beer on the wall, {n} bottles of beer; take {n % 7} down.\n" for n in range(200)
)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A text file of about 14 kB."""
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch, text: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    """Makes configurations of a few steps of the model "tiny"."""
    monkeypatch.setitem(models.PRESETS, "tiny", TINY)

    def make(**changes: Any) -> TrainConfig:
        usual: dict[str, Any] = {
            "model": "tiny",
            "recipes": ("bf16",),
            "data": text,
            "steps": 4,
            "seq_len": 32,
            "batch_size": 4,
            "out": tmp_path / "out",
        }
        return TrainConfig(**(usual | changes))

    return make


@pytest.fixture
def content(job: Callable[..., TrainConfig]) -> Content:
    """Makes the data of a report from runs."""

    def make(*runs: Run, command: str = "octavo train", **changes: Any) -> dict[str, Any]:
        config = job(recipes=tuple(run.recipe for run in runs), steps=50, **changes)
        corpus = data.load(config.data, config.seq_len)
        return report.as_data(config, corpus, list(runs), command) | {"date": "2026-01-02T03:04:05Z"}

    return make


@pytest.fixture
def compared(content: Content) -> dict[str, Any]:
    """bf16 and rowwise, 50 steps."""
    exact = [5.0 / (1 + 0.1 * i) for i in range(50)]
    return content(run_of("bf16", exact), run_of("rowwise", [1.01 * v for v in exact]), baseline="bf16")
