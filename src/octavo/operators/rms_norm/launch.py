"""RMSNorm by the Triton kernels: allocation and launches. Imported when the first call is served."""

from __future__ import annotations

import torch

from octavo.operators._launch import launch
from octavo.operators.rms_norm import kernels
from octavo.operators.rms_norm import plan as plans


def forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    y: torch.Tensor,
    rstd: torch.Tensor,
    plan: plans.Plan,
) -> None:
    """x [m, n] of unit column stride, weight [n] contiguous -> y [m, n] contiguous, rstd float32 [m]."""
    m, n = x.shape
    has_weight = weight is not None
    w = x if weight is None else weight
    if isinstance(plan, plans.RowsPlan):
        groups = -(-m // plan.rows)
        grid = (min(groups, plan.programs) if plan.programs else groups,)
        constants = {
            "R": plan.rows,
            "C": plan.c,
            "CHUNKS": plan.chunks,
            "EVEN": plan.c * plan.chunks == n,
            "HAS_WEIGHT": has_weight,
            "HOLD_WEIGHT": plan.hold_weight,
            "STAGES": plan.stages,
        }
        arguments = (x, w, y, rstd, m, n, x.stride(0), eps)
        launch(kernels.forward_rows, grid, arguments, constants, plan.num_warps, x.device)
    elif isinstance(plan, plans.LongPlan):
        constants = {"C": plan.c, "EVEN": n % plan.c == 0, "HAS_WEIGHT": has_weight}
        arguments = (x, w, y, rstd, n, x.stride(0), eps)
        launch(kernels.forward_long, (m,), arguments, constants, plan.num_warps, x.device)
    else:
        partial = torch.empty((m, plan.splits), dtype=torch.float32, device=x.device)
        grid = (m, plan.splits)
        constants = {"SPLITS": plan.splits, "C": plan.c}
        arguments = (x, partial, n, plan.span, x.stride(0))
        launch(kernels.forward_partial, grid, arguments, constants, plan.num_warps, x.device)
        arguments = (x, w, y, rstd, partial, n, plan.span, x.stride(0), eps)
        constants = {**constants, "HAS_WEIGHT": has_weight}
        launch(kernels.forward_apply, grid, arguments, constants, plan.num_warps, x.device)


def backward(
    g: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    dx: torch.Tensor | None,
    dw: torch.Tensor | None,
    plan: plans.Plan,
) -> None:
    """g, x [m, n] of unit column stride, rstd float32 [m] -> dx [m, n] contiguous, dw [n]; either may be None."""
    m, n = x.shape
    w = x if weight is None else weight
    flags = {"HAS_WEIGHT": weight is not None, "NEED_DX": dx is not None, "NEED_DW": dw is not None}
    strides = (g.stride(0), x.stride(0))
    assert isinstance(plan, plans.RowsPlan | plans.SplitPlan)
    rows = -(-m // plan.rows)
    programs = min(rows, plan.programs or rows)
    partial = x.new_empty((programs, n), dtype=torch.float32) if dw is not None else x
    dx_or_x = x if dx is None else dx
    if isinstance(plan, plans.RowsPlan):
        constants = {
            "R": plan.rows,
            "C": plan.c,
            "CHUNKS": plan.chunks,
            "EVEN": plan.c * plan.chunks == n,
            **flags,
            "STAGES": plan.stages,
        }
        arguments = (g, x, w, rstd, dx_or_x, partial, m, n, *strides)
        launch(kernels.backward_rows, (programs,), arguments, constants, plan.num_warps, x.device)
    else:
        dot = x.new_empty((m, plan.splits), dtype=torch.float32)
        if dx is not None:
            constants = {"SPLITS": plan.splits, "C": plan.c, "HAS_WEIGHT": weight is not None}
            arguments = (g, x, w, dot, n, plan.span, *strides)
            grid = (m, plan.splits)
            launch(kernels.backward_partial, grid, arguments, constants, plan.num_warps, x.device)
        constants = {"SPLITS": plan.splits, "R": plan.rows, "C": plan.c, **flags}
        arguments = (g, x, w, rstd, dot, dx_or_x, partial, m, n, *strides)
        grid = (-(-n // plan.c), programs)
        launch(kernels.backward_apply, grid, arguments, constants, plan.num_warps, x.device)
    if dw is not None:
        c = 32 if n >= 4096 else 16
        constants = {"P": 64, "C": c}
        arguments = (partial, dw, programs, n)
        launch(kernels.sum_partials, (-(-n // c),), arguments, constants, 4, x.device)
