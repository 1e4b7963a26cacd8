"""What every model of ``octavo.models`` has in common."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn


class Model(nn.Module):
    """A decoder: token numbers [B, S] to logits [B, S, V]. ``config`` holds its dimensions."""

    config: Any

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Sets every weight from ``seed``, to the same values on every device.

        Vectors, which are norms' weights, start at one; all else is normal with the deviation that
        ``initial_std`` gives, cut at three of them. Drawn on the CPU in float32, one tensor at a time, from a
        generator of its own.
        """
        self.tie_weights()
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():  # a tied weight comes once
            if weight.dim() == 1:
                weight.fill_(1.0)
                continue
            std = self.initial_std(name)
            values = torch.empty(weight.shape, dtype=torch.float32, device="cpu")
            nn.init.trunc_normal_(values, std=std, a=-3 * std, b=3 * std, generator=generator)
            weight.copy_(values)

    def tie_weights(self) -> None:
        """Makes tied weights one tensor again, after ``to_empty`` has given each a memory of its own."""

    def after_step(self) -> None:
        """Called once after each optimizer step: what a model changes by itself and not by a gradient."""

    def initial_std(self, name: str) -> float:
        """Standard deviation of the weight called ``name`` at the start."""
        raise NotImplementedError(f"{type(self).__name__} does not say how {name!r} is initialised")


class ModelConfig(Protocol):
    """Dimensions of a model."""

    @property
    def vocab_size(self) -> int:
        """Tokens it knows."""
        ...

    @property
    def max_seq_len(self) -> int:
        """Tokens in the longest sequence it takes."""
        ...

    def build(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Model:
        """The model with unset weights on ``device`` ("meta" costs nothing); ``init_weights`` sets them."""
        ...
