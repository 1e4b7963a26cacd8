"""A model of your own: what `octavo.convert` finds by itself, and the three things that it must be told.

    python examples/custom_model.py
    python examples/custom_model.py --compile

1. Linear layers are found. The names of projections that must stay in high precision are given as rules.
2. An MLP that computes ``down(silu(gate(x)) * up(x))`` is registered, and then runs as one function.
3. Expert weights are parameters, not linear layers: the forward calls `octavo.grouped_mm` by itself.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import octavo
from octavo.training.spanning import register_mlp

VOCABULARY = 64


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), [..., width] to [..., width]."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


register_mlp(GatedMLP, gate="gate", up="up", down="down")


class Experts(nn.Module):
    """Every token goes to one of several two-layer networks, [B, S, width] to [B, S, width]."""

    def __init__(self, width: int, hidden: int, count: int, recipe: str) -> None:
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.w1 = nn.Parameter(torch.randn(count, hidden, width) * width**-0.5)
        self.w2 = nn.Parameter(torch.randn(count, width, hidden) * hidden**-0.5)
        self.recipe = recipe

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)
        weight, chosen = self.router(rows).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)  # tokens of an expert lie together
        # Where each expert's tokens end, int32 on the device; an expert may get none.
        offs = F.one_hot(chosen, self.w1.shape[0]).sum(0).cumsum(0).to(torch.int32)
        hidden = F.gelu(octavo.grouped_mm(rows[order], self.w1.mT, offs, recipe=self.recipe))
        out = octavo.grouped_mm(hidden, self.w2.mT, offs, recipe=self.recipe)
        return (torch.zeros_like(out).index_copy(0, order, out) * weight[:, None]).view_as(x)


class Attention(nn.Module):
    """Causal attention, [B, S, width] to [B, S, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Model(nn.Module):
    """A decoder of two layers, one with a dense MLP and one with experts: tokens [B, S] to logits [B, S, V]."""

    def __init__(self, width: int, recipe: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.attention = nn.ModuleList(Attention(width, 4) for _ in range(2))
        self.mlp = nn.ModuleList([GatedMLP(width, 2 * width), Experts(width, 2 * width, 4, recipe)])
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(5))
        self.to_tokens = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for i, (attention, mlp) in enumerate(zip(self.attention, self.mlp, strict=True)):
            x = x + attention(self.norms[2 * i](x))
            x = x + mlp(self.norms[2 * i + 1](x))
        return self.to_tokens(self.norms[4](x))


def train(model: nn.Module, steps: int) -> float:
    """Cross entropy per token after some steps of learning to count in steps of seven."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loss = torch.tensor(0.0)
    for _ in range(steps):
        start = torch.randint(VOCABULARY, (16, 1), generator=generator)
        tokens = (start + 7 * torch.arange(33)) % VOCABULARY
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--recipe", default="rowwise", choices=octavo.RECIPES)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()

    losses = {}
    for recipe in ("bf16", options.recipe):
        torch.manual_seed(0)
        model = Model(options.width, recipe)
        if recipe != "bf16":
            # The router decides by small differences; to_tokens was found to be the head by its size.
            print(octavo.convert(model, recipe, rules=[(r"router$", None)]))
        losses[recipe] = train(torch.compile(model) if options.compile else model, options.steps)
    for recipe, loss in losses.items():
        print(f"{recipe}: loss {loss:.4f}")


if __name__ == "__main__":
    main()
