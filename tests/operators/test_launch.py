"""The short way of launching a compiled kernel, with a launcher that only notes what it is given."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo import launch as launching
from octavo.launch import Cache, Step


class _Compiled:
    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.runs: list[tuple[Any, ...]] = []

    def run(self, *arguments: Any) -> None:
        self.runs.append(arguments)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> tuple[_Compiled, list[Any]]:
    """One GPU of index 0 as far as launching goes: what is compiled, and the calls of ``launch``."""
    pytest.importorskip("triton", reason="launch hooks are Triton's")
    compiled, ordinary = _Compiled(), []

    def launch(kernel, grid, arguments, constants, num_warps, device, cooperative) -> _Compiled:
        ordinary.append(arguments)
        return compiled

    monkeypatch.setattr(launching, "launch", launch)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 77, raising=False)
    return compiled, ordinary


def _step() -> Step:
    return Step("kernel", (5, 2), (8, 1e-6), {"C": 64, "EVEN": True}, 4, torch.device("cuda", 0))


def test_first_call_is_ordinary_and_later_ones_are_short(gpu) -> None:
    compiled, ordinary = gpu
    step, a, b = _step(), torch.empty(64), torch.empty(64)
    step(a, b)
    assert ordinary == [(a, b, 8, 1e-6)]
    assert compiled.runs == []
    step(b, a)
    assert len(ordinary) == 1
    head = (5, 2, 1, 77, "function", "metadata", None, None, None)
    assert compiled.runs == [(*head, b.data_ptr(), a.data_ptr(), 8, 1e-6, 64, True)]


def test_unaligned_tensors_other_devices_and_hooks_go_the_ordinary_way(gpu, monkeypatch) -> None:
    compiled, ordinary = gpu
    step, a = _step(), torch.empty(64)
    step(a[1:])
    step(a)
    step(a[1:])
    assert len(ordinary) == 3, (
        "code compiled for unaligned addresses may not serve aligned ones, or the reverse"
    )
    with monkeypatch.context() as patch:
        patch.setattr(torch._C, "_cuda_getDevice", lambda: 1)
        step(a)
    with monkeypatch.context() as patch:
        patch.setattr(launching, "_hooked", lambda runtime: True)
        step(a)
    assert len(ordinary) == 5
    assert compiled.runs == []
    step(a)
    assert len(compiled.runs) == 1


class _Kernel:
    """Stands for a ``triton.jit`` function: notes its ordinary launches and what was compiled for each."""

    __name__ = "kernel"

    def __init__(self, *arg_names: str) -> None:
        self.arg_names = arg_names
        self.launches: list[tuple[Any, ...]] = []
        self.compiled: list[_Compiled] = []

    def __getitem__(self, grid: tuple[int, ...]):
        def run(*arguments: Any, **options: Any) -> _Compiled:
            self.launches.append((grid, arguments, options))
            self.compiled.append(_Compiled())
            return self.compiled[-1]

        return run


def test_launches_are_kept_by_device_and_specialization_and_follow_the_stream(monkeypatch) -> None:
    pytest.importorskip("triton", reason="launch hooks are Triton's")
    monkeypatch.setattr(launching, "_compiled", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 70 + index, raising=False)
    kernel, a = _Kernel("x", "n", "y", "C"), torch.empty(64)

    def launch(*arguments: Any, **options: Any) -> None:
        launching.launch(kernel, (3, 2), arguments, {"C": 8}, 4, torch.device("cuda"), **options)

    launch(a, 32, None)
    launch(a, 48, None)
    assert len(kernel.launches) == 1
    head = (3, 2, 1, 70, "function", "metadata", None, None, None)
    assert kernel.compiled[0].runs == [(*head, a, 48, None, 8)]
    for other in ((a, 33, None), (a, 1, None), (a, 2**31, None), (a[1:], 32, None), (a.int(), 32, None)):
        launch(*other)
    assert len(kernel.launches) == 6, "each is compiled to code of its own"
    launch(a, 32, None, cooperative=True)
    assert kernel.launches[-1][2] == {"C": 8, "num_warps": 4, "launch_cooperative_grid": True}
    monkeypatch.setattr(launching, "_hooked", lambda runtime: True)
    launch(a, 32, None)
    assert len(kernel.launches) == 8, "a profiler sees every launch"


def test_a_tensor_off_the_gpu_goes_to_the_kernel_itself() -> None:
    kernel = _Kernel("x", "n", "C")
    assert launching.launch(kernel, (1,), (torch.empty(4), 4), {"C": 8}, 2) is None
    ((grid, _, options),) = kernel.launches
    assert (grid, options) == ((1,), {"C": 8, "num_warps": 2})


def test_constants_that_are_not_the_last_parameters_in_order_are_refused() -> None:
    kernel = _Kernel("x", "B", "C")
    with pytest.raises(ValueError, match=r"kernel takes the constants \('B', 'C'\) last; got \['C', 'B'\]"):
        launching.launch(kernel, (1,), (torch.empty(4),), {"C": 8, "B": 1}, 2)
    assert not kernel.launches


def test_cache_forgets_rather_than_grows(monkeypatch) -> None:
    monkeypatch.setattr(Cache, "limit", 3)
    cache = Cache()
    for i in range(7):
        cache[i] = i
        assert len(cache) <= 3
    assert cache[6] == 6
