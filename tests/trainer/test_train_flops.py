"""FLOPs are counted as they run, attention included."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from octavo.trainer import data, flops
from octavo.trainer.config import TrainConfig
from octavo.trainer.loop import build_model, next_token_loss

Job = Callable[..., TrainConfig]


def step_flops(config: TrainConfig, recipe: str) -> dict[str, int]:
    model, _ = build_model(config, recipe)
    batch = data.Batches(data.load(config.data, config.seq_len).train, config.seq_len, config.batch_size, 0)(
        0
    )
    return flops.count(lambda: next_token_loss(model, batch, torch.device("cpu")).backward())


def test_attention_is_counted_with_shared_key_heads() -> None:
    q = torch.randn(2, 8, 16, 32, requires_grad=True)
    k, v = (torch.randn(2, 4, 16, 32, requires_grad=True) for _ in range(2))

    def step() -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).sum().backward()

    product = 2 * 2 * 8 * 16 * 16 * 32  # B H S S E multiply-adds
    assert sum(flops.count(step).values()) == (2 + 5) * product


def test_a_step_is_two_passes_backward_for_one_forward(job: Job) -> None:
    config = job()
    tokens, layers = 4 * 32, 2
    linears = layers * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128) + 64 * 256
    attention = layers * 4 * 4 * 32 * 32 * 16  # layers B H S S E
    assert sum(step_flops(config, "bf16").values()) == 3 * 2 * tokens * linears + 7 * 2 * attention


def test_a_recipe_moves_flops_to_fp8_and_adds_none(job: Job) -> None:
    config = job()
    exact, fp8 = step_flops(config, "bf16"), step_flops(config, "rowwise")
    assert sum(fp8.values()) == sum(exact.values())
    assert flops.fp8_share(exact) == 0.0
    head = 3 * 2 * 128 * 64 * 256
    attention = 7 * 2 * 2 * 4 * 4 * 32 * 32 * 16
    assert flops.fp8_share(fp8) == pytest.approx(1 - (head + attention) / sum(exact.values()))


def test_a_weight_gradient_in_high_precision_is_not_counted_as_fp8(job: Job) -> None:
    every, without = (flops.fp8_share(step_flops(job(), name)) for name in ("rowwise", "rowwise_with_gw_hp"))
    assert without == pytest.approx(every * 2 / 3)


def test_share_of_nothing_is_zero() -> None:
    assert flops.fp8_share({}) == 0.0
