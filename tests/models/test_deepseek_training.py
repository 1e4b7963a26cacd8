"""DeepSeek's models in the trainer: balanced after each step, in 8 bits, resumed exactly, compiled."""

from __future__ import annotations

import dataclasses
import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import octavo
from octavo import models
from octavo.models import DeepSeekConfig
from octavo.models.latent_attention import LatentConfig, YarnScaling, yarn_table
from octavo.models.mixture import MixtureConfig, Router
from octavo.trainer import data, flops, job
from octavo.trainer.config import TrainConfig
from octavo.trainer.loop import Trainer, build_model, next_token_loss

TINY = DeepSeekConfig(
    dim=64,
    n_layers=3,
    n_heads=4,
    ffn_dim=128,
    dense_layers=1,
    mixture=MixtureConfig(
        experts=8,
        active=2,
        ffn_dim=64,
        shared=1,
        score="sigmoid",
        groups=4,
        active_groups=2,
        normalized=True,
        scale=2.5,
        balance_rate=0.001,
    ),
    latent=LatentConfig(q_rank=32, kv_rank=32, nope_dim=16, rope_dim=16, v_dim=16),
    vocab_size=256,
    max_seq_len=64,
    yarn=YarnScaling(factor=4.0, original_seq_len=32),
    initial_std=0.02,
)
TEXT = "".join(f"{n} barrels of rum; drink {n % 7}, {n - n % 7} are left.\n" for n in range(300))


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Makes jobs of a few steps of the model "tiny"."""
    monkeypatch.setitem(models.PRESETS, "tiny", TINY)
    (tmp_path / "text.txt").write_text(TEXT)

    def make(**changes: Any) -> TrainConfig:
        usual: dict[str, Any] = {
            "model": "tiny",
            "data": tmp_path / "text.txt",
            "steps": 4,
            "seq_len": 32,
            "batch_size": 4,
            "out": tmp_path / "out",
        }
        return TrainConfig(**(usual | changes))

    return make


def trainer(config: TrainConfig, recipe: str = "bf16") -> Trainer:
    return Trainer(config, recipe, data.load(config.data, config.seq_len))


def routers(model: torch.nn.Module) -> list[Router]:
    return [m for m in model.modules() if isinstance(m, Router)]


def test_a_step_of_the_trainer_moves_the_biases_once(config: Any) -> None:
    run = trainer(config())
    assert all(r.tokens_per_expert.sum() == 0 for r in routers(run.model))  # counting FLOPs leaves no trace
    run.step(0)
    for r in routers(run.model):
        assert r.expert_bias is not None
        assert 0 < r.expert_bias.abs().max().item() <= 0.001 * 1.0001
        assert r.tokens_per_expert.sum() == 0


def test_parts_of_a_batch_are_counted_together(config: Any) -> None:
    whole, parts = trainer(config()), trainer(config(grad_accum=4))
    whole.backward(0)
    parts.backward(0)
    for a, b in zip(routers(whole.model), routers(parts.model), strict=True):
        assert a.tokens_per_expert.sum() == 4 * 32 * 2
        # A token at the edge may be sent elsewhere where sums are taken in another order.
        assert (a.tokens_per_expert - b.tokens_per_expert).abs().sum() <= 4


def test_recomputation_moves_the_biases_as_without_it(config: Any) -> None:
    plain, again = trainer(config()), trainer(config(activation_checkpoint=True))
    for number in range(2):
        assert plain.step(number).loss == again.step(number).loss
    for a, b in zip(routers(plain.model), routers(again.model), strict=True):
        assert torch.equal(a.expert_bias, b.expert_bias)  # type: ignore[arg-type]


def test_a_bias_is_part_of_the_state_and_so_of_a_resumed_run(config: Any) -> None:
    names = trainer(config()).state()["model"].keys()
    assert {n for n in names if n.endswith("expert_bias")} == {
        f"layers.{n}.moe.router.expert_bias" for n in (1, 2)
    }
    exact, resumed = trainer(config()), trainer(config())
    for number in range(2):
        exact.step(number)
    state = {n: t.clone() for n, t in exact.state()["model"].items()}
    resumed.model.load_state_dict(state)
    resumed.optimizer.load_state_dict(exact.optimizer.state_dict())
    assert exact.step(2).loss == resumed.step(2).loss
    for a, b in zip(routers(exact.model), routers(resumed.model), strict=True):
        assert torch.equal(a.expert_bias, b.expert_bias)  # type: ignore[arg-type]


def test_flops_of_the_experts_are_those_of_the_tokens_sent_to_them(config: Any) -> None:
    found = step_flops(config(), "bf16")
    tokens, m, latent = 4 * 32, TINY.mixture, TINY.latent
    assert latent is not None
    experts = 2 * tokens * m.active * 3 * 64 * 64
    shared_router_dense = 2 * (3 * 64 * 64 + 64 * 8) + 3 * 64 * 128
    queries = 64 * 32 + 32 * 4 * 32
    keys = 64 * (32 + 16) + 32 * 4 * 32
    linears = shared_router_dense + 3 * (queries + keys + 64 * 64) + 64 * 256
    products = 3 * 2 * (experts + tokens * linears)
    attention = sum(found.values()) - products
    # Q K^T of width 32 and P V of 16: computed as bare products, whose backward has two each.
    assert attention == 3 * 3 * 2 * 4 * 4 * 32 * 32 * (32 + 16)


def step_flops(config: TrainConfig, recipe: str) -> dict[str, int]:
    model, _ = build_model(config, recipe)
    batch = data.Batches(data.load(config.data, config.seq_len).train, config.seq_len, config.batch_size, 0)(
        0
    )
    return flops.count(lambda: next_token_loss(model, batch, torch.device("cpu")).backward())


def test_padding_of_groups_is_not_counted_as_work() -> None:
    x, w = torch.randn(100, 64, requires_grad=True), torch.randn(8, 64, 32, requires_grad=True)
    offs = torch.tensor([10, 10, 40, 55, 60, 61, 90, 100], dtype=torch.int32)
    for recipe, align in (("rowwise", 16), ("mxfp8", 32), ("blockwise", 128)):
        found = flops.count(
            lambda recipe=recipe: octavo.grouped_mm(x, w, offs, recipe=recipe).sum().backward()
        )
        least = 3 * 2 * 100 * 64 * 32
        assert least <= found["octavo.scaled_grouped_mm"] < least + 2 * align * 64 * 32, recipe


@pytest.mark.slow
def test_a_block_with_experts_compiles_into_one_graph() -> None:
    model = TINY.build()
    model.init_weights(0)
    block = model.layers[1]
    x = torch.randn(2, 32, 64)
    cos, sin = yarn_table(16, 10_000.0, TINY.yarn, 32, x.device)
    expected = block(x, cos, sin)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, cos, sin), expected, rtol=1e-5, atol=1e-5)
    (router,) = routers(block)
    assert router.tokens_per_expert.sum() == 2 * 64 * 2  # eager and compiled counted the same


def test_a_bfloat16_model_gives_logits_near_those_of_float32() -> None:
    # Every expert active: what is chosen would differ at the edges and not by rounding.
    config = dataclasses.replace(
        TINY, mixture=dataclasses.replace(TINY.mixture, active=8, groups=1, active_groups=1)
    )
    exact, short = config.build(), config.build(dtype=torch.bfloat16)
    exact.init_weights(0)
    short.init_weights(0)
    tokens = torch.randint(0, 256, (2, 32))
    logits = short(tokens)
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - exact(tokens)).norm() / exact(tokens).norm() < 0.03


@pytest.mark.slow
def test_two_hundred_steps_end_within_one_percent_of_bf16(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(models.PRESETS, "tiny", dataclasses.replace(TINY, n_layers=2))
    settings = config(data=None, recipes=("bf16", "rowwise"), baseline="bf16", steps=200, batch_size=2)
    assert job.run(settings, job.prepare(settings), Console(file=StringIO()), command="octavo train") == 0
    exact, fp8 = json.loads((settings.out / "report.json").read_text())["runs"]
    assert (exact["recipe"], fp8["recipe"]) == ("bf16", "rowwise")
    assert len(exact["loss"]) == 200
    assert exact["final_loss"] < 0.6 * exact["loss"][0]
    assert fp8["loss"] != exact["loss"]
    assert abs(fp8["final_loss_difference_percent"]) < 1.0
    # All but the output head, the router and attention's own products.
    assert fp8["fp8_flops_share"] > 0.7
    assert "octavo.grouped_mm" in exact["flops_per_step"]
    assert "octavo.grouped_mm" not in fp8["flops_per_step"]
