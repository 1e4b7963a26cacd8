"""The only file that touches Inductor: lowerings that let a compiled call reach our kernels.

Most operators need nothing: Inductor calls ``_grouped_mm``, ``_scaled_grouped_mm`` and ``_scaled_mm`` through the
dispatcher at run time, or they are its own Triton templates. ``_scaled_mm_v2`` with MX scales is one it refuses while
lowering (PyTorch 2.13: no template, and an assertion against swizzled scales); it becomes a call of the operator.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

BLOCKWISE_1X32 = 3
"""``torch.nn.functional.ScalingType.BlockWise1x32``."""


def call_instead(operator: Any, when: Any) -> bool:
    """Lower ``operator`` to a call of itself where ``when`` says so of its arguments; False if it has no lowering.

    A graph that stock Inductor could not lower stays one that it cannot, cached or not: where the call finds no kernel
    of ours it meets PyTorch's own, with its own error.
    """
    from torch._inductor import lowering

    stock = lowering.lowerings.get(operator)
    if stock is None:
        return False  # then it is called through the dispatcher already
    if getattr(stock, "_octavo", False):
        return True
    fallback = lowering.fallback_handler(operator, add_to_fallback_set=False)

    @functools.wraps(stock)
    def lowered(*args: Any, **kwargs: Any) -> Any:
        return (fallback if when(*args, **kwargs) else stock)(*args, **kwargs)

    lowered._octavo = True  # type: ignore[attr-defined]
    lowering.lowerings[operator] = lowered
    return True


def _is_mx(
    a: Any, b: Any, scale_a: Any, recipe_a: Sequence[int], swizzle_a: Any, scale_b: Any, recipe_b: Sequence[int],
    *_: Any, **__: Any,
) -> bool:  # fmt: skip
    return BLOCKWISE_1X32 in (*recipe_a, *recipe_b)


def call_mx_products() -> bool:
    """Let compiled ``F.scaled_mm`` with MX operands reach the dispatcher; see ``call_instead``."""
    operator = getattr(torch.ops.aten, "_scaled_mm_v2", None)
    return operator is not None and call_instead(operator.default, _is_mx)
