"""Training one model with one recipe."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import octavo
from octavo import models
from octavo.trainer import flops
from octavo.trainer.config import DTYPES, TrainConfig
from octavo.trainer.data import Batches, Corpus, validation_batches

FINAL_STEPS = 10
"""A final loss is the mean over so many last steps: one batch says more of its text than of the model."""


@dataclass(frozen=True)
class Step:
    """What one step did. ``number`` counts from 1, ``loss`` is in nats a token, ``seconds`` is its wall
    time."""

    number: int
    loss: float
    grad_norm: float
    learning_rate: float
    seconds: float


@dataclass
class Run:
    """A training run of one recipe, complete or as far as it came."""

    recipe: str
    steps: list[Step] = field(default_factory=list)
    status: str = "running"
    """running, finished, non-finite or interrupted."""
    flops: dict[str, int] = field(default_factory=dict)
    """Of one step, by operator."""
    converted: int = 0
    """Linear layers in the recipe."""
    validation_loss: float | None = None
    wall_seconds: float = 0.0

    @property
    def losses(self) -> list[float]:
        """Training loss of each step."""
        return [step.loss for step in self.steps]

    @property
    def final_loss(self) -> float | None:
        """Mean loss of the last ``FINAL_STEPS`` steps, None before the first."""
        last = self.losses[-FINAL_STEPS:]
        return sum(last) / len(last) if last else None

    def tokens_per_second(self, tokens_per_step: int) -> float | None:
        """Tokens a second at the median step, which a pause of the machine does not move."""
        seconds = sorted(step.seconds for step in self.steps)
        return tokens_per_step / seconds[len(seconds) // 2] if seconds else None


class MasterAdamW:
    """AdamW that keeps a float32 copy of weights in a shorter dtype and updates that.

    A bfloat16 weight has 8 bits: an update under 1/512 of its value would round away. Float32 weights are
    updated in place, with no copy. Norms and other vectors take no weight decay."""

    def __init__(self, parameters: Iterable[nn.Parameter], weight_decay: float) -> None:
        self.weights = [p for p in parameters if p.requires_grad]
        self.masters = [
            p if p.dtype == torch.float32 else nn.Parameter(p.detach().float()) for p in self.weights
        ]
        groups = [
            {"params": [m for m in self.masters if m.dim() > 1], "weight_decay": weight_decay},
            {"params": [m for m in self.masters if m.dim() <= 1], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(
            [g for g in groups if g["params"]], betas=(0.9, 0.95), eps=1e-8, fused=True
        )

    def clip(self, limit: float) -> Tensor:
        """Scales the gradients to a norm of at most ``limit``, on the masters; returns the norm before."""
        for weight, master in zip(self.weights, self.masters):
            if master is not weight:
                master.grad = None if weight.grad is None else weight.grad.float()
        return nn.utils.clip_grad_norm_(self.masters, limit)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """One update; gradients are dropped after it."""
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        self.adamw.step()
        for weight, master in zip(self.weights, self.masters):
            if master is not weight:
                weight.copy_(master)
                master.grad = None
            weight.grad = None


def next_token_loss(model: nn.Module, batch: tuple[Tensor, Tensor], device: torch.device) -> Tensor:
    """Mean cross-entropy in nats a token, float32, of inputs and targets [B, S]."""
    inputs, targets = (part.to(device) for part in batch)
    return F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())


def build_model(config: TrainConfig, recipe: str) -> tuple[nn.Module, int]:
    """The model with weights from the seed in ``recipe``, and how many layers are in it: all but the head."""
    model = models.preset(config.model).build(config.device, DTYPES[config.dtype])
    model.init_weights(config.seed)
    report = octavo.convert(model, recipe=recipe)
    return model, len(report.converted)


def train(config: TrainConfig, recipe: str, corpus: Corpus, on_step: Callable[[Step], None]) -> Run:
    """Trains one model and calls ``on_step`` after every step.

    Ends early, with the steps done so far, on a non-finite loss or gradient (before it reaches the weights)
    and on Ctrl-C; ``Run.status`` says which.
    """
    begin = time.perf_counter()
    run = Run(recipe)
    try:
        _train(config, run, corpus, on_step)
    except KeyboardInterrupt:
        run.status = "interrupted"
    run.wall_seconds = time.perf_counter() - begin
    return run


def _train(config: TrainConfig, run: Run, corpus: Corpus, on_step: Callable[[Step], None]) -> None:
    device = torch.device(config.device)
    model, run.converted = build_model(config, run.recipe)
    optimizer = MasterAdamW(model.parameters(), config.weight_decay)
    batches = Batches(corpus.train, config.seq_len, config.batch_size, config.seed)

    # Counted on the first batch, outside the run: it also warms up whatever is slow the first time.
    run.flops = flops.count(lambda: next_token_loss(model, batches(0), device).backward())
    model.zero_grad(set_to_none=True)

    for step in range(config.steps):
        begin = time.perf_counter()
        loss = next_token_loss(model, batches(step), device)
        loss.backward()
        norm = optimizer.clip(config.clip)
        loss_value, norm_value = torch.stack(
            [loss.detach(), norm]
        ).tolist()  # the step's one wait for the device
        finite = math.isfinite(loss_value) and math.isfinite(norm_value)
        if finite:
            optimizer.step(config.learning_rate(step))
        seconds = time.perf_counter() - begin
        run.steps.append(Step(step + 1, loss_value, norm_value, config.learning_rate(step), seconds))
        on_step(run.steps[-1])
        if not finite:
            run.status = "non-finite"
            return
    run.validation_loss = validate(model, config, corpus, device)
    run.status = "finished"


@torch.no_grad()
def validate(model: nn.Module, config: TrainConfig, corpus: Corpus, device: torch.device) -> float:
    """Mean loss on the held-out text, in nats a token."""
    total, tokens = 0.0, 0
    for batch in validation_batches(corpus.validation, config.seq_len, config.batch_size):
        total += float(next_token_loss(model, batch, device)) * batch[0].numel()
        tokens += batch[0].numel()
    return total / tokens
