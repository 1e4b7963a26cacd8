"""What a training run leaves in memory: its steps and what became of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

FINAL_STEPS = 10
"""A final loss is the mean over so many last steps: one batch says more of its text than of the model."""


@dataclass(frozen=True)
class Step:
    """What one step did. ``number`` counts from 1, losses are in nats a token, ``seconds`` is its wall time
    without validation, ``peak_memory`` in bytes is the run's up to now, and ``mfu`` is the share of the card's
    peak that was used, 0 to 1, None where the peak is not known."""

    number: int
    loss: float
    grad_norm: float
    learning_rate: float
    seconds: float
    validation_loss: float | None = None
    peak_memory: int | None = None
    mfu: float | None = None
    operands: list[dict[str, Any]] | None = None
    """Of a watched step, what quantization did to each operand, see :mod:`octavo.trainer.operand_stats`."""

    @property
    def finite(self) -> bool:
        """Whether the loss and the gradient are numbers, so that the step reached the weights."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass
class Run:
    """A training run of one recipe, complete or as far as it came."""

    recipe: str
    steps: list[Step] = field(default_factory=list)
    status: str = "running"
    """running, finished, non-finite, interrupted, unwritable or out-of-memory."""
    flops: dict[str, int] = field(default_factory=dict)
    """Of one step, by operator, without what activation checkpointing computes twice."""
    converted: int = 0
    """Linear layers in the recipe."""
    validation_loss: float | None = None
    wall_seconds: float = 0.0
    failure: str | None = None
    """Where a number first went bad, or what could not be written."""

    @property
    def losses(self) -> list[float]:
        """Training loss of each step."""
        return [step.loss for step in self.steps]

    @property
    def final_loss(self) -> float | None:
        """Mean loss of the last ``FINAL_STEPS`` steps, None before the first."""
        last = self.losses[-FINAL_STEPS:]
        return sum(last) / len(last) if last else None

    @property
    def peak_memory(self) -> int | None:
        """Most bytes the run held: on the GPU, or of the process where it ran on the CPU."""
        return max((s.peak_memory for s in self.steps if s.peak_memory is not None), default=None)

    @property
    def mfu(self) -> float | None:
        """Share of the card's peak that the median step used, None where the peak is not known."""
        shares = sorted(step.mfu for step in self.steps if step.mfu is not None)
        return shares[len(shares) // 2] if shares else None

    @property
    def median_seconds(self) -> float | None:
        """Wall time of the median step, which a pause of the machine does not move."""
        seconds = sorted(step.seconds for step in self.steps)
        return seconds[len(seconds) // 2] if seconds else None

    def tokens_per_second(self, tokens_per_step: int) -> float | None:
        """Tokens a second at the median step."""
        return tokens_per_step / self.median_seconds if self.median_seconds else None
