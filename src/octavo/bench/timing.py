"""Timing on a GPU: CUDA-graph replay over rotating inputs, events with a cleared cache, and host time.

Every protocol interleaves the contenders of a case and reports medians, so that a drift of the clocks meets all alike.
"""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from octavo.formats import ScaledTensor

Inputs = tuple[Any, ...]


@dataclass(frozen=True)
class Contender:
    """Something to time: ``call(*inputs)`` inside ``context()``, which is entered outside of what is timed."""

    call: Callable[..., Any]
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

    def __call__(self, *inputs: Any) -> Any:
        """One call inside its context."""
        with self.context():
            return self.call(*inputs)


Contenders = dict[str, Contender]

GRAPH = (
    "CUDA-graph replay over input copies of at least 4 times the L2 cache, interleaved, median of {rounds}"
)
EVENT_ROUNDS = 15
EVENTS = "CUDA events, cache cleared before each call, interleaved, median of {rounds}"


@dataclass(frozen=True)
class HostTime:
    """Of one call without waiting for the device, and of one call in a row of calls that is waited for at the end.

    Args:
        host_us: microseconds until the call returns, device idle.
        wall_ms: milliseconds a call, back to back, caches as they come.
    """

    host_us: float
    wall_ms: float


def l2_bytes() -> int:
    """Bytes of the current device's L2 cache."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size


def copies(input_bytes: int, most: int = 2048) -> int:
    """How many copies of the inputs total at least four times the L2 cache (at least 2)."""
    return max(2, min(most, math.ceil(4 * l2_bytes() / max(1, input_bytes))))


def nbytes(inputs: Sequence[Any]) -> int:
    """Bytes of the tensors among ``inputs``, codes and scales of quantized ones."""
    parts = [(x.data, x.scale) if isinstance(x, ScaledTensor) else (x,) for x in inputs]
    tensors = [t for part in parts for t in part if isinstance(t, torch.Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors)


def _capture(function: Contender, sets: Sequence[Inputs]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for inputs in sets[:2]:
            function(*inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with function.context(), torch.cuda.graph(graph):
        for inputs in sets:
            function.call(*inputs)
    return graph


def replay_ms(
    functions: Contenders, sets: Sequence[Inputs], rounds: int = 9, budget_ms: float = 4.0
) -> dict[str, float]:
    """Milliseconds a call of each function, from graphs of one call on each of ``sets``.

    Args:
        functions: contenders by name; each is called with every element of ``sets``.
        sets: input tuples that together exceed the cache (see ``copies``).
        rounds: how many times each graph is timed.
        budget_ms: replays of a graph within one timing last about this long.
    """
    graphs = {name: _capture(function, sets) for name, function in functions.items()}
    repeats = {}
    for name, graph in graphs.items():
        graph.replay()
        repeats[name] = max(1, min(50, math.ceil(budget_ms / max(1e-3, _events(graph.replay, 1)))))
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            times[name].append(_events(graph.replay, repeats[name]) / len(sets))
    del graphs
    gc.collect()
    return {name: statistics.median(values) for name, values in times.items()}


def _events(function: Callable[[], object], repeats: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def events_ms(functions: Contenders, sets: Sequence[Inputs], rounds: int = EVENT_ROUNDS) -> dict[str, float]:
    """Milliseconds a call of each function by CUDA events, with the L2 cache cleared before each call."""
    clear = torch.empty(4 * l2_bytes(), dtype=torch.uint8, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function(*sets[0])
    for i in range(rounds):
        for name, function in functions.items():
            inputs = sets[i % len(sets)]
            clear.zero_()
            with function.context():
                times[name].append(_events(lambda call=function.call, inputs=inputs: call(*inputs), 1))
    return {name: statistics.median(values) for name, values in times.items()}


def peak_gb(functions: Contenders, inputs: Inputs) -> dict[str, float]:
    """GB that one call of each function takes at its peak beyond what was allocated before it."""
    peaks = {}
    for name, function in functions.items():
        function(*inputs)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function(*inputs)
        peaks[name] = round((torch.cuda.max_memory_allocated() - before) / 1e9, 3)
    return peaks


def host_times(functions: Contenders, inputs: Inputs, calls: int = 200) -> dict[str, HostTime]:
    """Host time of each function on one set of inputs; see ``HostTime``."""
    out = {}
    for name, function in functions.items():
        with function.context():
            out[name] = _host_time(function.call, inputs, calls)
    return out


def _host_time(call: Callable[..., Any], inputs: Inputs, calls: int) -> HostTime:
    for _ in range(3):
        call(*inputs)
    torch.cuda.synchronize()
    singles = []
    for _ in range(30):
        start = time.perf_counter()
        call(*inputs)
        singles.append(time.perf_counter() - start)
        torch.cuda.synchronize()
    start = time.perf_counter()
    call(*inputs)
    torch.cuda.synchronize()
    # Long-running cases need no more calls than fill a twentieth of a second.
    count = max(5, min(calls, int(0.05 / (time.perf_counter() - start))))
    walls = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(count):
            call(*inputs)
        torch.cuda.synchronize()
        walls.append((time.perf_counter() - start) / count)
    return HostTime(statistics.median(singles) * 1e6, statistics.median(walls) * 1e3)


def copy_gb_s(size: int = 2**31) -> float:
    """Bytes read and written a second by a device-to-device copy, in GB/s: the ceiling of memory-bound work."""
    source = torch.empty(size, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    ms = events_ms({"copy": Contender(target.copy_)}, [(source,)], rounds=9)["copy"]
    return 2 * size / ms / 1e6


def bf16_tflops(n: int = 8192) -> float:
    """TFLOP/s of PyTorch's n x n x n BF16 product of random data: the ceiling of 16-bit products."""
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    ms = events_ms({"mm": Contender(torch.mm)}, [(a, b)], rounds=9)["mm"]
    return 2 * n**3 / ms / 1e9
