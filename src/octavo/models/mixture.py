"""The mixture of experts of DeepSeek's models: router, bank of experts, shared experts.

Shape letters: T tokens, D model width, E experts, k experts a token is sent to, F width of an expert.

Sources: DeepSeekMoE (arXiv:2401.06066) for shared experts and the softmax router, DeepSeek-V2
(arXiv:2405.04434, section 2.2) and DeepSeek-V3 (arXiv:2412.19437, section 2.1.2) for group limits, the sigmoid
router and the bias that balances it without an auxiliary loss (arXiv:2408.15664).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.models.llama3 import FeedForward
from octavo.training.experts import GroupedExperts

SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
}
"""How a router turns its logits [T, E] into affinities."""


@dataclass(frozen=True, kw_only=True)
class MixtureConfig:
    """Dimensions of a mixture of experts.

    Args:
        experts: routed experts, E.
        active: experts a token is sent to, k.
        ffn_dim: width of an expert, F; the shared experts are one feed-forward layer of ``shared`` times this.
        shared: experts that every token goes through.
        score: a name of ``SCORES``.
        groups: the experts stand in this many equal groups, and a token is sent to those of the best
            ``active_groups``. A group is as good as its best expert with "softmax" (DeepSeek-V2) and as its two
            best together with "sigmoid" (DeepSeek-V3).
        active_groups: groups a token may be sent to.
        normalized: the k weights of a token are divided by their sum.
        scale: what the weights are multiplied with in the end.
        balance_rate: how far an expert's bias moves after a step, down if it was given more tokens than the mean
            and up if fewer. None: the router has no bias.

    Raises:
        ValueError: the numbers do not fit each other.
    """

    experts: int
    active: int
    ffn_dim: int
    shared: int = 0
    score: str = "softmax"
    groups: int = 1
    active_groups: int = 1
    normalized: bool = False
    scale: float = 1.0
    balance_rate: float | None = None

    def __post_init__(self) -> None:
        if self.score not in SCORES:
            raise ValueError(f"score is {self.score!r}: choose one of {', '.join(SCORES)}")
        if self.groups < 1 or self.experts % self.groups or self.experts // self.groups < self.group_best:
            raise ValueError(
                f"{self.experts} experts do not make {self.groups} equal groups of at least {self.group_best}: "
                f"change one of them"
            )
        if not 1 <= self.active_groups <= self.groups:
            raise ValueError(f"active_groups is {self.active_groups}: give 1 to groups, {self.groups}")
        reachable = self.experts // self.groups * self.active_groups
        if not 1 <= self.active <= reachable:
            raise ValueError(
                f"active is {self.active}: a token can be sent to 1 to {reachable} experts, those of "
                f"{self.active_groups} of {self.groups} groups"
            )

    @property
    def group_best(self) -> int:
        """Experts whose affinities make the affinity of their group."""
        return 2 if self.score == "sigmoid" else 1


class Gate(nn.Linear):
    """The router's projection. Computed in float32 whatever its weight is stored in, by no recipe."""

    def forward(self, input: Tensor) -> Tensor:
        """``input`` [T, D] to float32 [T, E], also under autocast."""
        with torch.autocast(input.device.type, enabled=False):
            return F.linear(input.float(), self.weight.float())


class Router(nn.Module):
    """Chooses the experts of each token.

    ``expert_bias`` float32 [E] is added to the affinities for the choice alone and not for the weights; it
    stays float32 when the model is cast, since its steps are small. ``tokens_per_expert`` counts what each
    expert was given in training since the last ``balance``.
    """

    expert_bias: Tensor | None
    tokens_per_expert: Tensor

    def __init__(self, dim: int, config: MixtureConfig) -> None:
        super().__init__()
        self.config = config
        self.gate = Gate(dim, config.experts, bias=False)
        bias = None if config.balance_rate is None else torch.zeros(config.experts, dtype=torch.float32)
        self.register_buffer("expert_bias", bias)
        counts = torch.zeros(config.experts, dtype=torch.int64)
        self.register_buffer("tokens_per_expert", counts, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        before = self.expert_bias
        super()._apply(fn, recurse)
        after = self.expert_bias
        if before is not None and after is not None and after.dtype != before.dtype:
            self.expert_bias = before.to(after.device)
        return self

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights float32 [T, k] and expert numbers int64 [T, k] of ``x`` [T, D]."""
        config = self.config
        scores = SCORES[config.score](self.gate(x))
        choice = scores.detach() if self.expert_bias is None else scores.detach() + self.expert_bias
        indices = torch.topk(self._within_groups(choice), config.active, dim=-1, sorted=False).indices
        if self.expert_bias is not None and self.training and torch.is_grad_enabled():
            # Twice where a checkpoint computes again: that doubles every count, and their order is what matters.
            ones = torch.ones_like(indices).flatten()
            self.tokens_per_expert.scatter_add_(0, indices.flatten(), ones)
        weights = scores.gather(-1, indices)
        if config.normalized:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * config.scale, indices

    def _within_groups(self, choice: Tensor) -> Tensor:
        """``choice`` [T, E] with minus infinity for experts outside the best groups."""
        config = self.config
        if config.active_groups == config.groups:
            return choice
        grouped = choice.unflatten(-1, (config.groups, -1))
        affinity = grouped.topk(config.group_best, dim=-1).values.sum(-1)
        best = affinity.topk(config.active_groups, dim=-1, sorted=False).indices
        outside = torch.ones_like(affinity, dtype=torch.bool).scatter(-1, best, False)
        return grouped.masked_fill(outside.unsqueeze(-1), float("-inf")).flatten(-2)


class MixtureOfExperts(nn.Module):
    """Routed experts and shared ones, in place of a feed-forward layer."""

    shared_experts: FeedForward | None

    def __init__(self, dim: int, config: MixtureConfig) -> None:
        super().__init__()
        self.router = Router(dim, config)
        self.experts = GroupedExperts(dim, config.ffn_dim, config.experts, recipe="bf16")
        self.shared_experts = FeedForward(dim, config.shared * config.ffn_dim) if config.shared else None

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [B, S, D] to [B, S, D]."""
        tokens = x.flatten(0, -2)
        weights, indices = self.router(tokens)
        out = self.experts(tokens, indices, weights).view_as(x)
        return out if self.shared_experts is None else out + self.shared_experts(x)


@torch.no_grad()
def balance(model: nn.Module, group: torch.distributed.ProcessGroup | None = None) -> None:
    """Moves the bias of every router in ``model`` by its rate, and begins to count anew.

    ``bias += rate * sign(mean - count)``: an expert with more tokens than the mean is chosen less from now on.
    To be called once after each step. A step that counted no tokens changes nothing.

    Args:
        group: processes that hold the same routers and different tokens, whose counts are added. None: all
            processes, where ``torch.distributed`` is initialised.
    """
    routers = [m for m in model.modules() if isinstance(m, Router) and m.expert_bias is not None]
    if not routers:
        return
    counts = torch.stack([router.tokens_per_expert for router in routers])
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(counts, group=group)
    directions = (counts.float().mean(-1, keepdim=True) - counts).sign()
    for router, direction in zip(routers, directions, strict=True):
        assert router.expert_bias is not None
        rate = router.config.balance_rate
        assert rate is not None
        router.expert_bias.add_(direction, alpha=rate)
        router.tokens_per_expert.zero_()
