"""What an operator folder offers to the registry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


def is_copy_on_write(tensor: torch.Tensor) -> bool:
    """Whether the tensor shares its storage lazily; asking for its address would copy it."""
    return torch._C._is_cow_tensor(tensor)  # pyright: ignore[reportAttributeAccessIssue]


@dataclass(frozen=True)
class Filter:
    """What the compiled router may refuse by itself: a part of the gate and the table of wins, as plain numbers.

    Args:
        operator: the operator's name in the tables of wins.
        tensor: position of the argument that decides.
        columns: position of the dimension that is reduced, or of the normalized shape.
        dtypes: those that the kernels are written for.
        max_columns: longest row that they take.
        k: position of k, if there is one.
        max_k: largest k that they take.
        other_dtype, too_long, k_too_large: the gate's own reasons for these.
    """

    operator: str
    tensor: int
    columns: int
    dtypes: tuple[torch.dtype, ...]
    max_columns: int
    other_dtype: str
    too_long: str
    k: int | None = None
    max_k: int = 0
    k_too_large: str = ""


@dataclass(frozen=True)
class Override:
    """One overload of PyTorch that a kernel of ours may serve. All three callables take its arguments.

    Args:
        overload: its qualified name, e.g. ``"aten::topk.values"``.
        why_not: the gate: why the kernel is not right for the arguments, or None. Never raises for arguments that
            PyTorch would reject: those go to PyTorch, which raises its own error.
        measured: why no measurement says that it wins, or None. Skipped under ``enable(force=True)``.
        run: the kernel.
        filter: for the compiled router; without one the overload is always routed in Python.
        only_with_wins: register the overload only where a table of wins has boxes of this name, or when forced: its
            calls are too many and too short to be asked in vain.
    """

    overload: str
    why_not: Callable[..., str | None]
    measured: Callable[..., str | None]
    run: Callable[..., Any]
    filter: Filter | None = None
    only_with_wins: str | None = None
