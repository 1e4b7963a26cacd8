"""What a FlyDSL kernel of this package is: a builder, its run-time arguments, its threads.

A builder takes compile-time constants and returns a FlyDSL launch function (`@flyc.jit`) whose parameters are the
kernel's own, in order, then the grid's three sizes, then the stream. Nothing here imports FlyDSL: the modules whose
names end in `_kernels` do, and they are imported where a kernel is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo import hardware

POINTERS = {
    "bf16": ("BFloat16", 2),
    "fp32": ("Float32", 4),
    "fp8e4nv": ("Float8E4M3FN", 1),
    "u8": ("Uint8", 1),
    "i64": ("Int64", 8),
    "i32": ("Int32", 4),
}
"""Element of a pointer argument (`*bf16`) to FlyDSL's type and its bytes."""
SCALARS = ("i32", "i64", "fp32")
WIDE = 16
"""Bytes to which a pointer named in `divisible` is aligned: one load of a lane."""


@dataclass(frozen=True)
class FlyKernel:
    """A kernel in FlyDSL, usable as `CompileCase.function`.

    Args:
        build: `build(**constants)` returns the launch function; a module-level function of a kernels module, so that
            the source that `octavo check` digests is found.
    """

    build: Callable[..., Any]
    language = "flydsl"

    @property
    def __name__(self) -> str:
        return self.build.__name__

    @property
    def fn(self) -> Callable[..., Any]:
        """The builder, under the name by which `octavo check` finds a kernel's module."""
        return self.build

    @property
    def cache_key(self) -> str:
        """The compiler's release; sources and constants are digested by `octavo.check.store`."""
        return f"flydsl {hardware.versions()['flydsl']}"


def placeholders(
    signature: Mapping[str, str], divisible: tuple[str, ...], values: Sequence[int | float] | None = None
) -> list[Any]:
    """Arguments of the types in `signature` to compile with.

    Args:
        signature: type of each run-time parameter, in order: `*bf16`, `i64`, `fp32`, ...
        divisible: pointers that are promised to be multiples of 16 bytes; others are aligned to their element.
        values: addresses and numbers; null pointers and zeros without them, to compile and never to run.

    Raises:
        ValueError: for a type that no FlyDSL kernel here takes.
    """
    import flydsl.compiler as flyc
    import flydsl.expr as fx

    typed: list[Any] = []
    given = [0] * len(signature) if values is None else values
    for (name, kind), value in zip(signature.items(), given, strict=True):
        if kind.startswith("*") and kind[1:] in POINTERS:
            element, size = POINTERS[kind[1:]]
            align = WIDE if name in divisible else size
            typed.append(flyc.from_c_void_p(getattr(fx, element), int(value), assumed_align=align))
        elif kind in SCALARS:
            typed.append(float(value) if kind == "fp32" else int(value))
        else:
            known = ", ".join([*(f"*{p}" for p in POINTERS), *SCALARS])
            raise ValueError(f"parameter {name!r} has type {kind!r}; FlyDSL kernels take {known}")
    return typed
