"""The claim of the FP8 recipes: the loss of high precision, with most of the work in 8 bits."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from octavo.trainer import job
from octavo.trainer.config import TrainConfig

RECIPES = ("rowwise", "blockwise", "mxfp8")


@pytest.mark.slow
@pytest.mark.timeout(2400)  # four trainings, minutes each on a slow core
def test_two_hundred_steps_end_within_one_percent_of_bf16(tmp_path: Path) -> None:
    config = TrainConfig(
        recipes=("bf16", *RECIPES), baseline="bf16", steps=200, batch_size=4, out=tmp_path / "out"
    )
    corpus = job.prepare(config)
    assert job.run(config, corpus, Console(file=StringIO()), command="octavo train") == 0

    runs = {run["recipe"]: run for run in json.loads((config.out / "report.json").read_text())["runs"]}
    exact = runs["bf16"]
    assert len(exact["loss"]) == 200
    assert exact["final_loss"] < 2.5 < 5.0 < exact["loss"][0]
    for recipe in RECIPES:
        run = runs[recipe]
        assert run["fp8_flops_share"] >= 0.8, recipe
        assert run["loss"] != exact["loss"], recipe
        assert abs(run["final_loss_difference_percent"]) < 1.0, recipe
        assert abs(run["validation_loss_difference_percent"]) < 1.0, recipe
