"""The loop: repeatable, learning, and stopping before a number that is none reaches the weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from octavo.trainer import data, loop
from octavo.trainer.config import TrainConfig
from octavo.trainer.loop import build_model, train
from octavo.trainer.optimizer import MasterAdamW
from octavo.trainer.records import Run, Step

Job = Callable[..., TrainConfig]


def losses(config: TrainConfig, recipe: str = "bf16") -> list[float]:
    run = train(config, recipe, data.load(config.data, config.seq_len), lambda step: None)
    assert run.status == "finished"
    return run.losses


@pytest.mark.parametrize("recipe", ["bf16", "rowwise"])
def test_the_same_seed_gives_the_same_bits(job: Job, recipe: str) -> None:
    assert losses(job(), recipe) == losses(job(), recipe)


def test_another_seed_gives_other_weights_and_text(job: Job) -> None:
    assert losses(job(seed=1)) != losses(job(seed=2))


def test_recipes_start_from_the_same_weights(job: Job) -> None:
    exact, fp8 = build_model(job(), "bf16")[0].state_dict(), build_model(job(), "rowwise")[0].state_dict()
    assert list(exact) == list(fp8)
    assert all(torch.equal(exact[name], fp8[name]) for name in exact)


def test_a_recipe_changes_the_losses_but_little(job: Job) -> None:
    exact, fp8 = losses(job(steps=8)), losses(job(steps=8), "rowwise")
    assert exact != fp8
    assert fp8 == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_learns(job: Job, dtype: str) -> None:
    config = job(steps=40, dtype=dtype, lr=4e-3)
    run = train(config, "bf16", data.load(config.data, config.seq_len), lambda step: None)
    assert run.losses[0] > 5.0
    assert run.final_loss is not None
    assert run.final_loss < 3.0
    assert run.validation_loss is not None
    assert run.validation_loss < 3.5


def test_every_step_is_reported_as_it_ends(job: Job) -> None:
    config, seen = job(), []
    run = train(config, "bf16", data.load(config.data, config.seq_len), seen.append)
    assert [step.number for step in seen] == [1, 2, 3, 4]
    assert seen == run.steps
    assert [step.learning_rate for step in seen] == [config.learning_rate(n) for n in range(4)]
    assert all(step.seconds > 0 and step.grad_norm > 0 for step in seen)


def test_a_non_finite_loss_stops_before_it_reaches_the_weights(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, models_built = job(steps=6), []
    build, loss = loop.build_model, loop.next_token_loss
    calls = iter(range(100))

    def poisoned(*args: object) -> torch.Tensor:
        value = loss(*args)  # type: ignore[arg-type]
        return value * float("nan") if next(calls) == 3 else value  # call 0 counts FLOPs, so this is step 3

    def remember(*args: object) -> tuple[nn.Module, int]:
        models_built.append(build(*args))  # type: ignore[arg-type]
        return models_built[-1]

    monkeypatch.setattr(loop, "next_token_loss", poisoned)
    monkeypatch.setattr(loop, "build_model", remember)
    run = train(config, "bf16", data.load(config.data, config.seq_len), lambda step: None)
    assert (run.status, len(run.steps), run.validation_loss) == ("non-finite", 3, None)
    assert all(torch.isfinite(p).all() for p in models_built[0][0].parameters())


def test_an_interruption_keeps_the_steps_done(job: Job) -> None:
    def stop(step: Step) -> None:
        if step.number == 2:
            raise KeyboardInterrupt

    run = train(job(), "bf16", data.load(job().data, 32), stop)
    assert (run.status, len(run.steps)) == ("interrupted", 2)


def test_bfloat16_weights_are_updated_through_float32_masters() -> None:
    weight = nn.Parameter(torch.full((4, 4), 256.0, dtype=torch.bfloat16))
    optimizer = MasterAdamW([("w", weight)], weight_decay=0.0)
    for _ in range(
        6
    ):  # bfloat16 counts by 2 above 256 and by 1 below: a step of 0.3 would round away each time
        weight.grad = torch.ones_like(weight)
        optimizer.clip(1e9)
        optimizer.step(0.3)
        assert weight.grad is None
    assert optimizer.masters[0].dtype == torch.float32
    torch.testing.assert_close(optimizer.masters[0].detach(), torch.full((4, 4), 254.2), rtol=0, atol=1e-2)
    assert torch.equal(weight.detach(), optimizer.masters[0].detach().bfloat16())


def test_float32_weights_have_no_copy_and_vectors_no_decay() -> None:
    matrix, vector = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)
    optimizer = MasterAdamW([("m", matrix), ("v", vector), ("f", frozen)], weight_decay=0.5)
    assert optimizer.masters[0] is matrix
    for weight in (matrix, vector):
        weight.grad = torch.zeros_like(weight)
    optimizer.clip(1.0)
    optimizer.step(0.1)
    torch.testing.assert_close(matrix.detach(), torch.full((2, 2), 0.95))
    assert torch.equal(vector.detach(), torch.ones(2))
    assert torch.equal(frozen.detach(), torch.ones(2, 2))


def test_clipping_returns_the_norm_before_it() -> None:
    weight = nn.Parameter(torch.zeros(2, 2))
    optimizer = MasterAdamW([("w", weight)], weight_decay=0.0)
    weight.grad = torch.full((2, 2), 3.0)
    assert optimizer.clip(1.5).item() == pytest.approx(6.0)
    assert weight.grad.norm().item() == pytest.approx(1.5, rel=1e-4)


def test_final_loss_is_the_mean_of_the_last_ten() -> None:
    run = Run("bf16", [Step(n, float(n), 1.0, 1.0, 0.5 if n % 2 else 0.25) for n in range(1, 14)])
    assert run.final_loss == 8.5
    assert Run("bf16").final_loss is None
    assert run.tokens_per_second(100) == 200.0
    assert Run("bf16").tokens_per_second(100) is None
