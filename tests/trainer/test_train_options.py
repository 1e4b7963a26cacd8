"""Accumulation, recomputation, compilation and MFU: the same training in another shape, and its numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from resume_support import Job, run

from octavo.trainer import data, flops, loop, peaks
from octavo.trainer.peaks import PEAKS


@pytest.mark.parametrize("parts", [2, 4])
def test_a_batch_in_parts_is_the_batch(job: Job, parts: int) -> None:
    whole = run(job(steps=6)).runs["bf16"]
    split = run(job(steps=6, grad_accum=parts)).runs["bf16"]
    assert split["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    assert split["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-4)
    assert split["flops_per_step"] == whole["flops_per_step"]


def test_a_batch_in_parts_quantizes_by_part_but_little_apart(job: Job) -> None:
    whole = run(job(recipes=("rowwise",), steps=6)).losses["rowwise"]
    split = run(job(recipes=("rowwise",), steps=6, grad_accum=4)).losses["rowwise"]
    assert split == pytest.approx(whole, rel=2e-3)


@pytest.mark.parametrize("recipe", ["bf16", "rowwise", "mxfp8"])
def test_recomputing_changes_no_bit(job: Job, recipe: str) -> None:
    plain = run(job(recipes=(recipe,))).runs[recipe]
    recomputed = run(job(recipes=(recipe,), activation_checkpoint=True)).runs[recipe]
    for name in ("loss", "grad_norm", "validation_loss", "flops_per_step"):
        assert recomputed[name] == plain[name], name


@pytest.mark.slow
def test_compiled_blocks_train_alike(job: Job) -> None:
    changes: dict[str, Any] = {"recipes": ("rowwise",), "steps": 3, "eval_every": 2}
    plain = run(job(**changes)).runs["rowwise"]
    compiled = run(job(**changes, compile=True, activation_checkpoint=True)).runs["rowwise"]
    assert compiled["status"] == "finished"
    assert compiled["loss"] == pytest.approx(plain["loss"], rel=2e-3)
    assert compiled["validation_loss"] == pytest.approx(plain["validation_loss"], rel=2e-3)


def test_flops_of_a_step_are_those_of_its_whole_batch(job: Job) -> None:
    """The tiny model by hand: 128 tokens, two layers of width 64 with two key heads of 16, MLP 128."""
    config = job()
    trainer = loop.Trainer(config, "rowwise", data.load(config.data, config.seq_len))
    linear = 2 * (64 * 64 + 32 * 64 + 32 * 64 + 64 * 64 + 3 * 64 * 128)
    fp8 = 3 * 2 * 128 * linear
    head = 3 * 2 * 128 * 64 * 256
    attention = 7 * 2 * 2 * 4 * 4 * 32 * 32 * 16  # products, multiply-add, layers, B, heads, S, S, width
    assert sum(trainer.flops.values()) == fp8 + head + attention
    assert sum(n for name, n in trainer.flops.items() if name in flops.FP8_OPERATORS) == fp8
    assert flops.fp8_share(trainer.flops) == pytest.approx(fp8 / (fp8 + head + attention))


def test_mfu_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """5 ms at the BF16 peak and 5 ms at the FP8 peak of an H100, done in 25 ms, are 40%."""
    h100 = PEAKS["H100"]
    assert h100.fp8
    work = {
        "aten.mm": int(3e-3 * h100.bf16 * 1e12),
        "aten._scaled_dot_product_flash_attention": int(2e-3 * h100.bf16 * 1e12),
        "octavo.scaled_mm": int(4e-3 * h100.fp8 * 1e12),
        "octavo.scaled_grouped_mm": int(1e-3 * h100.fp8 * 1e12),
    }
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    gpu = torch.device("cuda:0")
    assert peaks.mfu(work, 25e-3, gpu, torch.bfloat16) == pytest.approx(0.4)
    # All at the one peak of BF16 it would be 60%: twice the rate counts for twice the work there.
    assert sum(work.values()) / (25e-3 * h100.bf16 * 1e12) == pytest.approx(0.6, rel=1e-3)
    assert peaks.mfu(work, 25e-3, torch.device("cpu"), torch.bfloat16) is None
    assert peaks.mfu({}, 25e-3, gpu, torch.bfloat16) is None


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H200 NVL", "H200 NVL"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("AMD Instinct MI300X", "MI300X"),
        ("AMD Instinct MI355X", "MI355X"),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_a_card_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch, name: str, part: str | None) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peaks.peak_of(torch.device("cuda")) == (PEAKS[part] if part else None)


def test_a_card_without_fp8_has_no_mfu_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    gpu = torch.device("cuda")
    assert peaks.mfu({"octavo.scaled_mm": 10**12}, 1.0, gpu, torch.bfloat16) is None
    assert peaks.mfu({"aten.mm": 312 * 10**9}, 1e-2, gpu, torch.bfloat16) == pytest.approx(0.1)
