"""Attention by the Triton kernels: allocation and launches. Imported when the first call is served."""

from __future__ import annotations

from typing import Any

import torch

from octavo.launch import launch
from octavo.operators.attention import backward_kernels, kernels
from octavo.operators.attention.plan import Plan, Tile, cut


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Device memory in which a kernel writes its tensor descriptors."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def _run(kernel: Any, grid: tuple[int, int], tile: Tile, *arguments: Any, **constants: Any) -> None:
    if constants["DESC"] and arguments[0].is_cuda:
        import triton

        triton.set_allocator(_scratch)  # of this thread: Triton keeps it in a context variable
    launch(kernel, grid, arguments, {**constants, "STAGES": tile.stages}, tile.warps)


def _strides(x: torch.Tensor) -> tuple[int, int, int]:
    return x.stride(0), x.stride(1), x.stride(2)


def _cuts(dim: int, value_dim: int) -> dict[str, Any]:
    (d0, d1), (v0, v1) = cut(dim), cut(value_dim)
    return {"D0": d0, "D1": d1, "V0": v0, "V1": v1, "EVEN_D": d0 + d1 == dim, "EVEN_V": v0 + v1 == value_dim}


def _can_describe(*matrices: torch.Tensor) -> bool:
    """Whether the copy engine can read the heads of each: their addresses and rows are multiples of 16 bytes."""
    steps = (x.stride(i) * x.element_size() for x in matrices for i in range(3) if x.shape[i] > 1)
    return all(step % 16 == 0 for step in steps) and all(x.data_ptr() % 16 == 0 for x in matrices)


def _blocks(count: int, size: int) -> int:
    return -(-count // size)


def like_query(query: torch.Tensor, value_dim: int) -> torch.Tensor:
    """An unset output [B, H, Lq, Dv] whose dimensions lie in memory in the query's order, as PyTorch promises."""
    if query.shape[3] == value_dim:
        return torch.empty_like(query)
    order = sorted(range(4), key=query.stride, reverse=True)
    shape = (*query.shape[:3], value_dim)
    out = query.new_empty([shape[i] for i in order])
    return out.permute([order.index(i) for i in range(4)])


def forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float, plan: Plan
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output [B, H, Lq, Dv] laid out as the query; log-sum-exp float32 [B, H, Lq]). Lk is at least 1."""
    batch, heads, queries, dim = query.shape
    keys, value_dim = value.shape[2:]
    out = like_query(query, value_dim)
    lse = query.new_empty(batch, heads, queries, dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    tile = plan.forward
    desc = plan.descriptors and _can_describe(key, value)
    _run(
        kernels.attention_forward, (_blocks(queries, tile.bm), batch * heads), tile,
        query, key, value, out, lse, *_strides(query), *_strides(key), *_strides(value), *_strides(out),
        heads, heads // key.shape[1], queries, keys, dim, value_dim, scale,
        **_cuts(dim, value_dim), BM=tile.bm, BN=tile.bn, CAUSAL=causal, DESC=desc,
    )  # fmt: skip
    return out, lse


def backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
    plan: Plan,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value, each laid out as its tensor; ``lse`` float32 [B, H, Lq], contiguous.

    Neither Lq nor Lk is 0.
    """
    batch, heads, queries, dim = query.shape
    (kv_heads, keys), value_dim = key.shape[1:3], value.shape[3]
    dq, dk, dv = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    inner = torch.empty_like(lse)
    width = 1 << (value_dim - 1).bit_length()
    rows = 64 if width <= 128 else 32
    launch(
        kernels.attention_inner_products, (_blocks(queries, rows), batch * heads),
        (out, grad, inner, *_strides(out), *_strides(grad), heads, queries, value_dim),
        {"C": width, "BM": rows}, 4,
    )  # fmt: skip
    group = heads // kv_heads
    strides = (*_strides(query), *_strides(key), *_strides(value), *_strides(grad))
    sizes = (heads, group, queries, keys, dim, value_dim, scale)
    cuts = _cuts(dim, value_dim)
    tile = plan.keys
    desc = plan.descriptors and _can_describe(query, key, value, grad)
    sums = torch.zeros_like(dq, dtype=torch.float32) if plan.fused else dq
    outputs = (*_strides(dk), *_strides(dv), *_strides(dq))
    _run(
        backward_kernels.attention_backward_keys, (_blocks(keys, tile.bn), batch * kv_heads), tile,
        query, key, value, grad, lse, inner, dk, dv, sums, *strides, *outputs, *sizes,
        **cuts, BM=tile.bm, BN=tile.bn, EVEN_Q=queries % tile.bm == 0, CAUSAL=causal, FUSED=plan.fused, DESC=desc,
    )  # fmt: skip
    if plan.fused:
        size = 2048
        launch(
            backward_kernels.attention_scale_sums,
            (_blocks(dq.numel(), size),),
            (sums, dq, dq.numel(), scale),
            {"C": size},
            4,
        )
        return dq, dk, dv
    tile = plan.queries
    _run(
        backward_kernels.attention_backward_queries, (_blocks(queries, tile.bm), batch * heads), tile,
        query, key, value, grad, lse, inner, dq, *strides, *_strides(dq), *sizes,
        **cuts, BM=tile.bm, BN=tile.bn, EVEN_K=keys % tile.bn == 0, CAUSAL=causal, DESC=desc,
    )  # fmt: skip
    return dq, dk, dv
