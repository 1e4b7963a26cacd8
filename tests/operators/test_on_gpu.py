"""Operators behind PyTorch's own, on a GPU: kernels, registry, streams, graphs, models."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import types
import unittest
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import operator_checks as checks

from octavo import operators
from octavo.operators.topk import reference as topk_reference

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _operators_off_afterwards():
    yield
    operators.disable()
    operators.reset_counts()


def _taken(overload: str) -> int:
    return sum(s.taken for s in operators.status() if s.overload == overload)


@pytest.mark.parametrize("group", sorted(checks.GROUPS))
def test_kernels(group: str) -> None:
    assert checks.GROUPS[group]() > 7


@pytest.mark.case("B36")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("largest", [True, False])
def test_topk_of_specials(dtype: torch.dtype, largest: bool) -> None:
    for n in (4, 2048):
        x = checks.nasty_rows(n, dtype).repeat(52, 1)[:512]
        for k in (1, min(n, 64), n):
            checks.check_topk(x, k, largest, None)
            with operators.enabled("topk", force=True):
                leaf = x.detach().requires_grad_()
                values, indices = torch.topk(leaf, k, largest=largest)
                values.sum().backward()
            assert int(indices.min()) >= 0
            assert int(indices.max()) < n
            expected = torch.zeros_like(x).scatter_(1, indices, 1.0)
            assert torch.equal(leaf.grad, expected)
    assert _taken("aten::topk") > 0


@pytest.mark.case("B39")
@pytest.mark.parametrize("deterministic", [True, False])
def test_ties_are_the_same_every_time(deterministic: bool) -> None:
    x = torch.zeros(4096, 64, device="cuda", dtype=torch.bfloat16)
    small = torch.tensor([1.0, 2, 5, 4, 5], device="cuda")
    torch.use_deterministic_algorithms(deterministic)
    try:
        with operators.enabled("topk", force=True):
            for _ in range(20):
                assert torch.equal(torch.topk(x, 8).indices, torch.arange(8, device="cuda").expand(4096, 8))
            for k in range(1, 6):
                assert torch.topk(small, k).indices.tolist() == [2, 4, 3, 1, 0][:k]
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "shape", [(4096, 256, 8), (64, 8192, 16), (16, 100000, 300), (2, 262144, 2048), (3, 1000, 32)]
)
@pytest.mark.parametrize("dtype", checks.DTYPES)
def test_topk_shapes(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    m, n, k = shape
    x = torch.randn(m, n, device="cuda").to(dtype)
    for largest in (True, False):
        checks.check_topk(x, k, largest, None)


@pytest.mark.case("B40")
def test_side_stream_and_out() -> None:
    x = torch.randn(4096, 512, device="cuda")
    expected = topk_reference.topk(x, 8)
    stream = torch.cuda.Stream()
    out = torch.empty(4096, 8, device="cuda"), torch.empty(4096, 8, dtype=torch.int64, device="cuda")
    with operators.enabled("topk", force=True):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            late = torch.zeros_like(x).copy_(x)
            torch.topk(late, 8, out=out)
        stream.synchronize()
    assert torch.equal(out[0], expected[0])
    assert torch.equal(out[1], expected[1])
    assert _taken("aten::topk.values") == 1


def test_cuda_graph() -> None:
    x = torch.randn(2048, 4096, device="cuda")
    w = torch.randn(4096, device="cuda")
    with operators.enabled(force=True):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.topk(x, 8)
            torch.topk(x, 200)
            torch.nn.functional.rms_norm(x, (4096,), w)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            small, large = torch.topk(x, 8), torch.topk(x, 200)
            y = torch.nn.functional.rms_norm(x, (4096,), w)
    x.copy_(torch.randn_like(x))
    graph.replay()
    for got, k in ((small, 8), (large, 200)):
        assert torch.equal(got.indices, topk_reference.topk(x, k)[1])
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (4096,), w))


def test_switched_while_another_thread_calls() -> None:
    x = torch.randn(128, 300, device="cuda")
    expected = torch.topk(x, 4)
    wrong = []

    def work() -> None:
        for _ in range(500):
            got = torch.topk(x, 4)
            if not (torch.equal(got.values, expected.values) and torch.equal(got.indices, expected.indices)):
                wrong.append(1)

    worker = threading.Thread(target=work)
    worker.start()
    while worker.is_alive():
        operators.enable("topk", force=True)
        time.sleep(1e-4)
        operators.disable("topk")
    worker.join()
    assert not wrong
    assert 0 < _taken("aten::topk") <= 500


@pytest.mark.case("B42")
@pytest.mark.parametrize("n", [2**20, 2**20 + 1, 2**28])
def test_row_length_limit(n: int) -> None:
    x = torch.randn(1, n, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.ones(n, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with operators.enabled("rms_norm", force=True):
        start = time.time()
        y = torch.nn.functional.rms_norm(x, (n,), w, 1e-6)
        y.sum().backward()
        torch.cuda.synchronize()
        assert time.time() - start < 60, "a compiler or kernel hangs on this row length"
    assert _taken("aten::_fused_rms_norm") == (1 if n <= 2**20 else 0)
    expected = torch.nn.functional.rms_norm(x.detach().float(), (n,), None, 1e-6)
    torch.testing.assert_close(y.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.case("B44")
@pytest.mark.case("B45")
def test_rms_norm_autograd() -> None:
    x = torch.randn(2, 1024, 256, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(256, device="cuda", dtype=torch.bfloat16)
    grads = []
    for on in (False, True):
        leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
        with operators.enabled("rms_norm", force=True) if on else contextlib.nullcontext():
            torch.nn.functional.rms_norm(leaves[0], (256,), leaves[1], 1e-6).sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    assert _taken("aten::_fused_rms_norm_backward") == 1
    with operators.enabled("rms_norm", force=True), torch.autocast("cuda", torch.bfloat16):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.RMSNorm(4)).cuda()
        y = model(torch.randn(3, 4, device="cuda"))
        y.float().sum().backward()
    assert model[1].weight.grad.dtype == torch.float32


def test_weight_gradient_is_the_same_every_time() -> None:
    x, g = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    w = torch.randn(4096, device="cuda", dtype=torch.bfloat16)
    rstd = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    with operators.enabled("rms_norm", force=True):
        runs = [
            torch.ops.aten._fused_rms_norm_backward(g, x, [4096], rstd, w, [True, True]) for _ in range(5)
        ]
    assert all(torch.equal(run[1], runs[0][1]) for run in runs)


@pytest.mark.parametrize("name", ["topk", "nn.functional.rms_norm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64])
def test_opinfo(name: str, dtype: torch.dtype) -> None:
    sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))
    from torch.testing._internal.common_methods_invocations import op_db

    (op,) = [op for op in op_db if op.name == name]
    if dtype not in op.supported_dtypes("cuda"):
        pytest.skip(f"PyTorch's {name} does not take {dtype}")
    grad = dtype.is_floating_point
    for sample in op.sample_inputs("cuda", dtype, requires_grad=grad):
        results = []
        for on in (False, True):
            with operators.enabled(force=True) if on else contextlib.nullcontext():
                out = op(sample.input, *sample.args, **sample.kwargs)
                out = [out] if isinstance(out, torch.Tensor) else list(out)
                leaves = [sample.input, *sample.args, *sample.kwargs.values()]
                leaves = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
                if grad:
                    total = sum(t.sum() for t in out if t.is_floating_point())
                    out += torch.autograd.grad(total, leaves, allow_unused=True)
            results.append(out)
        for a, b in zip(*results):
            assert (a is None) == (b is None)
            if a is not None and (a.is_floating_point() or dtype == torch.int64):
                torch.testing.assert_close(a, b)
    for error in op.error_inputs("cuda") if op.error_inputs_func is not None else ():
        found = []
        for on in (False, True):
            sample = error.sample_input
            with operators.enabled(force=True) if on else contextlib.nullcontext():
                with pytest.raises(error.error_type) as caught:
                    op(sample.input, *sample.args, **sample.kwargs)
                found.append((type(caught.value), str(caught.value)))
        assert found[0] == found[1]
    if dtype in checks.DTYPES:
        assert _taken("aten::topk" if name == "topk" else "aten::_fused_rms_norm") > 0


def test_transformers_models_run_unchanged() -> None:
    transformers = pytest.importorskip("transformers", reason="runs small Llama and Mixtral models")
    sizes = {
        "vocab_size": 500,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    tokens = torch.randint(0, 500, (2, 64), device="cuda")
    for name in ("Llama", "Mixtral"):
        operators.reset_counts()
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**sizes)
        model = getattr(transformers, f"{name}ForCausalLM")(config).cuda().eval()
        with torch.no_grad():
            expected = model(tokens).logits
            with operators.enabled("topk", "rms_norm", force=True):
                got = model(tokens).logits
                # transformers' norms are written out: they are the operator's only where they are told to be.
                assert _taken("aten::_fused_rms_norm") == 0
                with operators.fuse_rms_norms(model) as left:
                    fused = model(tokens).logits
                torch.topk(got[:, -1], 5)
        assert left == {}
        for logits in (got, fused):
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert _taken("aten::topk") == (5 if name == "Mixtral" else 1)
        assert _taken("aten::_fused_rms_norm") == 5
