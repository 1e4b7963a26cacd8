"""Checks of the registry on the CPU: the references, registered under the CPU key for this process alone.

python tests/operators/cpu_registry.py CHECK[,CHECK...] [python|c++]     opinfo before the others, stale alone
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
import types
import unittest
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from octavo import operators
from octavo.operators import override, registry, rms_norm, topk, wins
from octavo.operators.rms_norm import reference as norm_reference
from octavo.operators.topk import reference as topk_reference


def _on_cpu(gate: Callable[..., str | None], empty: bool) -> Callable[..., str | None]:
    """The gate, but accepting CPU tensors and, with ``empty``, empty ones: a reference can do both."""

    def why_not(*args, **kwargs):
        reason = gate(*args, **kwargs)
        served = reason is not None and ("is on the CPU" in reason or (empty and "is empty" in reason))
        return None if served else reason

    return why_not


def _topk(self, k, dim=-1, largest=True, sorted=True, *, values=None, indices=None):
    result = topk_reference.topk(self, k, dim, largest)
    if values is None:
        return result
    return values.copy_(result[0]), indices.copy_(result[1])


def register() -> None:
    """Route topk and rms_norm to the references at the CPU key."""
    runs = {
        "aten::topk": _topk,
        "aten::topk.values": _topk,
        "aten::_fused_rms_norm": norm_reference.fused_rms_norm,
        "aten::_fused_rms_norm_backward": norm_reference.fused_rms_norm_backward,
    }
    for name, module in (("topk", topk), ("rms_norm", rms_norm)):
        taken = [
            override.Override(
                o.overload, _on_cpu(o.why_not, name == "rms_norm"), o.measured, runs[o.overload], o.filter
            )
            for o in module.OVERRIDES
        ]
        registry.register_for_test(name, tuple(taken), "CPU")


def _taken(overload: str) -> int:
    return sum(s.taken for s in operators.status() if s.overload == overload)


def _opinfo(name: str):
    # PyTorch's test tables import this package for tests that are not ours.
    sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))
    from torch.testing._internal.common_methods_invocations import op_db

    (op,) = [op for op in op_db if op.name == name]
    return op


def _samples(name: str, dtype: torch.dtype, requires_grad: bool) -> Sequence:
    op = _opinfo(name)
    return [(op, sample) for sample in op.sample_inputs("cpu", dtype, requires_grad=requires_grad)]


def _outputs(result):
    return [
        t for t in (result if isinstance(result, tuple | list) else [result]) if isinstance(t, torch.Tensor)
    ]


def _opinfo_results(dtype: torch.dtype) -> list:
    results = []
    # In float64 the norm would be refused, and its backward has no CPU kernel to go to (see register_for_test).
    for name in ("topk", "nn.functional.rms_norm") if dtype != torch.float64 else ("topk",):
        for op, sample in _samples(name, dtype, requires_grad=True):
            result = _outputs(op(sample.input, *sample.args, **sample.kwargs))
            leaves = [sample.input, *sample.args, *sample.kwargs.values()]
            leaves = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
            total = sum(t.sum() for t in result if t.is_floating_point())
            results += [*result, *torch.autograd.grad(total, leaves, allow_unused=True)]
    return results


def opinfo() -> None:
    """PyTorch's own samples, values and gradients, before anything is registered and with the operators on."""
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    expected = []
    for dtype in dtypes:
        torch.manual_seed(0)
        expected.append(_opinfo_results(dtype))
    register()
    for dtype, before in zip(dtypes, expected):
        operators.reset_counts()
        torch.manual_seed(0)
        with operators.enabled(force=True):
            after = _opinfo_results(dtype)
        assert len(after) == len(before) > 20
        for a, b in zip(after, before):
            assert (a is None) == (b is None)
            if a is not None and a.is_floating_point():
                torch.testing.assert_close(a, b)
        for overload in ("aten::topk", "aten::_fused_rms_norm", "aten::_fused_rms_norm_backward"):
            assert (_taken(overload) > 0) == (dtype != torch.float64), (
                f"{overload} {dtype}: {_taken(overload)} taken"
            )


