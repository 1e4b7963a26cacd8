"""Launching Triton kernels with little host time.

``kernel[grid](...)`` spends most of a small operator's time binding arguments. The compiled kernel that it
returns is kept, keyed by everything that Triton specializes on, and run directly; while a profiler has installed
a launch hook, or where the kernel is interpreted, the ordinary path is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from triton import knobs

_compiled: dict[tuple[Any, ...], Any] = {}


def _specialization(argument: Any) -> Any:
    # Dtype and alignment of pointers; whether integers are 1, multiples of 16, or wide.
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() & 15 == 0
    if isinstance(argument, int):
        return argument == 1, argument & 15 == 0, -(2**31) <= argument < 2**31
    return None


def _hooked() -> bool:
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter)) or bool(getattr(leave, "calls", leave))


def launch(
    kernel: Any, grid: tuple[int, int], arguments: tuple[Any, ...], constants: Mapping[str, Any], warps: int
) -> None:
    """Run a ``triton.jit`` kernel on the current device and stream.

    Args:
        kernel: the ``triton.jit`` function.
        grid: numbers of programs in both dimensions.
        arguments: its run-time arguments in order: tensors on the current device, integers or None.
        constants: its constexpr arguments, which follow in the same order.
        warps: warps of a program.
    """
    first = arguments[0]
    if first.device.type != "cuda" or _hooked():
        kernel[grid](*arguments, **constants, num_warps=warps)
        return
    device = torch.cuda.current_device()
    key = (kernel, device, warps, *constants.values(), *map(_specialization, arguments))
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[grid](*arguments, **constants, num_warps=warps)
        return
    stream = torch._C._cuda_getCurrentRawStream(device)
    compiled.run(
        *grid, 1, stream, compiled.function, compiled.packed_metadata, None, None, None,
        *arguments, *constants.values(),
    )  # fmt: skip
