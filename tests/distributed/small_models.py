"""Models that several processes train in a moment: a dense decoder and one with experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import octavo
from octavo.models.llama3 import Llama3Config

VOCABULARY = 61
CONFIG = Llama3Config(
    dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=136, vocab_size=VOCABULARY, max_seq_len=32
)


class Experts(nn.Module):
    """Three experts of two grouped products each; tokens go by their own router. [T, D] to [T, D]."""

    def __init__(self, dim: int, hidden: int, recipe: Any, count: int = 3) -> None:
        super().__init__()
        self.recipe = recipe
        self.router = nn.Linear(dim, count, bias=False)
        self.w1 = nn.Parameter(torch.randn(count, hidden, dim) * 0.2)
        self.w2 = nn.Parameter(torch.randn(count, dim, hidden) * 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        score, expert = self.router(x).float().softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        ends = torch.bincount(expert, minlength=self.w1.shape[0]).cumsum(0).to(torch.int32)
        hidden = octavo.grouped_mm(x[order], self.w1.mT, ends, recipe=self.recipe)
        out = octavo.grouped_mm(F.silu(hidden), self.w2.mT, ends, recipe=self.recipe)
        return torch.empty_like(out).index_copy(0, order, out) * score[:, None].to(x.dtype)


class ExpertLayer(nn.Module):
    """A linear projection and experts, each around a residual connection."""

    def __init__(self, recipe: Any, dim: int) -> None:
        super().__init__()
        self.mix = nn.Linear(dim, dim)
        self.experts = Experts(dim, 96, recipe)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix(x)
        return x + self.experts(x)


class ExpertDecoder(nn.Module):
    """An embedding, two layers with experts, and a head."""

    def __init__(self, recipe: Any, dim: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.layers = nn.ModuleList(ExpertLayer(recipe, dim) for _ in range(2))
        self.head = nn.Linear(dim, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens).flatten(0, 1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).unflatten(0, tokens.shape)


def dense(
    recipe: Any, dtype: torch.dtype = torch.float32, spans: bool = True, hidden: int = 136
) -> nn.Module:
    """A converted decoder of two Llama layers with fixed weights."""
    model = replace(CONFIG, ffn_dim=hidden).build("cpu", dtype)
    model.init_weights(0)
    octavo.convert(model, recipe, spans=spans)
    return model


def sparse(recipe: Any, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A converted decoder with experts and fixed weights."""
    torch.manual_seed(0)
    model = ExpertDecoder(octavo.get_recipe(recipe)).to(dtype)
    octavo.convert(model, recipe, rules=[("router|head", None)])
    return model


def shard(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """``fully_shard`` on every layer and on the whole, with plain sums as gloo wants them."""
    for layer in model.layers:  # pyright: ignore[reportGeneralTypeIssues]
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


def batch(seed: int = 0, sequences: int = 2, length: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [B, S] and the token that follows each."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (sequences, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, seed: int = 0) -> torch.Tensor:
    """Mean cross-entropy on the batch of that seed."""
    inputs, targets = batch(seed)
    return F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())


def full(tensor: torch.Tensor | None) -> torch.Tensor:
    """The whole of a sharded tensor, on every rank."""
    assert tensor is not None
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole gradients by name."""
    return {name: full(p.grad) for name, p in model.named_parameters()}


def train(
    model: nn.Module,
    steps: int,
    make: Callable[[Any], torch.optim.Optimizer] | None = None,
    seed: int = 0,
) -> list[float]:
    """Losses of so many steps of SGD."""
    optimizer = make(model.parameters()) if make else torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        loss = loss_of(model, seed + step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Bit equality of two named sets of tensors."""
    assert actual.keys() == expected.keys()
    wrong = [name for name in expected if not torch.equal(actual[name], expected[name])]
    assert not wrong, {
        name: (actual[name].float() - expected[name].float()).abs().max().item() for name in wrong
    }
