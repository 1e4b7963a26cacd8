"""Attention on a GPU: the kernels against float64, and PyTorch's operators with ours in their place."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from octavo import operators
from octavo.bench.attention_suite import BACKENDS, Backend
from octavo.operators import attention
from octavo.operators.attention import reference
from octavo.testing import sqnr

from . import attention_checks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("group", ["shapes", "layouts", "values"])
def test_small_tiles(group: str) -> None:
    assert getattr(attention_checks, group)() > 5


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("dim", "value_dim"), [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]
)
def test_the_plans_of_the_table(dim: int, value_dim: int, causal: bool) -> None:
    for queries, keys in ((515, 515), (256, 1024), (1000, 129)):
        attention_checks.check(
            *attention_checks.tensors(1, 4, 2, queries, keys, dim, value_dim, torch.bfloat16), causal, None
        )


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_error_is_at_most_a_fifth_above_that_of_the_flash_kernel(dim: int, dtype: torch.dtype) -> None:
    q, k, v, g = attention_checks.tensors(2, 4, 4, 1024, 1024, dim, dim, dtype)
    flash = BACKENDS["flash"]
    theirs = flash.forward(q, k, v, True)
    ours = attention.attention(q, k, v, True)
    want = (reference.attention(q, k, v, True)[0], *reference.attention_backward(g, q, k, v, True))
    got = (ours[0], *attention.attention_backward(g, q, k, v, *ours, True))
    other = (theirs[0], *flash.backward(g, q, k, v, theirs, True))
    for name, mine, yours, exact in zip(("output", "dq", "dk", "dv"), got, other, want):
        error = [(x.double() - exact).norm().item() for x in (mine, yours)]
        assert error[0] <= 1.2 * error[1], f"{name}: {error[0]:.3g} against {error[1]:.3g}"


def _with(
    backend: Backend, forward_on: bool, backward_on: bool, tensors: list[torch.Tensor]
) -> list[torch.Tensor]:
    q, k, v, g = tensors
    with operators.enabled("attention", force=True) if forward_on else operators.enabled("topk"):
        saved = backend.forward(q, k, v, True)
    with operators.enabled("attention", force=True) if backward_on else operators.enabled("topk"):
        return [saved[0], *backend.backward(g, q, k, v, saved, True)]


@pytest.mark.parametrize("name", ["cudnn", "flash"])
def test_a_backward_of_ours_follows_a_forward_of_theirs_and_the_reverse(name: str) -> None:
    if torch.version.hip and name == "cudnn":
        pytest.skip("cuDNN is NVIDIA's")
    tensors = attention_checks.tensors(2, 4, 4, 512, 512, 128, 128, torch.bfloat16)
    expected = _with(BACKENDS[name], False, False, tensors)
    for forward_on, backward_on in ((True, True), (True, False), (False, True)):
        for got, want in zip(_with(BACKENDS[name], forward_on, backward_on, tensors), expected):
            assert sqnr(got, want) > 45, (forward_on, backward_on)
            assert got.stride() == want.stride()


def _loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).float().square().mean()


def test_through_the_public_function_eager_and_compiled() -> None:
    made = attention_checks.tensors(2, 8, 2, 300, 300, 128, 128, torch.bfloat16)[:3]
    leaves = [x.requires_grad_() for x in made]
    want = torch.autograd.grad(_loss(*leaves), leaves)
    operators.reset_counts()
    with operators.enabled("attention", force=True):
        eager = torch.autograd.grad(_loss(*leaves), leaves)
        assert sum(s.taken for s in operators.status()) == 2
        compiled = torch.autograd.grad(torch.compile(_loss, fullgraph=True)(*leaves), leaves)
        assert sum(s.taken for s in operators.status()) == 4
    for a, b, c in zip(want, eager, compiled):
        assert sqnr(b, a) > 40
        assert sqnr(c, a) > 40


def test_deterministic_mode_is_bit_equal() -> None:
    q, k, v, g = attention_checks.tensors(1, 4, 2, 700, 700, 128, 128, torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for _ in range(3):
            out, lse = attention.attention(q, k, v, True)
            runs.append((out, lse, *attention.attention_backward(g, q, k, v, out, lse, True)))
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in itertools.pairwise(runs):
        assert all(torch.equal(x, y) for x, y in zip(a, b))


def test_graph_capture_and_a_side_stream() -> None:
    q, k, v, g = attention_checks.tensors(1, 4, 2, 256, 256, 64, 64, torch.bfloat16)

    def step() -> tuple[torch.Tensor, ...]:
        out, lse = attention.attention(q, k, v, True)
        return out, *attention.attention_backward(g, q, k, v, out, lse, True)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for x in (q, k, v, g):
        x.normal_()
    graph.replay()
    for a, b in zip(captured, step()):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.case("B50")
def test_nothing_to_compute_is_served_by_every_backend() -> None:
    with operators.enabled("attention"):
        for batch, queries, keys in ((0, 8, 8), (2, 0, 8), (2, 8, 0)):
            q, k, v, _ = attention_checks.tensors(batch, 2, 2, queries, keys, 64, 64, torch.float16)
            out = F.scaled_dot_product_attention(q, k, v)
            assert out.shape == q.shape
            assert not out.any()
        q, k, v, _ = attention_checks.tensors(2, 10, 10, 3952, 16, 64, 64, torch.float16)
        assert F.scaled_dot_product_attention(q, k, v).isfinite().all()
    q, k, v, _ = attention_checks.tensors(1, 6, 4, 8, 8, 64, 64, torch.float16)
    with operators.enabled("attention", force=True), pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
