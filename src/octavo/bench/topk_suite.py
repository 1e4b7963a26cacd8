"""``torch.topk``: the published cases, routers of mixture-of-experts models, and vocabulary sampling."""

from __future__ import annotations

import functools
from typing import Any

import torch

from octavo import operators
from octavo.bench import published
from octavo.bench.cases import Case, dtype_of
from octavo.bench.timing import Contender, Inputs
from octavo.operators.topk import reference

Shape = tuple[str, int, int, int]
"""(dtype, rows, columns, k)."""

ROUTERS: tuple[tuple[int, int], ...] = ((64, 6), (64, 8), (128, 4), (128, 8), (160, 6), (256, 8), (384, 8))
"""(experts, active): DeepSeek-MoE, OLMoE, gpt-oss, Qwen3, DeepSeek-V2, DeepSeek-V3, Kimi K2."""

SAMPLING: tuple[tuple[int, int, int], ...] = (
    (1, 128256, 50),
    (32, 128256, 50),
    (256, 128256, 50),
    (64, 151936, 20),
    (8, 262144, 64),
    (64, 200064, 1000),
)
"""(sequences, vocabulary, k): Llama 3, Qwen 3, Gemma 3, gpt-oss vocabularies."""


def shapes() -> dict[str, list[Shape]]:
    """Shapes by group."""
    return {
        "published_small_k": [("fp32", *s) for s in published.TOPK_SMALL_K],
        "published_radix": [("fp32", *s) for s in published.TOPK_RADIX],
        "routers": [
            (dtype, m, n, k) for dtype in ("fp32", "bf16") for m in (8192, 32768) for n, k in ROUTERS
        ],
        "sampling": [(dtype, *s) for dtype in ("fp32", "bf16") for s in SAMPLING],
        "16-bit": [
            (dtype, *s)
            for dtype in ("bf16", "fp16")
            for s in ((8192, 1024, 8), (4096, 4096, 8), (4096, 8192, 64), (2048, 32768, 256))
        ],
        "odd": [
            ("fp32", m, n, k)
            for m, n, k in ((16384, 60, 8), (16384, 257, 8), (4096, 5000, 32), (65536, 257, 1))
        ],
    }


def check(inputs: Inputs, result: Any, k: int) -> None:
    """Values equal PyTorch's bit for bit; indices are distinct and gather back to the values."""
    (x,) = inputs
    values, indices = result
    expected = torch.topk(x, k).values
    assert torch.equal(values, expected), "values differ from torch.topk's"
    assert torch.equal(x.gather(-1, indices), values), "the indices do not lead to the values"
    assert bool((indices.sort(-1).values.diff(dim=-1) != 0).all()), "an index is repeated"


def _case(group: str, dtype: str, m: int, n: int, k: int, force: bool) -> Case:
    def make() -> Inputs:
        return (torch.randn(m, n, device="cuda").to(dtype_of(dtype)),)

    call = functools.partial(torch.topk, k=k)
    item = dtype_of(dtype).itemsize
    on = functools.partial(operators.enabled, "topk", force=force)
    return Case(
        group=group,
        case=f"{dtype} {m}x{n} k={k}",
        bytes=m * n * item + m * k * (item + 8),
        flops=0,
        make=make,
        contenders={"octavo": Contender(call, on), "aten": Contender(call)},
        check=functools.partial(check, k=k),
        taken=lambda inputs: force or operators.why_not("topk", "aten::topk", *inputs, k) is None,
        compiled=call,
    )


def cases(force: bool = False) -> list[Case]:
    """All cases, group by group."""
    return [_case(group, *shape, force) for group, group_shapes in shapes().items() for shape in group_shapes]


def reference_check(inputs: Inputs, result: Any, k: int) -> None:
    """The exact rule: ties by the lowest index too."""
    values, indices = reference.topk(inputs[0], k)
    assert torch.equal(result[0], values), "values differ from the reference's"
    assert torch.equal(result[1], indices), "indices differ from the reference's"
