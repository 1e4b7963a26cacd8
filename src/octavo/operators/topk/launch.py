"""TopK by the Triton kernels: allocation and launches. Imported when the first call is served."""

from __future__ import annotations

import torch

from octavo.operators._launch import launch
from octavo.operators.topk import plan as plans
from octavo.operators.topk.list_kernels import list_topk_kernel
from octavo.operators.topk.select_kernels import select_topk_kernel
from octavo.operators.topk.threshold_kernels import threshold_topk_kernel


def topk_rows(
    x: torch.Tensor,
    k: int,
    largest: bool,
    sorted: bool,
    plan: plans.Plan,
    values: torch.Tensor,
    indices: torch.Tensor,
) -> None:
    """Top ``k`` of every row of ``x`` [m, n] (any strides) into contiguous ``values`` and int64 ``indices`` [m, k]."""
    pack32 = x.dtype != torch.float32 and x.shape[1] < plans.PACK32_COLUMNS
    if isinstance(plan, plans.ListPlan):
        _list(x, k, largest, plan, values, indices, pack32)
    elif isinstance(plan, plans.ThresholdPlan):
        _threshold(x, k, largest, plan, values, indices, pack32)
    else:
        _select(x, k, largest, sorted, plan, values, indices, pack32)


def _list(
    x: torch.Tensor,
    k: int,
    largest: bool,
    p: plans.ListPlan,
    values: torch.Tensor,
    indices: torch.Tensor,
    pack32: bool,
) -> None:
    m, n = x.shape
    constants = {
        "ROWS": p.rows,
        "LANES": p.lanes,
        "VEC": p.vec,
        "KP": p.kp,
        "BLOCKS": p.blocks,
        "LARGEST": largest,
        "PACK32": pack32,
    }
    arguments = (x, values, indices, m, n, k, x.stride(0), x.stride(1))
    launch(list_topk_kernel, (-(-m // p.rows),), arguments, constants, p.num_warps, x.device)


def _threshold(
    x: torch.Tensor,
    k: int,
    largest: bool,
    p: plans.ThresholdPlan,
    values: torch.Tensor,
    indices: torch.Tensor,
    pack32: bool,
) -> None:
    m, n = x.shape
    scratch = torch.empty((m, p.cap), dtype=torch.int64, device=x.device)
    constants = {
        "CHUNK": p.chunk,
        "CHUNKS": p.chunks,
        "GROUPS": p.groups,
        "CAP": p.cap,
        "KP": p.kp,
        "LARGEST": largest,
        "PACK32": pack32,
        "EVEN": p.chunk * p.chunks == n,
    }
    arguments = (x, values, indices, scratch, n, k, x.stride(0), x.stride(1))
    launch(threshold_topk_kernel, (m,), arguments, constants, p.num_warps, x.device)


def _select(
    x: torch.Tensor,
    k: int,
    largest: bool,
    sorted: bool,
    p: plans.SelectPlan,
    values: torch.Tensor,
    indices: torch.Tensor,
    pack32: bool,
) -> None:
    m, n = x.shape
    scratch = torch.empty((m * p.splits, p.cap), dtype=torch.int64, device=x.device)
    partial = scratch
    if p.splits > 1:
        partial = torch.empty((m, p.splits * p.kp), dtype=torch.int64, device=x.device)
    source = (x.stride(0), x.stride(1))

    def run(keys: torch.Tensor, columns: int, splits: int, span: int, unroll: int, packed: bool) -> None:
        constants = {
            "SPLITS": splits,
            "GROUPS": p.groups,
            "UNROLL": unroll,
            "CAP": p.cap,
            "KP": p.kp,
            "LARGEST": largest,
            "PACK32": pack32,
            "PACKED": packed,
            "SORTED": sorted,
            "ALIGNED": columns % 16 == 0 and span % 16 == 0,
        }
        strides = (keys.stride(0), keys.stride(1), *source)
        arguments = (keys, x, values, indices, scratch, partial, columns, k, span, *strides)
        launch(select_topk_kernel, (m * splits,), arguments, constants, p.num_warps, x.device)

    run(x, n, p.splits, p.span, p.unroll, packed=False)
    if p.splits > 1:
        columns = p.splits * p.kp
        unroll = max(1, min(p.unroll, plans.next_power_of_2(-(-columns // p.groups))))
        run(partial, columns, 1, columns, unroll, packed=True)
