"""Launching Triton kernels with little host time.

``kernel[grid](...)`` spends most of a small operator's time binding arguments. The compiled kernel that it returns is
kept, keyed by everything that Triton specializes on, and run directly; whenever a profiler has installed a launch
hook, or the kernel is interpreted, the ordinary path is taken.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

_compiled: dict[tuple[Any, ...], Any] = {}


def _specialization(argument: Any) -> Any:
    """What Triton's compiled code depends on: dtype and alignment of pointers; 1, divisibility and width of ints."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() & 15 == 0
    if isinstance(argument, int):
        return argument == 1, argument & 15 == 0, -(2**31) <= argument < 2**31
    return None


@functools.cache
def _runtime() -> Any:
    from triton import knobs

    return knobs.runtime


def _hooked(runtime: Any) -> bool:
    """Whether a profiler listens to launches; a hook is a chain of callables that may be empty."""
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter)) or bool(getattr(leave, "calls", leave))


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: tuple[Any, ...],
    constants: dict[str, Any],
    num_warps: int,
    device: torch.device,
) -> None:
    """Run a Triton kernel on ``device``'s current stream.

    Args:
        kernel: the ``triton.jit`` function.
        grid: one to three program counts.
        arguments: its run-time arguments, in order (tensors, ints, floats).
        constants: its constexpr arguments, which follow in the same order.
        num_warps: warps of a program.
        device: where the tensors are; need not be the current device.
    """
    if device.type != "cuda":
        kernel[grid](*arguments, **constants, num_warps=num_warps)
        return
    index = device.index
    if index is not None and index != torch.cuda.current_device():
        with torch.cuda.device(index):
            launch(kernel, grid, arguments, constants, num_warps, device)
        return
    key = (
        kernel,
        index,
        num_warps,
        tuple(constants.values()),
        tuple(_specialization(a) for a in arguments),
    )
    compiled = _compiled.get(key)
    if compiled is None or _hooked(_runtime()):
        _compiled[key] = kernel[grid](*arguments, **constants, num_warps=num_warps)
        return
    x, y, z = (*grid, 1, 1)[:3]
    stream = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device() if index is None else index)
    metadata = compiled.packed_metadata
    compiled.run(
        x, y, z, stream, compiled.function, metadata, None, None, None, *arguments, *constants.values()
    )
