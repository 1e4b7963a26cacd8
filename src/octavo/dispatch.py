"""The only dispatch: an ordered list of kernels for each op, each with a reason for every "no".

A room (``quantize``, ``matmul``, ...) registers its kernels once, best first. ``select`` takes the first
whose ``why_not`` is None. It runs inside the op on concrete sizes, never while tracing.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Reason = str | None


@dataclass(frozen=True)
class Kernel:
    """One implementation of an op.

    Args:
        op: the op it implements, e.g. ``"quantize"``.
        name: unique within the op, e.g. ``"triton"``, ``"reference"``.
        load: ``"module:function"``, imported at first use so that no kernel language is loaded before.
        why_not: called with the op's arguments; returns None if the kernel is right for them, else the
            reason in a few words. Cheap, reads no data.
    """

    op: str
    name: str
    load: str
    why_not: Callable[..., Reason]

    @functools.cached_property
    def function(self) -> Callable[..., Any]:
        """The implementation itself."""
        module, _, attribute = self.load.partition(":")
        return getattr(importlib.import_module(module), attribute)


@dataclass(frozen=True)
class Verdict:
    """What dispatch says of one kernel: ``reason`` is None if it can serve, ``chosen`` if it does."""

    kernel: str
    reason: Reason
    chosen: bool


_KERNELS: dict[str, list[Kernel]] = {}
# Process-wide on purpose: the autograd engine runs GPU backward passes in threads of its own, which a
# context variable of the calling thread would not reach.
_forced: dict[str, str] = {}


def register(*kernels: Kernel) -> None:
    """Append kernels to their ops' lists; the order of registration is the order of preference."""
    for kernel in kernels:
        known = _KERNELS.setdefault(kernel.op, [])
        if any(k.name == kernel.name for k in known):
            raise ValueError(f"kernel {kernel.name!r} of op {kernel.op!r} is registered twice")
        known.append(kernel)


def ops() -> list[str]:
    """Names of the ops that have kernels."""
    return sorted(_KERNELS)


def kernels(op: str) -> list[Kernel]:
    """Kernels of ``op``, best first.

    Raises:
        ValueError: if no kernel of that op is registered.
    """
    if op not in _KERNELS:
        raise ValueError(f"unknown op {op!r}; known ops: {', '.join(ops())}")
    return _KERNELS[op]


@contextlib.contextmanager
def use_kernels(**names: str) -> Iterator[None]:
    """Allow only the named kernel of each op inside the block: ``use_kernels(quantize="reference")``.

    Acts on every thread of the process, so that backward passes see it too.

    Raises:
        ValueError: if an op or its kernel is unknown.
    """
    for op, name in names.items():
        known = [k.name for k in kernels(op)]
        if name not in known:
            raise ValueError(f"op {op!r} has no kernel {name!r}; it has {', '.join(known)}")
    before = dict(_forced)
    _forced.update(names)
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)


def forced(op: str) -> Kernel | None:
    """The kernel that ``use_kernels`` allows for ``op``, or None outside such a block."""
    name = _forced.get(op)
    return None if name is None else next(k for k in kernels(op) if k.name == name)


def explain(op: str, *args: Any, **kwargs: Any) -> list[Verdict]:
    """The verdict on every kernel of ``op`` for these arguments, best first."""
    forced = _forced.get(op)
    verdicts, open_place = [], True
    for kernel in kernels(op):
        if forced is not None and kernel.name != forced:
            reason: Reason = f"use_kernels allows only {forced!r}"
        else:
            reason = kernel.why_not(*args, **kwargs)
        chosen = open_place and reason is None
        open_place = open_place and not chosen
        verdicts.append(Verdict(kernel.name, reason, chosen))
    return verdicts


def select(op: str, *args: Any, **kwargs: Any) -> Kernel:
    """The kernel that serves these arguments.

    Raises:
        NotImplementedError: if none does, with the reason of each.
    """
    forced = _forced.get(op)
    for kernel in kernels(op):
        if (forced is None or kernel.name == forced) and kernel.why_not(*args, **kwargs) is None:
            return kernel
    reasons = "; ".join(f"{v.kernel}: {v.reason}" for v in explain(op, *args, **kwargs))
    raise NotImplementedError(f"no kernel of {op!r} serves these arguments: {reasons}")


def run(op: str, *args: Any, **kwargs: Any) -> Any:
    """Select and call."""
    return select(op, *args, **kwargs).function(*args, **kwargs)
