"""How many rows each expert gets in the suites of experts: even, skewed, with empty experts, of odd sizes."""

from __future__ import annotations

import math

import torch

ROUTINGS = ("uniform", "skewed", "empty", "ragged")
SKEW = 0.7
"""Exponent of the power law of loads by rank: the busiest of 32 experts gets about 5 times the mean."""
DEVICE = "cuda"
"""Where the suites of experts make their inputs."""
TAIL = 40
"""Rows past the last expert's in ``ragged``."""


def sizes(routing: str, rows: int, experts: int) -> tuple[int, ...]:
    """Rows of each expert, the same in every run.

    * ``uniform``: as even as multiples of 16 allow;
    * ``skewed``: a power law by rank, experts of all ranks mixed, multiples of 16;
    * ``empty``: every fourth expert gets nothing, the others are even;
    * ``ragged``: ``skewed`` with odd sizes and rows past the last end, as a dropless dispatcher without padding
      leaves them.

    Raises:
        ValueError: for an unknown routing.
    """
    if routing not in ROUTINGS:
        raise ValueError(f"unknown routing {routing!r}; choose from {', '.join(ROUTINGS)}")
    if routing == "empty":
        weights = [float(e % 4 != 1) for e in range(experts)]
    elif routing == "uniform":
        weights = [1.0] * experts
    else:
        # Ranks walk through the experts in steps that share no factor with their number.
        step = next(s for s in range(max(1, 5 * experts // 8), 2 * experts + 2) if math.gcd(s, experts) == 1)
        weights = [0.0] * experts
        for rank in range(experts):
            weights[rank * step % experts] = (1 + rank) ** -SKEW
    total = sum(weights)
    found = [int(rows * weight / total) // 16 * 16 for weight in weights]
    left, by_load = rows - sum(found), sorted(range(experts), key=lambda e: -weights[e])
    for expert in by_load[: left // 16]:
        found[expert] += 16
    found[by_load[0]] += left % 16
    if routing == "ragged":
        for expert in range(0, experts - 1, 2):
            moved = min(1 + 2 * (expert % 7), found[expert])
            found[expert], found[expert + 1] = found[expert] - moved, found[expert + 1] + moved
        found[found.index(max(found))] -= TAIL
    return tuple(found)


def ends(found: tuple[int, ...]) -> torch.Tensor:
    """int32 cumulative ends of such sizes."""
    return torch.tensor(found, device=DEVICE).cumsum(0).to(torch.int32)


def indices(found: tuple[int, ...], tokens: int, choices: int) -> torch.Tensor:
    """int64 [tokens, choices], a router's choice with so many rows an expert and none twice for a token.

    Choices that are left over are -1, no expert.

    Raises:
        ValueError: if an expert has more rows than there are tokens, or all have more than there are choices.
    """
    left = tokens * choices - sum(found)
    if left < 0 or max(found) > tokens:
        raise ValueError(f"{found} are no choices of {choices} experts by each of {tokens} tokens")
    numbers = torch.tensor([*range(len(found)), -1], device=DEVICE)
    experts = numbers.repeat_interleave(torch.tensor([*found, left], device=DEVICE))
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    # A run of at most T equal numbers, cut into columns of T, meets every row once.
    return experts.view(choices, tokens).t()[order].contiguous()
