"""FLOPs of one training step, counted as they run, by the operator that did them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from octavo.matmul import register_flop_formulas

FP8_OPERATORS = frozenset({"octavo.scaled_mm", "octavo.scaled_grouped_mm"})


def _attention(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], *args: Any, **kwargs: Any
) -> int:
    """``Q K^T`` and ``P V``, two operations a multiply-add, over the full square as in PyTorch's formula."""
    batch, heads, queries, width = query
    return 2 * batch * heads * queries * key[2] * (width + value[3])


def _attention_backward(
    grad: Sequence[int],
    query: Sequence[int],
    key: Sequence[int],
    value: Sequence[int],
    *args: Any,
    **kwargs: Any,
) -> int:
    """The scores again, then gradients of V, P, Q and K: three products of the query's width, two of V's."""
    batch, heads, queries, width = query
    return 2 * batch * heads * queries * key[2] * (3 * width + 2 * value[3])


def _attention_formulas() -> dict[Any, Callable[..., int]]:
    """Formulas for every fused attention.

    PyTorch's counter has none for the CPU's, which would leave attention out of the total.
    """
    aten = torch.ops.aten
    forward = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
    formulas: dict[Any, Callable[..., int]] = {}
    for name in forward:
        formulas[getattr(aten, f"_scaled_dot_product_{name}")] = _attention
        formulas[getattr(aten, f"_scaled_dot_product_{name}_backward")] = _attention_backward
    return formulas


def count(step: Callable[[], None]) -> dict[str, int]:
    """Runs ``step`` and returns its FLOPs by operator, as ``{"aten.mm": ..., "octavo.scaled_mm": ...}``."""
    register_flop_formulas()
    with FlopCounterMode(display=False, custom_mapping=_attention_formulas()) as counter:
        step()
    return {str(operator): int(flops) for operator, flops in counter.get_flop_counts()["Global"].items()}


def fp8_share(flops: dict[str, int]) -> float:
    """Share of ``flops`` done by 8-bit products, 0 to 1."""
    total = sum(flops.values())
    return sum(n for operator, n in flops.items() if operator in FP8_OPERATORS) / total if total else 0.0
