"""Which calls of PyTorch's operators multiply given operands, and why each would be served or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from octavo.formats import ScaledTensor
from octavo.operators import registry
from octavo.operators.gemm import fp8, scaled

Call = tuple[str, tuple[Any, ...], dict[str, Any]]
_RECIPES = {kind: number for number, kind in fp8.RECIPES.items()}
_TENSORWISE = 0


def verdicts(op: str, arguments: tuple[Any, ...]) -> list[tuple[str, str | None]]:
    """(overload, why the operator ``gemm`` would leave it to PyTorch or None) for the calls that do what ``op`` does.

    Args:
        op: ``mm``, ``scaled_mm``, ``grouped_mm`` or ``scaled_grouped_mm``; others have none.
        arguments: of its kernels; fake tensors will do.
    """
    return [
        (overload, registry.why_not("gemm", overload, *args, **kwargs))
        for overload, args, kwargs in _calls(op, arguments)
    ]


def _calls(op: str, arguments: tuple[Any, ...]) -> Iterator[Call]:
    if op == "mm":
        x, w = arguments
        yield "aten::mm", (x, w.t()), {}
    elif op == "grouped_mm":
        x, w, offs, bias = arguments
        yield "aten::_grouped_mm", (x, w.mT, offs, bias), {}
    elif op == "scaled_grouped_mm":
        a, b, offs, bias, dtype, fast = arguments
        scales = (x.scale.squeeze(-1) for x in (a, b))
        options = {"out_dtype": dtype, "use_fast_accum": fast}
        yield "aten::_scaled_grouped_mm", (a.data, b.data.mT, *scales, offs, bias), options
    elif op == "scaled_mm":
        a, b, bias, dtype, fast = arguments
        first, second = _read_by_pytorch(a, second=False), _read_by_pytorch(b, second=True)
        options = {"bias": bias, "out_dtype": dtype, "use_fast_accum": fast}
        left, right = ([first], [_recipe(a)], [0]), ([second], [_recipe(b)], [0])
        yield "aten::_scaled_mm_v2", (a.data, b.data.t(), *left, *right), options


def _recipe(x: ScaledTensor) -> int:
    return scaled.BLOCKWISE_1X32 if x.format.is_mx else _RECIPES.get(x.format.granularity, _TENSORWISE)


def _read_by_pytorch(x: ScaledTensor, second: bool) -> torch.Tensor:
    """Room for the scales as PyTorch's kernels read them (plain, of MX operands); what they hold is not asked."""
    if x.format.granularity == "1x128":
        outer = x.scale.new_empty(x.scale.shape[::-1])
        return outer if second else outer.t()
    return x.scale.t() if second and x.format.granularity == "128x128" else x.scale.contiguous()
