"""Launching Triton kernels with little host time.

``kernel[grid](...)`` spends most of a small operator's time binding arguments. The compiled kernel that it returns is
kept, keyed by everything that Triton specializes on, and run directly; whenever a profiler has installed a launch
hook, or the kernel is interpreted, the ordinary path is taken.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
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


def _check_order(kernel: Any, arguments: int, constants: Mapping[str, Any]) -> None:
    """Constants reach a compiled kernel by place, not by name: theirs must be the order of its parameters."""
    expected = kernel.arg_names[arguments:]
    if list(constants) != list(expected):
        raise ValueError(f"{kernel.__name__} takes the constants {expected} last; got {list(constants)}")


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: tuple[Any, ...],
    constants: Mapping[str, Any],
    num_warps: int,
    device: torch.device | None = None,
    cooperative: bool = False,
) -> Any:
    """Run a Triton kernel on its device's current stream; returns what Triton compiled, None off the GPU.

    Args:
        kernel: the ``triton.jit`` function.
        grid: one to three program counts.
        arguments: its run-time arguments, in order (tensors, ints, floats or None).
        constants: its constexpr arguments, which follow in the same order.
        num_warps: warps of a program.
        device: where the tensors are, which need not be the current device; the first argument's by default.
        cooperative: start only if all programs fit the device at once, so that they may wait for each other.
    """
    if device is None:
        device = arguments[0].device
        assert isinstance(device, torch.device)
    options: dict[str, Any] = {"num_warps": num_warps}
    if device.type != "cuda":
        _check_order(kernel, len(arguments), constants)
        kernel[grid](*arguments, **constants, **options)
        return None
    if cooperative:
        options["launch_cooperative_grid"] = True
    index = device.index
    if index is not None and index != torch.cuda.current_device():
        with torch.cuda.device(index):
            return launch(kernel, grid, arguments, constants, num_warps, device, cooperative)
    key = (
        kernel,
        index,
        num_warps,
        cooperative,
        tuple(constants.values()),
        tuple(_specialization(a) for a in arguments),
    )
    compiled = _compiled.get(key)
    if compiled is None or _hooked(_runtime()):
        _check_order(kernel, len(arguments), constants)
        compiled = _compiled[key] = kernel[grid](*arguments, **constants, **options)
        return compiled
    x, y, z = (*grid, 1, 1)[:3]
    stream = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device() if index is None else index)
    metadata = compiled.packed_metadata
    compiled.run(
        x, y, z, stream, compiled.function, metadata, None, None, None, *arguments, *constants.values()
    )
    return compiled


class Step:
    """A launch of which only the tensors change, and they in address alone: dtypes, shapes and strides stay.

    Once compiled, a call with addresses that are multiples of 16 hands them straight to Triton's launcher; any other
    call goes through ``launch``.

    Args:
        kernel: the ``triton.jit`` function, whose parameters are tensors, then numbers, then constants.
        grid: one to three program counts.
        scalars: its numbers, in order.
        constants: as for ``launch``.
        num_warps: warps of a program.
        device: where the tensors are.
        cooperative: as for ``launch``.
    """

    __slots__ = (
        "_constants",
        "_cooperative",
        "_device",
        "_grid",
        "_index",
        "_kernel",
        "_ready",
        "_scalars",
        "_warps",
    )

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        scalars: tuple[int | float, ...],
        constants: dict[str, Any],
        num_warps: int,
        device: torch.device,
        cooperative: bool = False,
    ) -> None:
        self._kernel, self._grid, self._scalars = kernel, grid, scalars
        self._constants, self._warps, self._device = constants, num_warps, device
        self._cooperative = cooperative
        self._index = device.index
        self._ready: tuple[Any, ...] | None = None

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Launch on ``tensors``."""
        ready = self._ready
        if ready is not None and torch._C._cuda_getDevice() == self._index and not _hooked(_runtime()):
            addresses = [tensor.data_ptr() for tensor in tensors]
            if not functools.reduce(operator.or_, addresses) & 15:
                run, programs, function, metadata, rest = ready
                stream = torch._C._cuda_getCurrentRawStream(self._index)
                # Triton's launchers take an address in place of a tensor, and then do not ask the driver about it.
                run(*programs, stream, function, metadata, None, None, None, *addresses, *rest)
                return
        arguments = (*tensors, *self._scalars)
        compiled = launch(
            self._kernel,
            self._grid,
            arguments,
            self._constants,
            self._warps,
            self._device,
            self._cooperative,
        )
        if compiled is not None and ready is None and all(t.data_ptr() & 15 == 0 for t in tensors):
            programs = (*self._grid, 1, 1)[:3]
            rest = (*self._scalars, *self._constants.values())
            self._ready = (compiled.run, programs, compiled.function, compiled.packed_metadata, rest)


Prepared = Callable[..., None]
"""The launches of one call of an operator, to be called with its tensors."""


class Cache(dict[Any, Any]):
    """What was prepared for arguments seen before; forgets everything once there are ``limit`` of them."""

    limit = 4096

    def __setitem__(self, key: Any, value: Any) -> None:
        if len(self) >= self.limit:
            self.clear()
        super().__setitem__(key, value)
