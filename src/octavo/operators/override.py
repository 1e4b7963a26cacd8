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
class Override:
    """One overload of PyTorch that a kernel of ours may serve. All three callables take its arguments.

    Args:
        overload: its qualified name, e.g. ``"aten::topk.values"``.
        why_not: the gate: why the kernel is not right for the arguments, or None. Never raises for arguments that
            PyTorch would reject: those go to PyTorch, which raises its own error.
        measured: why no measurement says that it wins, or None. Skipped under ``enable(force=True)``.
        run: the kernel.
    """

    overload: str
    why_not: Callable[..., str | None]
    measured: Callable[..., str | None]
    run: Callable[..., Any]
