"""Checks of attention's overrides on the CPU: the reference, registered under the CPU key for this process alone.

python tests/operators/attention_registry.py pairs|refusals|compiled
"""

from __future__ import annotations

import sys

import pytest
import torch

from octavo import operators
from octavo.operators import attention, override, registry
from octavo.operators.attention import reference


def _attention(query, key, value, causal=False, scale=None):
    out, lse = reference.attention(query, key, value, causal, scale, torch.float32)
    return torch.empty_like(query).copy_(out) if out.shape == query.shape else out.to(
        query.dtype
    ), lse.float()


def _attention_backward(grad, query, key, value, out, lse, causal=False, scale=None):
    assert lse.numel() == query[..., 0].numel()
    return tuple(
        g.to(query.dtype) for g in reference.attention_backward(grad, query, key, value, causal, scale)
    )


def register() -> None:
    """Route the four overloads at the CPU key, the kernels replaced by the reference."""
    attention.attention, attention.attention_backward = _attention, _attention_backward
    attention.DTYPES = (*attention.DTYPES, torch.float32)

    def on_cpu(gate):
        def why_not(*args, **kwargs):
            reason = gate(*args, **kwargs)
            return None if reason is not None and "is on the CPU" in reason else reason

        return why_not

    never = lambda *args, **kwargs: "not measured"  # noqa: E731
    taken = tuple(override.Override(o.overload, on_cpu(o.why_not), never, o.run) for o in attention.OVERRIDES)
    registry.register_for_test("attention", taken, "CPU")


def _taken(overload: str) -> int:
    return sum(s.taken for s in operators.status() if s.overload == overload)


def _leaves(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(*shape, requires_grad=True) for shape in shapes]


def pairs() -> None:
    """PyTorch's autograd calls the backward of the operator that served the forward, with what it returned."""
    register()
    with operators.enabled("attention", force=True):
        for name, call in (
            ("flash", lambda q, k, v: torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)),
            (
                "cudnn",
                lambda q, k, v: torch.ops.aten._scaled_dot_product_cudnn_attention(
                    q, k, v, None, True, 0.0, True
                ),
            ),
        ):
            for kv_heads in (4, 2):
                q, k, v = _leaves((2, 4, 9, 16), (2, kv_heads, 9, 16), (2, kv_heads, 9, 16))
                out = call(q, k, v)
                assert out[1].shape == ((2, 4, 9, 1) if name == "cudnn" else (2, 4, 9))
                grads = torch.autograd.grad(out[0].square().sum(), (q, k, v))
                want = torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=True, enable_gqa=True
                )
                torch.testing.assert_close(out[0], want)
                for a, b in zip(grads, torch.autograd.grad(want.square().sum(), (q, k, v))):
                    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
            overload = f"aten::_scaled_dot_product_{name}_attention"
            assert (_taken(overload), _taken(f"{overload}_backward")) == (2, 2), name


def refusals() -> None:
    """What is refused goes to what was there before: on the CPU nothing, which says so."""
    register()
    q, k, v = _leaves((1, 2, 4, 16), (1, 2, 4, 16), (1, 2, 4, 16))
    with (
        operators.enabled("attention", force=True),
        pytest.raises(NotImplementedError, match="flash_attention"),
    ):
        torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.5)
    refused = next(s.refused for s in operators.status() if s.overload.endswith("flash_attention"))
    assert refused == {"dropout is not served": 1}
    with operators.enabled("attention"), pytest.raises(NotImplementedError, match="flash_attention"):
        torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)  # that nothing measured


def compiled() -> None:
    """One graph, the same results, laid out as PyTorch's shape functions promise."""
    register()

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention(q * 2, k, v, 0.0, True)[0].relu()

    q, k, v = (x.detach().transpose(1, 2).requires_grad_() for x in _leaves(*[(2, 9, 4, 16)] * 3))
    with operators.enabled("attention", force=True):
        expected = step(q, k, v)
        grads = torch.autograd.grad(expected.sum(), (q, k, v))
        got = torch.compile(step, backend="aot_eager", fullgraph=True)(q, k, v)
        torch.testing.assert_close(got, expected)
        assert got.stride() == expected.stride()
        for a, b in zip(torch.autograd.grad(got.sum(), (q, k, v)), grads):
            torch.testing.assert_close(a, b)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    print(sys.argv[1], "passed")
