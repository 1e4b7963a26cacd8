"""AdamW with float32 masters, and a state that is nothing but named tensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class MasterAdamW:
    """AdamW that keeps a float32 copy of weights in a shorter dtype and updates that.

    A bfloat16 weight has 8 bits: an update under 1/512 of its value would round away. Float32 weights are
    updated in place, with no copy. Norms and other vectors take no weight decay. Frozen weights are left out.

    Args:
        parameters: names and parameters, as ``model.named_parameters()`` gives them.
        weight_decay: of matrices.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> None:
        named = [(name, p) for name, p in parameters if p.requires_grad]
        self.names = [name for name, _ in named]
        self.weights = [p for _, p in named]
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
        # Made here and not in the first step, so that a state can be loaded into it, and so that memory
        # that does not suffice is missed at once.
        for master in self.masters:
            self.adamw.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                "exp_avg": torch.zeros_like(master, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(master, memory_format=torch.preserve_format),
            }

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
        self.zero_grad()

    def zero_grad(self) -> None:
        """Drops the gradients of weights and masters."""
        for weight, master in zip(self.weights, self.masters):
            weight.grad = master.grad = None

    def state_dict(self) -> dict[str, Tensor]:
        """The very tensors of the state: ``master.NAME`` of weights in a shorter dtype, and AdamW's
        ``step.NAME``, ``exp_avg.NAME`` and ``exp_avg_sq.NAME``. What is written into them takes effect."""
        state: dict[str, Tensor] = {}
        for name, weight, master in zip(self.names, self.weights, self.masters):
            if master is not weight:
                state[f"master.{name}"] = master.detach()
            state |= {f"{moment}.{name}": self.adamw.state[master][moment] for moment in MOMENTS}
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Takes over the state of an optimizer of the same weights; the weights follow their masters.

        Raises:
            ValueError: names differ; the message gives the first that do.
        """
        own = self.state_dict()
        if own.keys() != state.keys():
            differing = sorted(own.keys() ^ state.keys())
            raise ValueError(
                f"this is the state of other weights, they differ in {', '.join(differing[:3])}: load one that "
                f"was saved for the same model"
            )
        for name, tensor in own.items():
            if tensor is not state[name]:
                tensor.copy_(state[name])
        for weight, master in zip(self.weights, self.masters):
            if master is not weight:
                weight.copy_(master)
