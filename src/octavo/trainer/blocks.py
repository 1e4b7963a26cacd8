"""What is done to a model block by block: activation checkpointing and torch.compile."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from torch import nn
from torch.utils.checkpoint import checkpoint


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The transformer blocks: what the model keeps in ``layers``."""
    yield from model.get_submodule("layers").children()


def prepare(model: nn.Module, *, compile: bool, recompute: bool) -> None:
    """Sets up each block; parameters and their names stay.

    Args:
        compile: compile each block by itself. All are alike, so there is one compilation and not one of the
            whole model.
        recompute: keep the block's input alone and compute the rest again in backward, with the same bits.
    """
    for block in blocks(model):
        if recompute:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        if compile:
            block.compile()
