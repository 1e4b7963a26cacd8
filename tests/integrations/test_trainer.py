"""``transformers.Trainer`` under DDP on two processes, with PEFT and without: no helper, the loss of BF16."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import trainer_ranks
from hf_models import build, tokens

import octavo

SCRIPT = Path(trainer_ranks.__file__)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Where two ranks trained, and what each of them wrote."""
    out = tmp_path_factory.mktemp("trainer")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT), str(out)]
    done = subprocess.run(
        [sys.executable, *launch], capture_output=True, text=True, env=environment, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out, [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(trainer_ranks.RUNS))
def test_loss_is_that_of_bf16_and_the_ranks_agree(kind: str, seen: tuple[Path, list[Any]]) -> None:
    for rank in seen[1]:
        high, low = rank[kind]["bf16"], rank[kind]["rowwise"]
        assert low["wrapped"] == high["wrapped"] == "DistributedDataParallel"
        assert (high["converted"], low["converted"]) == (0, 14)
        assert low["ranks_agree"]
        assert len(low["losses"]) == trainer_ranks.RUNS[kind]
        assert low["losses"] == pytest.approx(high["losses"], rel=0.01)
        assert low["losses"] != high["losses"]
        assert low["eval_loss"] == pytest.approx(high["eval_loss"], rel=0.01)
        assert low["losses"][-1] < 0.9 * low["losses"][0]


@pytest.mark.slow
def test_the_frozen_base_is_quantized_once_and_a_trained_one_at_every_step(
    seen: tuple[Path, list[Any]],
) -> None:
    for rank in seen[1]:
        lora, full = rank["lora"]["rowwise"], rank["full"]["rowwise"]
        assert lora["frozen_with_gradient"] == 0
        assert (lora["adapters_alone"], full["adapters_alone"]) == (True, False)
        assert lora["weight_quantizations"] == [28, *[0] * (trainer_ranks.RUNS["lora"] - 1)]
        # q, k, v, o and down by themselves, gate and up joined elsewhere; both directions, once for two
        # micro-batches
        assert full["weight_quantizations"] == [20] * trainer_ranks.RUNS["full"]


@pytest.mark.slow
def test_what_the_trainer_saved_loads_into_plain_and_converted_models(seen: tuple[Path, list[Any]]) -> None:
    import transformers

    out, x = seen[0], tokens()
    for kind, steps in trainer_ranks.RUNS.items():
        saved = out / kind / "rowwise" / f"checkpoint-{steps}"
        if kind == "lora":
            model: Any = peft.PeftModel.from_pretrained(build("llama"), saved)
        else:
            model = transformers.AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
        plain = model(input_ids=x, labels=x).loss.item()
        report = octavo.convert(model)
        assert len(report.converted) == 14
        assert model(input_ids=x, labels=x).loss.item() == pytest.approx(plain, rel=0.01)
