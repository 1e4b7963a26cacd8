"""The examples run as they stand, with small settings, and do what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run(name: str, *arguments: Any, launch: tuple[str, ...] = ()) -> str:
    """What the example printed."""
    command = [sys.executable, *launch, str(EXAMPLES / name), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(printed: str) -> list[float]:
    return [float(found) for found in re.findall(r"loss:? (\d+\.\d+)", printed)]


def test_the_readme_names_every_example() -> None:
    named = set(re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text()))
    assert named == {path.name for path in EXAMPLES.glob("*.py")}


@pytest.mark.slow
def test_pretraining_on_two_processes_learns_and_saves_a_model_that_others_load(tmp_path: Path) -> None:
    import transformers

    printed = run(
        "pretrain_from_scratch.py", "--steps", 20, "--width", 64, "--length", 64, "--batch", 4, "--out", tmp_path,
        launch=TORCHRUN,
    )  # fmt: skip
    assert printed.count("14 converted, 1 left alone") == 1  # by the first process alone
    assert 2.0 < losses(printed)[-1] < 4.5  # of 5.5, which is the loss of guessing among 256 bytes
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.hidden_size == 64


@pytest.mark.slow
def test_fine_tuning_learns_and_saves_the_adapter_and_the_merged_model(tmp_path: Path) -> None:
    import peft
    import transformers

    data = tmp_path / "text.txt"
    data.write_text("one two three four five six seven eight nine ten\n" * 60)
    printed = run(
        "finetune_lora.py",
        "--steps",
        8,
        "--length",
        64,
        "--lr",
        0.02,
        "--data",
        data,
        "--out",
        tmp_path / "out",
    )
    before, after = map(float, re.findall(r"(\d+\.\d+) (?:before|after)", printed))
    assert after < 0.9 * before  # the base and the head are random and frozen
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "merged")
    assert peft.PeftConfig.from_pretrained(tmp_path / "out").r == 8
    assert merged.config.vocab_size == 256


@pytest.mark.slow
def test_a_recipe_of_ones_own_trains_like_float32() -> None:
    printed = run("custom_recipe.py", "--width", 64, "--blocks", 3, "--steps", 20)
    assert "2 converted, 5 left alone" in printed
    ours, exact = map(float, re.findall(r"(\d+\.\d+) (?:by the recipe|in float32)", printed))
    assert ours == pytest.approx(exact, rel=0.02)


@pytest.mark.slow
def test_a_model_of_ones_own_trains_like_bf16() -> None:
    printed = run("custom_model.py", "--width", 64, "--steps", 15)
    assert "mlp.0: its projections run as one function" in printed
    exact, ours = losses(printed)
    assert ours == pytest.approx(exact, rel=0.1)
    assert ours < 1.0
