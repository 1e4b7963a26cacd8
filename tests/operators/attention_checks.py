"""Checks of the attention kernels on any device: a GPU, or the CPU with Triton's interpreter.

TRITON_INTERPRET=1 python tests/operators/attention_checks.py shapes|layouts|values     (prints the number of cases)
"""

from __future__ import annotations

import os
import sys

import torch

from octavo.operators import attention
from octavo.operators.attention import plan as plans
from octavo.operators.attention import reference
from octavo.operators.attention.plan import Plan, Tile
from octavo.testing import poisoned_allocations, sqnr

DEVICE = "cuda" if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1" else "cpu"
FLOOR_DB = {torch.bfloat16: 48, torch.float16: 66}
SMALL = Tile(32, 32, 4, 1)


def plan(descriptors: bool = False, fused: bool = False, tile: Tile = SMALL) -> Plan:
    """A plan of one tile, small enough that every loop runs and every edge is met."""
    return Plan(tile, tile, tile, descriptors, fused)


def tensors(
    batch: int,
    heads: int,
    kv_heads: int,
    queries: int,
    keys: int,
    dim: int,
    value_dim: int,
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    """Query, key, value and the output's gradient."""
    generator = torch.Generator().manual_seed(0)
    shapes = (
        (heads, queries, dim),
        (kv_heads, keys, dim),
        (kv_heads, keys, value_dim),
        (heads, queries, value_dim),
    )
    return [torch.randn(batch, *s, generator=generator).to(DEVICE, dtype) for s in shapes]


def check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    causal: bool,
    use: Plan | None,
    scale=None,
) -> None:
    """Output, log-sum-exp and gradients against the float64 reference, and a second run bit for bit."""
    what = f"{tuple(q.shape)} {tuple(k.shape)} {tuple(v.shape)} {q.dtype} causal={causal} {use}"
    with poisoned_allocations():
        out, lse = attention.attention(q, k, v, causal, scale, plan=use)
        grads = attention.attention_backward(g, q, k, v, out, lse, causal, scale, plan=use)
        again = attention.attention(q, k, v, causal, scale, plan=use)
        grads_again = attention.attention_backward(g, q, k, v, out, lse, causal, scale, plan=use)
    expected, expected_lse = reference.attention(q, k, v, causal, scale)
    floor = FLOOR_DB[q.dtype]
    assert out.dtype == q.dtype
    assert sqnr(out, expected) >= floor, f"{what}: output {sqnr(out, expected):.1f} dB"
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=2e-5, msg=f"{what}: log-sum-exp")
    for name, grad, want, like in zip(
        "qkv", grads, reference.attention_backward(g, q, k, v, causal, scale), (q, k, v)
    ):
        assert grad.dtype == like.dtype, what
        assert sqnr(grad, want) >= floor, f"{what}: gradient of {name} {sqnr(grad, want):.1f} dB"
    if use is None or not use.fused:
        assert all(torch.equal(a, b) for a, b in zip((out, lse, *grads), (*again, *grads_again))), what


def shapes() -> int:
    """Head dimensions that are cut in one and two parts and padded, grouped heads, unequal lengths, one row."""
    bf16, fp16 = torch.bfloat16, torch.float16
    cases = [
        ((2, 2, 1, 65, 65, 64, 64, bf16), True, plan()),
        ((1, 4, 2, 70, 33, 96, 40, bf16), True, plan()),
        ((1, 2, 2, 33, 100, 24, 64, fp16), True, plan()),
        ((1, 2, 2, 33, 100, 192, 128, bf16), False, plan()),
        ((1, 2, 1, 64, 64, 32, 32, fp16), True, plan(fused=True)),
        ((1, 2, 2, 50, 70, 96, 96, bf16), False, plan(fused=True)),
        ((1, 4, 2, 70, 33, 96, 40, bf16), True, plan(descriptors=True)),
        ((1, 1, 1, 40, 90, 72, 200, bf16), False, plan(descriptors=True, fused=True)),
        ((1, 1, 1, 1, 1, 16, 16, bf16), True, plan()),
        ((3, 1, 1, 1, 75, 16, 16, bf16), False, plan()),
        ((1, 1, 1, 90, 40, 16, 16, bf16), True, plan(tile=Tile(16, 64, 4, 1))),
        ((1, 1, 1, 90, 130, 16, 16, bf16), True, plan(tile=Tile(64, 16, 4, 1))),
    ]
    for sizes, causal, use in cases:
        check(*tensors(*sizes), causal, use)
    return len(cases)


