"""What one rank does in test_balance.py."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist

from octavo import models

TOKENS = torch.randint(0, 256, (4, 16), generator=torch.Generator().manual_seed(0))
CONFIG = dataclasses.replace(models.preset("deepseek-v3-debug"), dim=64, n_heads=2, ffn_dim=64, n_layers=3)


def biases(tokens: torch.Tensor) -> list[list[float]]:
    """The routers' biases after a step on ``tokens``."""
    model = CONFIG.build()
    model.init_weights(0)
    model(tokens)
    model.after_step()
    return [b.tolist() for name, b in model.named_buffers() if name.endswith("expert_bias")]


def biases_of_own_tokens() -> list[list[float]]:
    """The same where each rank has its part of the tokens."""
    return biases(TOKENS.chunk(dist.get_world_size())[dist.get_rank()])