def errors() -> None:
    """The same exception, type and text, with the operators on and off."""
    x = torch.randn(3, 5)
    calls = [
        lambda: torch.topk(x, 6),
        lambda: torch.topk(x, -1),
        lambda: torch.topk(x, 2, dim=2),
        lambda: torch.topk(x, 2, dim=-3),
        lambda: torch.topk(x.to(torch.complex64), 2),
        lambda: torch.topk(
            x, 2, out=(torch.empty(3, 2, dtype=torch.float64), torch.empty(3, 2, dtype=torch.int64))
        ),
        lambda: torch.topk(x, 2, out=(torch.empty(3, 2), torch.empty(3, 2, dtype=torch.int32))),
        lambda: torch.nn.functional.rms_norm(x, (4,)),
        lambda: torch.nn.functional.rms_norm(x, ()),
        lambda: torch.nn.functional.rms_norm(x, (5,), torch.ones(4)),
    ]
    for i, call in enumerate(calls):
        found = []
        for on in (False, True):
            try:
                with operators.enabled(force=True) if on else operators.enabled("topk"):
                    call()
                found.append(None)
            except (RuntimeError, IndexError, ValueError) as error:
                found.append((type(error), str(error)))
        assert found[0] is not None, f"call {i} raises nothing"
        assert found[0] == found[1], f"call {i}: {found}"


def out() -> None:
    """out= of the right shape is written in place; of another shape or layout it goes to PyTorch; COW stays lazy."""
    x = torch.randn(4, 9)
    expected = torch.topk(x, 3)
    with operators.enabled("topk", force=True):
        right = (torch.empty(4, 3), torch.empty(4, 3, dtype=torch.int64))
        returned = torch.topk(x, 3, out=right)
        assert returned[0].data_ptr() == right[0].data_ptr()
        assert _taken("aten::topk.values") == 1
        empty = (torch.empty(0), torch.empty(0, dtype=torch.int64))
        torch.topk(x, 3, out=empty)
        strided = (torch.empty(3, 4).t(), torch.empty(3, 4, dtype=torch.int64).t())
        torch.topk(x, 3, out=strided)
        for values, indices in (right, empty, strided):
            assert torch.equal(values, expected.values)
            assert torch.equal(indices, expected.indices)
        assert _taken("aten::topk.values") == 1
        lazy = torch._lazy_clone(x)
        torch.topk(lazy, 3)
        assert torch._C._is_cow_tensor(lazy)
        result = torch.topk(x[0, 0], 1)
        assert result.values.ndim == 0


