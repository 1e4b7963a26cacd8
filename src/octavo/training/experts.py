"""Banks of experts that train by a recipe: the module, and what ``convert`` makes of other people's.

:class:`GroupedExperts` is the package's own. Experts of transformers keep their class's name, parameters and state
dict; their forward becomes :func:`octavo.training.expert_spanning.routed_experts`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from octavo.training.expert_spanning import NOBODY, Watched, Weights, routed_experts, sorted_experts
from octavo.training.recipes import BF16, Recipe, get_recipe


class GroupedExperts(nn.Module):
    """A bank of SwiGLU experts, ``w2[e] @ (silu(w1[e] @ x) * (w3[e] @ x))``, whose products run by a recipe.

    Parameters ``w1``, ``w3`` [E, F, D] and ``w2`` [E, D, F], names and layout as in TorchTitan's checkpoints.

    Args:
        dim: model width, D.
        hidden_dim: width of an expert, F.
        num_experts: E.
        recipe: by name or value; ``"bf16"`` runs one plain grouped product a projection.
        device, dtype: of the parameters.
    """

    recipe: Recipe = BF16
    stats: Watched = NOBODY
    """Buffers of a monitor that watches these experts, see :mod:`octavo.training.monitor`."""
    octavo_weights = ("w1", "w2", "w3")

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        *,
        recipe: str | Recipe = "rowwise",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.hidden_dim, self.num_experts = dim, hidden_dim, num_experts
        up, down = (num_experts, hidden_dim, dim), (num_experts, dim, hidden_dim)
        self.w1 = nn.Parameter(torch.empty(up, device=device, dtype=dtype))
        self.w2 = nn.Parameter(torch.empty(down, device=device, dtype=dtype))
        self.w3 = nn.Parameter(torch.empty(up, device=device, dtype=dtype))
        self.recipe = get_recipe(recipe)
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02) -> None:
        """Draw every weight from a normal distribution of ``std``, cut at two of them."""
        for weight in (self.w1, self.w2, self.w3):
            nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)

    def forward(self, x: torch.Tensor, indices: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The weighted sum of each token's experts, with no synchronisation of host and device.

        Args:
            x: [T, D].
            indices: integers [T, k]; a number outside 0 to E - 1 is no expert and adds nothing.
            scores: [T, k], the router's weights.

        Returns:
            [T, D] in the dtype of ``x``, summed in float32.

        Raises:
            ValueError: if shapes or dtypes do not fit.
        """
        return routed_experts(x, indices, scores, self._weights(), self.recipe, self.stats)

    def forward_sorted(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        """Each expert on its own rows, where a dispatcher has put them in the order of the experts.

        Args:
            x: [R, D].
            offs: int32 [E], cumulative ends on the device; rows past the last give zero.

        Returns:
            [R, D].

        Raises:
            ValueError: if shapes, dtypes or ``offs`` do not fit.
        """
        return sorted_experts(x, offs, self._weights(), self.recipe, self.stats)

    def _weights(self) -> Weights:
        return local(self.w1), local(self.w3), local(self.w2)

    def extra_repr(self) -> str:
        return (
            f"dim={self.dim}, hidden_dim={self.hidden_dim}, num_experts={self.num_experts}, "
            f"recipe={self.recipe.name}"
        )


def local(weight: torch.Tensor) -> torch.Tensor:
    """The experts of this rank, of a weight sharded by expert parallelism; else the weight itself."""
    return weight.to_local() if hasattr(weight, "to_local") else weight  # pyright: ignore


# ---- experts of transformers ------------------------------------------------------------------------------


def convertible(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every bank of experts that ``convert`` knows, with its path."""
    for name, module in model.named_modules():
        if isinstance(module, GroupedExperts) or type(module) in _BASES or _of_transformers(module):
            yield name, module


def converted(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The banks of experts that run by a recipe, with their paths."""
    for name, module in model.named_modules():
        if isinstance(module, GroupedExperts) or type(module) in _BASES:
            yield name, module


def why_not(module: nn.Module) -> str | None:
    """Why these experts compute something else than SwiGLU of two stacked weights, or None."""
    if isinstance(module, GroupedExperts) or type(module) in _BASES:
        return None
    if "forward" in vars(module):
        return "its forward was replaced on the instance, which conversion would not reach"
    marks = (("has_gate", True), ("has_bias", False), ("is_transposed", False), ("is_concatenated", True),
             ("has_post_expert_norm", False))  # fmt: skip
    wrong = [name for name, wanted in marks if getattr(module, name, not wanted) is not wanted]
    if wrong:
        return f"its experts differ from stacked [gate; up] and down in {', '.join(wrong)}"
    from transformers.integrations import moe

    if type(module)._apply_gate is not moe._default_apply_gate:  # pyright: ignore
        return "its activation is a formula of its own"
    if not _is_silu(module.act_fn):
        return f"its activation is {type(module.act_fn).__name__}, not SiLU"
    return None


def _is_silu(activation: Any) -> bool:
    return isinstance(activation, nn.SiLU) or type(activation).__name__ in ("SiLUActivation", "SiLU")


def _of_transformers(module: nn.Module) -> bool:
    """Whether transformers' own decorator describes these experts."""
    return (
        "transformers" in sys.modules
        and type(module).__module__.startswith("transformers.models.")
        and hasattr(type(module), "_apply_gate")
        and isinstance(getattr(module, "gate_up_proj", None), nn.Parameter)
        and isinstance(getattr(module, "down_proj", None), nn.Parameter)
    )


def gate_weight(module: nn.Module) -> torch.Tensor:
    """The weight that names the size of these experts: gate, or gate and up."""
    return module.w1 if isinstance(module, GroupedExperts) else module.gate_up_proj  # pyright: ignore


def install(module: Any, recipe: Recipe) -> None:
    """Make the experts of ``module`` run by ``recipe``."""
    if not isinstance(module, GroupedExperts) and type(module) not in _BASES:
        module.__class__ = _converted(type(module))
    module.recipe = recipe


_CONVERTED: dict[type, type] = {}
_BASES: dict[type, type] = {}


def _converted(cls: type) -> type:
    """A subclass of transformers' ``cls`` whose forward runs by the module's recipe."""
    if cls not in _CONVERTED:

        def forward(
            self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
        ) -> torch.Tensor:
            weights = (local(self.gate_up_proj), None, local(self.down_proj))
            return routed_experts(hidden_states, top_k_index, top_k_weights, weights, self.recipe, self.stats)

        def reduce(self: Any, protocol: object) -> tuple[Any, ...]:
            # A class made here cannot be found by its name: pickle and deepcopy make it again.
            return _blank, (cls,), vars(self)

        members = {
            "forward": forward,
            "__reduce_ex__": reduce,
            "__module__": cls.__module__,
            "stats": NOBODY,
            "octavo_weights": ("gate_up_proj", "down_proj"),
        }
        _CONVERTED[cls] = type(cls.__name__, (cls,), members)
        _BASES[_CONVERTED[cls]] = cls
    return _CONVERTED[cls]


def _blank(cls: type) -> Any:
    """An instance of the converted ``cls`` without state."""
    converted = _converted(cls)
    return object.__new__(converted)
