"""A recipe of your own: say, product by product, in which format its operands are quantized.

    python examples/custom_recipe.py

A recipe is a constant; nothing in the package asks for one by name. This one keeps gradients in e5m2 with a scale
for each row, weights in 128x128 blocks, and leaves the weight gradient in high precision. The first and the last
block of the model stay in high precision altogether, which is a matter of rules and not of the recipe.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import octavo
from octavo.formats import E4M3FN, E5M2, Format

ROW = Format(E4M3FN, "rowwise", "power_of_two")
WIDE_ROW = Format(E5M2, "rowwise", "power_of_two")
BLOCKS = Format(E4M3FN, "128x128", "power_of_two")

MINE = octavo.Recipe(
    "mine",
    output=octavo.Product(a=ROW, b=BLOCKS, fast_accum=True),  # x @ w.T
    grad_input=octavo.Product(a=WIDE_ROW, b=BLOCKS),  # g @ w
    grad_weight=None,  # g.T @ x in the dtype of its operands
)


class Block(nn.Module):
    """x + down(gelu(up(x))), [..., width] to [..., width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def make(width: int, blocks: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(blocks)), nn.Linear(width, width))


def train(model: nn.Module, width: int, steps: int) -> float:
    """Mean squared error after some steps of learning to turn its input around."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss = torch.tensor(0.0)
    for _ in range(steps):
        x = torch.randn(64, width, generator=generator)
        loss = (model(x) - x.flip(-1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()

    model = make(options.width, options.blocks)
    last = options.blocks - 1
    report = octavo.convert(model, MINE, rules=[(rf"^(0|{last})\.", None), (rf"^{options.blocks}$", None)])
    print(report)

    with octavo.monitor(model) as monitor:  # what the formats do to this model's tensors
        loss = train(model, options.width, options.steps)
    print(monitor)
    expected = train(make(options.width, options.blocks), options.width, options.steps)
    print(f"loss {loss:.4f} by the recipe, {expected:.4f} in float32")


if __name__ == "__main__":
    main()
