"""Run launch code that was written for a GPU on CPU tensors, its kernels executed as gfx942 or gfx950 code.

Inside `executing`, `octavo.hardware.architecture` answers the target, and a Triton launch compiles the kernel with
the specialization that Triton would choose, executes the code object and writes the results into the tensors; a
FlyDSL launch (`octavo.flydsl.launch`) likewise, where FlyDSL is installed. So a whole operator runs as it would on
the hardware: grids, tiles, constants, strides, scratch tensors and all.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch

from octavo import hardware
from octavo.check.compile import CompiledKernel, compile_kernel
from octavo.check.gcn.launch import TARGETS, Report, launch
from octavo.check.launches import Launch, specialize
from octavo.compile_cases import CompileCase
from octavo.flydsl import launch as flydsl_launch


@contextlib.contextmanager
def executing(target: str) -> Iterator[list[Report]]:
    """Execute every Triton and FlyDSL launch made inside the block; the reports come in order of launches.

    Races raise at once. Launches through the autotuner are not supported. Raises ValueError for a target that the
    executor does not run.
    """
    if target not in TARGETS:
        raise ValueError(f"the executor runs {', '.join(TARGETS)} code, not {target!r}")
    from triton.runtime.jit import JITFunction

    reports: list[Report] = []

    def run(function: Any, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        names = [p.name for p in function.params]
        values = {**dict(zip(names, arguments, strict=False)), **keywords}
        special = specialize(function, arguments, keywords)
        code = _compiled(_Key(special, target))
        sizes: Any = grid(values) if callable(grid) else grid
        report = launch(code, tuple(sizes), [_argument(values[name]) for name in special.signature])
        report.raise_for_races()
        reports.append(report)

    def run_flydsl(case: CompileCase, grid: Sequence[int], arguments: Sequence[Any]) -> None:
        from octavo.check import store

        report = launch(store.compile_case(case, target), grid, [_argument(a) for a in arguments])
        report.raise_for_races()
        reports.append(report)

    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(flydsl_launch, "launch", run_flydsl),
        mock.patch.object(hardware, "architecture", return_value=target),
    ):
        yield reports


class _Key:
    """A launch, hashed by what it compiles to."""

    def __init__(self, special: Launch, target: str) -> None:
        self.special, self.target = special, target
        self.identity = (special.identity, target)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.identity == other.identity

    def __hash__(self) -> int:
        return hash(self.identity)


@functools.lru_cache(maxsize=256)
def _compiled(key: _Key) -> CompiledKernel:
    case = key.special.case("", "", "general")
    return compile_kernel(
        case.function,
        key.target,
        case.signature,
        case.constexprs,
        divisible=case.divisible,
        num_warps=case.num_warps,
        num_stages=case.num_stages,
        fp_fusion=case.fp_fusion,
        options=case.options,
    )


def _argument(value: Any) -> Any:
    """Numbers as they are; a tensor as the bytes from its first element to the end of its storage."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.device.type != "cpu":
        raise ValueError(f"the executor reads CPU tensors, not ones on {value.device}")
    if value.numel() == 0:
        return np.zeros(0, np.uint8)
    storage = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage())
    return storage.numpy()[value.storage_offset() * value.element_size() :]
