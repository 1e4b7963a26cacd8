"""TopK by the Triton kernels: allocation and launches. Imported when the first call is served."""

from __future__ import annotations

import torch

from octavo.launch import Prepared, Step
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
    prepare(x, k, largest, sorted, plan)(x, values, indices)


def prepare(x: torch.Tensor, k: int, largest: bool, sorted: bool, plan: plans.Plan) -> Prepared:
    """What to call with (x, values, indices) like ``x`` and as ``topk_rows`` takes them."""
    pack32 = x.dtype != torch.float32 and x.shape[1] < plans.PACK32_COLUMNS
    if isinstance(plan, plans.ListPlan):
        return _list(x, k, largest, plan, pack32)
    if isinstance(plan, plans.ThresholdPlan):
        return _threshold(x, k, largest, plan, pack32)
    return _select(x, k, largest, sorted, plan, pack32)


def _list(x: torch.Tensor, k: int, largest: bool, p: plans.ListPlan, pack32: bool) -> Prepared:
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
    scalars = (m, n, k, x.stride(0), x.stride(1))
    return Step(list_topk_kernel, (-(-m // p.rows),), scalars, constants, p.num_warps, x.device)


def _threshold(x: torch.Tensor, k: int, largest: bool, p: plans.ThresholdPlan, pack32: bool) -> Prepared:
    m, n = x.shape
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
    scalars = (n, k, x.stride(0), x.stride(1))
    step = Step(threshold_topk_kernel, (m,), scalars, constants, p.num_warps, x.device)

    def run(x: torch.Tensor, values: torch.Tensor, indices: torch.Tensor) -> None:
        step(x, values, indices, indices.new_empty((m, p.cap)))

    return run


def _select(
    x: torch.Tensor, k: int, largest: bool, sorted: bool, p: plans.SelectPlan, pack32: bool
) -> Prepared:
    m, n = x.shape
    source = (x.stride(0), x.stride(1))

    def step(
        columns: int, splits: int, span: int, unroll: int, strides: tuple[int, int], packed: bool
    ) -> Step:
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
        scalars = (columns, k, span, *strides, *source)
        return Step(select_topk_kernel, (m * splits,), scalars, constants, p.num_warps, x.device)

    first = step(n, p.splits, p.span, p.unroll, source, packed=False)
    columns = p.splits * p.kp
    unroll = max(1, min(p.unroll, plans.next_power_of_2(-(-columns // p.groups))))
    second = step(columns, 1, columns, unroll, (columns, 1), packed=True)

    def run(x: torch.Tensor, values: torch.Tensor, indices: torch.Tensor) -> None:
        scratch = indices.new_empty((m * p.splits, p.cap))
        if p.splits == 1:
            first(x, x, values, indices, scratch, scratch)
            return
        partial = indices.new_empty((m, columns))
        first(x, x, values, indices, scratch, partial)
        second(partial, x, values, indices, scratch, partial)

    return run
