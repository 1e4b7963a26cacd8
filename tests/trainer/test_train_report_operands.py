"""Operands watched during a run: the same training, bit for bit, and series of what was seen."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from octavo.errors import UserError
from octavo.trainer import data, operand_stats
from octavo.trainer.config import TrainConfig
from octavo.trainer.loop import train
from octavo.trainer.records import Run, Step
from octavo.trainer.watchers import watchers

Job = Callable[..., TrainConfig]


def run_of(config: TrainConfig, recipe: str) -> Run:
    return train(config, recipe, data.load(config.data, config.seq_len), lambda step: None)


@pytest.mark.parametrize("recipe", ["rowwise", "mxfp8", "blockwise", "tensorwise"])
def test_watching_changes_no_loss_and_no_gradient(job: Job, recipe: str) -> None:
    runs = [run_of(job(monitor_every=every, grad_accum=2), recipe) for every in (0, 1, 3)]
    for run in runs[1:]:
        assert run.losses == runs[0].losses
        assert [s.grad_norm for s in run.steps] == [s.grad_norm for s in runs[0].steps]
        assert run.validation_loss == runs[0].validation_loss
    assert [[s.number for s in run.steps if s.operands] for run in runs] == [[], [1, 2, 3, 4], [3]]


def test_a_watched_step_says_nothing_of_memory(job: Job) -> None:
    steps = run_of(job(monitor_every=2, steps=4), "rowwise").steps
    peaks = [step.peak_memory for step in steps]
    assert all(isinstance(peak, int) for peak in peaks)
    assert peaks[1] == peaks[0]
    assert peaks[3] == peaks[2]


def test_every_layer_has_its_six_operands_over_the_steps(job: Job) -> None:
    run = run_of(job(monitor_every=2), "rowwise")
    found = operand_stats.over_steps(run.steps)
    assert found["steps"] == [2, 4]
    assert len(found["layers"]) == 14
    for products in found["layers"].values():
        assert {(p, o) for p, operands in products.items() for o in operands} == {
            *(("output", "input"), ("output", "weight")),
            *(("grad_input", "grad_output"), ("grad_input", "weight")),
            *(("grad_weight", "grad_output"), ("grad_weight", "input")),
        }
        for operands in products.values():
            for series in operands.values():
                assert set(series) == set(operand_stats.MEASURES)
                assert all(len(values) == 2 for values in series.values())
                assert all(20 < value < 45 for value in series["sqnr_db"])
                assert all(0 <= value < 0.2 for value in series["underflowed"])


def test_a_recipe_without_quantized_products_has_nothing_to_watch(job: Job) -> None:
    run = run_of(job(monitor_every=1, steps=1), "bf16")
    assert operand_stats.over_steps(run.steps) == {"steps": [], "layers": {}}


def test_a_layer_seen_on_some_steps_has_gaps() -> None:
    def operand(layer: str, amax: float) -> dict[str, object]:
        names = {"layer": layer, "product": "output", "operand": "input"}
        return names | dict.fromkeys(operand_stats.MEASURES, 0.0) | {"amax": amax}

    steps = [
        Step(n, 1.0, 1.0, 1.0, 1.0, operands=o) for n, o in enumerate(([operand("a", 1.0)], None, []), 1)
    ]
    found = operand_stats.over_steps(steps)
    assert found["steps"] == [1, 3]
    assert found["layers"]["a"]["output"]["input"]["amax"] == [1.0, None]


@pytest.mark.parametrize(
    ("changes", "every"),
    [
        ({}, 0),
        ({"baseline": "bf16", "steps": 1000}, 100),
        ({"baseline": "bf16", "steps": 20}, 5),
        ({"baseline": "bf16", "monitor_every": 0}, 0),
        ({"monitor_every": 3}, 3),
    ],
)
def test_a_comparison_is_watched_ten_times_unless_said_otherwise(changes: dict, every: int) -> None:
    assert TrainConfig(**changes).monitor_steps == every


def test_a_negative_interval_is_refused(job: Job) -> None:
    with pytest.raises(UserError, match=r"--monitor-every is -1: give 0 for none"):
        job(monitor_every=-1).check()


def test_the_log_and_tensorboard_get_what_was_seen(job: Job, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra that writes for TensorBoard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = job(monitor_every=2, log=tmp_path / "log.jsonl", tensorboard=tmp_path / "board", steps=2)
    torch.manual_seed(0)
    with watchers(config, "rowwise", 0) as followers:
        train(
            config,
            "rowwise",
            data.load(config.data, config.seq_len),
            lambda step: [follow(step) for follow in followers] and None,
        )
    first, second = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    assert first["operands"] is None
    assert len(second["operands"]) == 14 * 6
    board = EventAccumulator(str(tmp_path / "board" / "rowwise")).Reload()
    names = [n for n in board.Tags()["scalars"] if n.startswith("sqnr_db/")]
    assert len(names) == 14 * 6
    assert [event.step for event in board.Scalars(names[0])] == [2]
