"""Whole jobs for tests of checkpoints: what they print, what they leave, and how two of them compare."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console

from octavo.trainer import job as jobs
from octavo.trainer import loop, report, tensors
from octavo.trainer.config import TrainConfig

Job = Callable[..., TrainConfig]
COMMAND = "octavo train --test"


@dataclass
class Done:
    """How a job ended."""

    status: int
    shown: str
    runs: dict[str, dict[str, Any]]

    @property
    def losses(self) -> dict[str, list[float]]:
        return {recipe: run["loss"] for recipe, run in self.runs.items()}

    def line(self, part: str) -> str:
        """The one printed line that has ``part`` in it."""
        lines = [line for line in self.shown.splitlines() if part in line]
        assert len(lines) == 1, (part, self.shown)
        return lines[0]


def _only_json(config: TrainConfig, corpus: Any, runs: Any, command: str) -> list[Path]:
    content = report.as_data(config, corpus, runs, command)
    report.write_json(content, config.out / "report.json")
    return [config.out / "report.json"]


def run(config: TrainConfig) -> Done:
    """A whole job, with its plots left out."""
    output = StringIO()
    corpus = jobs.prepare(config)
    with mock.patch.object(jobs, "write", _only_json):
        status = jobs.run(config, corpus, Console(file=output, width=100), command=COMMAND)
    content = json.loads((config.out / "report.json").read_text())
    return Done(status, output.getvalue(), {run["recipe"]: run for run in content["runs"]})


def stop_after(step: int) -> Callable[[Any, int], Any]:
    """A ``Trainer.step`` that is interrupted like by Ctrl-C twice, after ``step`` steps."""
    original = loop.Trainer.step

    def changed(self: Any, number: int) -> Any:
        if number == step:
            raise KeyboardInterrupt
        return original(self, number)

    return changed


def state(folder: Path, config: TrainConfig, recipe: str) -> dict[str, torch.Tensor]:
    """Every tensor of the newest checkpoint of ``recipe`` in ``folder``, flat."""
    from octavo.trainer import data

    newest = max((folder / recipe).glob("step-????????"))
    corpus = data.load(config.data, config.seq_len, config.tokenizer)
    nested = loop.Trainer(config, recipe, corpus).state()
    nested = {
        group: {name: torch.empty_like(t) for name, t in part.items()} for group, part in nested.items()
    }
    tensors.load(nested, newest)
    return {f"{group}.{name}": t for group, part in nested.items() for name, t in part.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether two states are the same bits."""
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)
