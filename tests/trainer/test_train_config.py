"""Every request that cannot be met is refused with one line that says what to do."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.trainer.config import TrainConfig, UserError, check_writable

Job = Callable[..., TrainConfig]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, r"--steps is 0: give a number of at least 1"),
        ({"seq_len": 0}, r"--seq-len is 0"),
        ({"batch_size": -3}, r"--batch-size is -3"),
        ({"lr": 0.0}, r"--lr is 0.0: give a finite number above 0"),
        ({"lr": math.nan}, r"--lr is nan"),
        ({"lr": math.inf}, r"--lr is inf"),
        ({"clip": -1.0}, r"--clip is -1.0"),
        ({"weight_decay": -0.1}, r"--weight-decay is -0.1"),
        ({"warmup": 5}, r"--warmup is 5: give a number from 0 to --steps, which is 4"),
        ({"seed": -1}, r"--seed is -1"),
        ({"seq_len": 65}, r"--seq-len is 65 but tiny takes at most 64"),
        ({"model": "llama4"}, r"unknown model 'llama4': choose one of llama3-debug, llama3-100m"),
        ({"recipes": ("fp4",)}, r"unknown recipe 'fp4': choose from .*rowwise"),
        ({"recipes": ("bf16", "rowwise", "bf16")}, r"recipe 'bf16' is given more than once"),
        ({"dtype": "float16"}, r"--dtype is 'float16': choose one of float32, bfloat16"),
        ({"device": "tpu"}, r"--device is 'tpu': give cpu"),
        ({"device": "meta"}, r"--device is 'meta': give cpu"),
    ],
    ids=lambda value: ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_refused(job: Job, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        job(**changes).check()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "recipe", ["bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8"]
)
def test_every_recipe_is_known(job: Job, recipe: str) -> None:
    job(recipes=(recipe,)).check()


def test_a_gpu_is_refused_where_there_is_none(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match=r"PyTorch sees no GPU here: use --device cpu"):
        job(device="cuda").check()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match=r"there are 2 GPUs: use cuda:0 to cuda:1"):
        job(device="cuda:2").check()


def test_a_model_larger_than_memory_is_refused(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 24 * 2**18}.__getitem__)
    with pytest.raises(
        UserError, match=r"llama3-8b needs about 120 GiB .* has 24 GiB: choose a smaller model"
    ):
        job(model="llama3-8b").check()
    job(model="llama3-1b").check()  # 18 GiB


def test_learning_rate_rises_to_its_top_and_falls_to_its_floor(job: Job) -> None:
    config = job(steps=20, warmup=4, lr=1.0, min_lr=0.1)
    rates = [config.learning_rate(step) for step in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[3:]))
    assert rates[-1] == pytest.approx(0.1)


def test_learning_rate_without_warmup_and_with_one_step(job: Job) -> None:
    assert job(steps=1).learning_rate(0) == pytest.approx(1e-3)
    assert job(steps=3, warmup=0, lr=1.0).learning_rate(0) < 1.0
    assert job(steps=3, warmup=3, lr=1.0).learning_rate(2) == 1.0


def test_a_folder_is_made_and_left_empty(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_file_in_the_way_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(UserError, match=r"cannot write to .*give another folder with --out"):
            check_writable(out)
