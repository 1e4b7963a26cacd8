"""A run that goes bad says where: layer, product and tensor, in the order of the run."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from octavo.trainer import data
from octavo.trainer import job as jobs
from octavo.trainer.config import TrainConfig
from octavo.trainer.loop import Trainer

Job = Callable[..., TrainConfig]
INF = float("inf")


class Overflowing(torch.autograd.Function):
    """The identity, whose gradient overflows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *_: Any) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * INF


def trainer(config: TrainConfig, recipe: str) -> Trainer:
    return Trainer(config, recipe, data.load(config.data, config.seq_len))


def plant(model: nn.Module, what: str, layer: str) -> None:
    module = model.get_submodule(layer)
    if what == "weight":
        with torch.no_grad():
            module.get_parameter("weight").flatten()[3] = INF
    elif what == "activation":

        def overflow(_: nn.Module, args: Any, out: Any) -> Any:
            return out + INF

        module.register_forward_hook(overflow)
    else:
        module.register_forward_pre_hook(lambda m, args: (Overflowing.apply(args[0]), *args[1:]))


@pytest.mark.parametrize("recipe", ["bf16", "rowwise"])
@pytest.mark.parametrize(
    ("what", "layer", "expected"),
    [
        ("weight", "layers.1.feed_forward.w2", "layer layers.1.feed_forward.w2, product output, tensor weight"),
        ("weight", "layers.0.attention.wk", "layer layers.0.attention.wk, product output, tensor weight"),
        ("weight", "tok_embeddings", "layer tok_embeddings, tensor weight"),
        ("weight", "output", "layer output, product output, tensor weight"),
        # What a whole block hands on is no layer's own: the next layer gets it.
        ("activation", "layers.0", "layer layers.1.attention_norm, tensor input"),
        ("activation", "layers.1", "layer norm, tensor input"),
        ("gradient", "output", "layer norm, tensor grad_output"),
        ("gradient", "layers.1", "layer layers.0.feed_forward.w2, product grad_input, tensor grad_output"),
    ],
)  # fmt: skip
def test_the_first_bad_tensor_is_named(job: Job, recipe: str, what: str, layer: str, expected: str) -> None:
    there = trainer(job(), recipe)
    assert there.first_bad(0) is None
    plant(there.model, what, layer)
    assert there.first_bad(0) == expected
    assert all(p.grad is None for p in there.model.parameters())


@pytest.mark.parametrize("changes", [{"activation_checkpoint": True}, {"grad_accum": 2}])
def test_it_is_found_with_recomputation_and_in_parts(job: Job, changes: dict[str, Any]) -> None:
    there = trainer(job(**changes), "rowwise")
    plant(there.model, "weight", "layers.0.feed_forward.w2")
    assert there.first_bad(0) == "layer layers.0.feed_forward.w2, product output, tensor weight"


def test_watching_for_it_leaves_the_training_as_it_was(job: Job) -> None:
    plain, watched = trainer(job(), "rowwise"), trainer(job(), "rowwise")
    assert watched.first_bad(0) is None
    steps = [(plain.step(n).loss, watched.step(n).loss) for n in range(3)]
    assert [a for a, _ in steps] == [b for _, b in steps]


def test_the_job_says_where(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Trainer.step

    def poisoned(self: Trainer, number: int) -> Any:
        if number == 2:
            plant(self.model, "weight", "layers.1.attention.wo")
        return original(self, number)

    monkeypatch.setattr(Trainer, "step", poisoned)
    config, output = job(recipes=("rowwise",), checkpoint_dir=job().out / "saved"), StringIO()
    assert jobs.run(config, jobs.prepare(config), Console(file=output), command="octavo train") == 1
    line = next(line for line in output.getvalue().splitlines() if "stopped" in line)
    assert line.startswith("rowwise stopped at step 3: loss nan, gradient norm nan, first in ")
    assert "layer layers.1.attention.wo, product output, tensor weight; lower --lr" in line
    assert f"the last good checkpoint is {str(job().out / 'saved/rowwise/step-00000002')!r}" in line
