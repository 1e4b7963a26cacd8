"""Modules that keep their parameters: a converted ``nn.Linear`` is still one, with the same state dict."""

from __future__ import annotations

import torch
from torch import nn

from octavo.training.grouped import grouped_linear, grouped_outer
from octavo.training.parallel import linear
from octavo.training.recipes import BF16, Recipe, get_recipe


class Linear(nn.Linear):
    """``nn.Linear`` whose three products run by a :class:`~octavo.Recipe`.

    Args as ``nn.Linear``, and ``recipe`` by name or value. Input [..., in_features] in the dtype of the
    weight (or any under autocast), output [..., out_features]; gradients in the dtypes of what they belong to.
    """

    recipe: Recipe = BF16
    stats: torch.Tensor | None = None
    """Buffer of a monitor that watches this layer, see :mod:`octavo.training.monitor`."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        recipe: str | Recipe = "rowwise",
        **kwargs,
    ) -> None:
        super().__init__(in_features, out_features, bias, **kwargs)
        self.recipe = get_recipe(recipe)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return linear(input, self.weight, self.bias, self.recipe, self.stats)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe.name}"


def linear_function(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    recipe: str | Recipe = "rowwise",
) -> torch.Tensor:
    """``F.linear`` by a recipe: ``x[..., K] @ weight[N, K].T + bias[N]``, with gradients.

    Raises:
        ValueError: for an unknown recipe, or shapes and dtypes that do not fit.
    """
    return linear(x, weight, bias, get_recipe(recipe))


def grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    recipe: str | Recipe = "rowwise",
) -> torch.Tensor:
    """``torch._grouped_mm(a, b, offs)`` by a recipe, in two forms.

    * rows by expert: rows of group g of a[M, K] times b[g] of b[G, K, N] -> [M, N];
    * over groups: a[N, M] times b[M, K], a product for the rows of each group -> [G, N, K]. This is the weight
      gradient of the first form and runs in the formats of the recipe's ``grad_weight``.

    Args:
        b: in the first form usually the transposed view of expert weights [G, N, K], as for PyTorch's operator.
        offs: int32 [G] cumulative group ends along M on the device. Groups may be empty; rows past the last end
            are zero in the output and in the gradient of ``a``, and an empty group is exactly zero in the product
            over groups and in the gradient of ``b``.
        bias: [G, N], in the first form.

    Returns:
        The product in the dtype of ``a``, with gradients for ``a``, ``b`` and ``bias``. The host never waits for
        the device, whatever the sizes of the groups.

    Raises:
        ValueError: for an unknown recipe, or shapes and dtypes that do not fit.
    """
    recipe = get_recipe(recipe)
    if a.ndim == 2 and b.ndim == 3:
        return grouped_linear(a, b.mT, offs, bias, recipe)
    if bias is not None or a.ndim != 2 or b.ndim != 2:
        raise ValueError(
            "grouped_mm takes a[M, K], b[G, K, N], offs[G] and bias[G, N], or a[N, M], b[M, K] and offs[G] without a "
            f"bias; got a {tuple(a.shape)}, b {tuple(b.shape)} and {'no' if bias is None else 'a'} bias"
        )
    return grouped_outer(a.mT, b, offs, recipe)