def layouts() -> int:
    """Interleaved heads, a slice of a fused projection, an expanded gradient; results laid out as PyTorch promises."""
    q, k, v, g = tensors(2, 2, 2, 40, 40, 32, 32, torch.bfloat16)
    interleaved = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    out, lse = attention.attention(*interleaved, True, plan=plan())
    assert out.stride() == interleaved[0].stride()
    grads = attention.attention_backward(g, *interleaved, out, lse, True, plan=plan())
    assert all(a.stride() == b.stride() for a, b in zip(grads, interleaved))
    check(*interleaved, g, True, plan())
    packed = torch.cat([x.transpose(1, 2) for x in (q, k, v)], -1)  # [B, L, H, 96]
    check(
        *(packed[..., 32 * i : 32 * i + 32].transpose(1, 2) for i in range(3)),
        g,
        True,
        plan(descriptors=True),
    )
    odd = torch.randn(2, 2, 40, 33).to(DEVICE, torch.bfloat16)[..., :32]  # rows that no descriptor can read
    check(odd, k, v, g, False, plan(descriptors=True))
    check(q, k, v, torch.ones(1, 1, 1, 1, device=DEVICE, dtype=q.dtype).expand_as(g), True, plan())
    check(q, k, v, g, True, plan(), 0.5)
    narrow = attention.attention(*interleaved[:2], v[..., :16], True, plan=plan())[0]
    assert narrow.stride() == (40 * 2 * 16, 16, 2 * 16, 1)
    return 6


def values() -> int:
    """B52 (huge scores), NaN and infinities where PyTorch has them, B50 (nothing to compute)."""
    count = 0
    for length in (1, 64):
        x = torch.zeros(1, 1, length, 16, device=DEVICE, dtype=torch.bfloat16)
        x[..., 0] = 133120
        one = torch.ones_like(x)
        out, lse = attention.attention(x, x, one, plan=plan())
        assert torch.equal(out, one)
        grads = attention.attention_backward(one, x, x, one, out, lse, plan=plan())
        assert all(grad.isfinite().all() for grad in grads)
        count += 1
    q, k, v, g = tensors(1, 1, 1, 40, 40, 16, 16, torch.bfloat16)
    for bad in (float("nan"), float("inf")):
        spoiled = k.clone()
        spoiled[0, 0, 7, 3] = bad
        out, lse = attention.attention(q, spoiled, v, True, plan=plan())
        assert out[:, :, :7].isfinite().all(), "queries that do not see the key are untouched"
        # PyTorch's CPU kernel, where infinite scores turn into NaN as in the formula; its CUDA kernels differ.
        want = torch.nn.functional.scaled_dot_product_attention(
            *(x.float().cpu() for x in (q, spoiled, v)), is_causal=True
        )
        assert torch.equal(out.isnan().cpu(), want.isnan())
        grads = attention.attention_backward(g, q, spoiled, v, out, lse, True, plan=plan())
        assert all(grad.isnan().any() for grad in grads)
        count += 1
    empty = tensors(0, 2, 1, 8, 8, 16, 16, torch.bfloat16)
    no_queries = tensors(2, 2, 1, 0, 8, 16, 16, torch.bfloat16)
    no_keys = tensors(2, 2, 1, 8, 0, 16, 16, torch.bfloat16)
    for q, k, v, g in (empty, no_queries, no_keys):
        out, lse = attention.attention(q, k, v)
        assert out.shape == g.shape
        assert not out.any()
        grads = attention.attention_backward(g, q, k, v, out, lse)
        assert all(a.shape == b.shape and not a.any() for a, b in zip(grads, (q, k, v)))
        count += 1
    return count


def cuts() -> int:
    """Every head dimension fits its cut, with less padding than the next power of two where that is possible."""
    for dim in range(plans.MIN_HEAD_DIM, plans.MAX_HEAD_DIM + 1, 8):
        first, second = plans.cut(dim)
        assert dim <= first + second <= 2 * dim
        assert first.bit_count() == 1
        assert second == 0 or (second.bit_count() == 1 and 16 <= second < first < dim)
    assert [sum(plans.cut(dim)) for dim in (96, 128, 192, 256)] == [96, 128, 192, 256]
    return 1


if __name__ == "__main__":
    if DEVICE == "cpu":
        from octavo.check.interpreter import install

        install()
    group = sys.argv[1]
    print(group, globals()[group]())