def threads() -> None:
    """Calls in one thread while another switches on and off: always right, nothing lost."""
    x = torch.randn(64, 40)
    expected = torch.topk(x, 4)
    wrong, calls = [], 2000

    def work() -> None:
        for _ in range(calls):
            got = torch.topk(x, 4)
            if not (torch.equal(got.values, expected.values) and torch.equal(got.indices, expected.indices)):
                wrong.append(1)

    workers = [threading.Thread(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers):
        for turn in (lambda: operators.enable("topk", force=True), operators.disable):
            turn()
            time.sleep(1e-4)
    for worker in workers:
        worker.join()
    assert not wrong
    assert 0 < _taken("aten::topk") <= 2 * calls


def stale() -> None:
    """Another library's kernel, captured by ours, is taken away: PyTorch's own is found below it."""
    x = torch.randn(3, 8)
    assert other is not None
    torch.topk(x, 2)
    assert other_calls == [1]
    other._destroy()
    expected = torch.sort(x, dim=1, descending=True).values[:, :2]
    for _ in range(2):
        assert torch.equal(torch.topk(x, 2).values, expected)
    with operators.enabled("topk", force=True):
        assert torch.equal(torch.topk(x, 2).values, expected)
    assert _taken("aten::topk") == 1
    assert other_calls == [1]


def recompute() -> None:
    """B39: a router recomputed in a checkpoint chooses the same experts, ties included."""
    seen = []

    def router(scores):
        values, indices = torch.topk(scores, 8)
        seen.append(indices)
        return values

    scores = torch.zeros(4096, 64, dtype=torch.bfloat16, requires_grad=True)
    with operators.enabled("topk", force=True), set_checkpoint_early_stop(False):
        checkpoint(router, scores, use_reentrant=False).sum().backward()
        for _ in range(20):
            router(scores)
    assert len(seen) == 22
    assert all(torch.equal(indices, seen[0]) for indices in seen)
    assert torch.equal(seen[0][0], torch.arange(8))
    expected = torch.zeros(4096, 64, dtype=torch.bfloat16)
    expected[:, :8] = 1
    assert torch.equal(scores.grad, expected)


def reasons() -> None:
    """Off by default, unmeasured refused with a reason, every refusal counted."""
    x = torch.randn(3, 8)
    torch.topk(x, 2)
    assert _taken("aten::topk") == 0
    assert not any(s.refused for s in operators.status())
    with operators.enabled("topk"):
        torch.topk(x, 2)
        torch.topk(x.double(), 2)
        torch.topk(x.double(), 2)
    entry = [s for s in operators.status() if s.overload == "aten::topk"][-1]  # the CPU's, beside a GPU's
    assert entry.refused == {"not measured on cpu": 1, "dtype is not float32, bfloat16 or float16": 2}
    assert not entry.enabled
    with operators.enabled("topk", force=True):
        inner = torch.topk(x, 2)
        with operators.enabled("topk"):
            torch.topk(x, 2)
        torch.topk(x, 2)
    assert torch.equal(inner.values, torch.topk(x, 2).values)
    assert _taken("aten::topk") == 2
    operators.reset_counts()
    assert _taken("aten::topk") == 0


def filter() -> None:
    """What the compiled router refuses by itself, from a table of wins for this CPU; the rest is asked of Python."""
    folder = Path(tempfile.mkdtemp())
    os.environ["OCTAVO_WINS"] = str(folder)
    x = torch.randn(6, 40)
    wide = torch.randn(3, 2, topk.plans.MAX_K + 2)
    calls = {
        "dtype is not float32, bfloat16 or float16": lambda: torch.topk(x.double(), 2),
        "k is above 2048": lambda: torch.topk(wide, topk.plans.MAX_K + 1),
        wins.OTHER_DIMENSION: lambda: torch.topk(x, 2, dim=0),
        wins.NOT_A_WIN: lambda: torch.topk(x, 9),
        "k is 0 or out of range": lambda: torch.topk(x, 0),
        "the tensor is copy-on-write": lambda: torch.topk(torch._lazy_clone(x.clone()), 2),
    }
    expected = {reason: call() for reason, call in calls.items()}
    unmeasured = torch.topk(x, 2)
    with operators.enabled("topk"):
        for _ in range(3):
            torch.topk(x, 2)
        assert _refused("aten::topk") == {"not measured on cpu": 3}, _refused("aten::topk")
        box = {"dtype": ["float32"], "m": [6, 6], "n": [40, 40], "k": [1, 8]}
        (folder / "cpu.json").write_text(json.dumps({"run": "by hand", "topk": [box]}))
        wins.reload()
        operators.reset_counts()
        for call in (lambda: torch.topk(x, 2), lambda: torch.topk(x.unsqueeze(0), 2)):
            for got, want in zip(call(), unmeasured):
                assert torch.equal(got.view_as(want), want)
        assert _taken("aten::topk") == 2
        for reason, call in calls.items():
            for _ in range(2):
                for got, want in zip(call(), expected[reason]):
                    assert torch.equal(got, want), reason
        assert _refused("aten::topk") == dict.fromkeys(calls, 2)
    with operators.enabled("topk", force=True):
        torch.topk(x, 9)
        assert _taken("aten::topk") == 3
    torch.topk(x, 2)
    assert _taken("aten::topk") == 3, "switched off"
    del os.environ["OCTAVO_WINS"]
    wins.reload()


def _refused(overload: str) -> dict[str, int]:
    entry = [s for s in operators.status() if s.overload == overload][-1]
    return entry.refused


CHECKS = {f.__name__: f for f in (opinfo, errors, out, threads, stale, recompute, reasons, filter)}
other = None
other_calls: list[int] = []

if __name__ == "__main__":
    names, router = sys.argv[1].split(","), sys.argv[2] if len(sys.argv) > 2 else "python"
    if "stale" in names:
        below = torch.library.get_kernel("aten::topk", "CPU")
        other = torch.library.Library("aten", "IMPL")

        def counted(keys, *args, **kwargs):
            other_calls.append(1)
            return below.call_boxed(keys, *args, **kwargs)

        other.impl("topk", counted, "CPU", with_keyset=True)
    if "opinfo" not in names:
        register()
    sys.modules["cpu_registry"] = sys.modules["__main__"]
    from cpu_cases import CHECKS as CASES

    for name in names:
        operators.reset_counts()
        (CHECKS | CASES)[name]()
        served = [s for s in operators.status() if "topk" in s.overload or "rms_norm" in s.overload]
        assert {s.router for s in served} == {router}
        print("passed", name)
