"""Shared by the executor's tests: run a line of assembly on one wave with chosen registers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

TARGETS = ("gfx942", "gfx950")
both_targets = pytest.mark.parametrize("target", TARGETS)


def bits(x: Any) -> np.ndarray:
    """uint32 view of 32-bit values, broadcast to 64 lanes."""
    array = np.ascontiguousarray(x)
    return np.broadcast_to(
        array.view(np.uint32) if array.dtype.itemsize == 4 else array.astype(np.uint32), 64
    )


def execute(
    text: str,
    target: str,
    v: Mapping[int, Any] | None = None,
    s: Mapping[int, int] | None = None,
    exec_mask: int | None = None,
    vcc: int | None = None,
    lds: np.ndarray | None = None,
    scc: bool | None = None,
) -> Any:
    """Run `text` on one wave; `v` maps register numbers (AGPRs from 256) to 64 values of 32 bits."""
    from octavo.check.gcn.asm import EXEC, VCC
    from octavo.check.gcn.launch import run_instructions

    def setup(m: Any) -> None:
        for reg, value in (v or {}).items():
            m.wv(reg, bits(value))
        for reg, value in (s or {}).items():
            m.ws(reg, np.uint32(value))
        if vcc is not None:
            m.ws64(VCC, np.full(1, vcc, np.uint64))
        if scc is not None:
            m.scc[:] = scc
        if lds is not None:
            m.lds.data[: len(lds)] = lds
        if exec_mask is not None:
            m.ws64(EXEC, np.full(1, exec_mask, np.uint64))

    return run_instructions(text, target, lds_bytes=0 if lds is None else len(lds), setup=setup)


def vector(m: Any, reg: int, dtype: Any = np.uint32) -> np.ndarray:
    """A vector register of the only wave as 64 values."""
    return m.v[reg][0].view(dtype)


def scalar(m: Any, reg: int) -> int:
    return int(m.s[reg, 0])


def scalar64(m: Any, reg: int) -> int:
    return int(m.s[reg, 0]) | int(m.s[reg + 1, 0]) << 32


def interesting_floats(rng: np.random.Generator, count: int = 64) -> np.ndarray:
    """float32 values over the whole exponent range, with zeros, subnormals, infinities and NaN among them."""
    special = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-45, -1e-40, 2.0**-126, 3.4e38, -3.4e38]
    x = np.ldexp(rng.uniform(1, 2, count), rng.integers(-148, 127, count)) * rng.choice([-1, 1], count)
    x[: len(special)] = special
    return rng.permutation(x.astype(np.float32))
