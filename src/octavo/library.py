"""The package's ``torch.library`` namespace: one call defines an op, its implementation and its fake."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("octavo", "FRAGMENT")


def define(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define ``octavo::<schema>`` for every device and return its default overload.

    ``fake`` computes output shapes, dtypes and devices alone, so that torch.compile traces the op as one
    node. Gradients belong to the autograd Functions above the ops, never to the ops themselves.
    """
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, _without_autocast(implementation), "CompositeExplicitAutograd")
    torch.library.register_fake(f"octavo::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.octavo, name).default


def _without_autocast(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """An op computes in the dtypes it states, also where the caller's autocast would cast its products."""

    @functools.wraps(implementation)
    def run(*args: Any) -> Any:
        devices = [d for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]
        if not devices:
            return implementation(*args)
        with contextlib.ExitStack() as stack:
            for device in devices:
                stack.enter_context(torch.autocast(device, enabled=False))
            return implementation(*args)

    return run
