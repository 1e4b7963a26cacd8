"""RMSNorm by the Triton kernels: allocation and launches. Imported when the first call is served."""

from __future__ import annotations

import torch

from octavo.launch import Prepared, Step
from octavo.operators.rms_norm import kernels
from octavo.operators.rms_norm import plan as plans


def prepare_forward(x: torch.Tensor, has_weight: bool, eps: float, plan: plans.Plan) -> Prepared:
    """What to call with (x, weight, y, rstd) like ``x`` and as ``forward`` takes them; without weight, x again."""
    m, n = x.shape
    device = x.device
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
        scalars = (m, n, x.stride(0), eps)
        return Step(kernels.forward_rows, grid, scalars, constants, plan.num_warps, device)
    if isinstance(plan, plans.LongPlan):
        constants = {"C": plan.c, "EVEN": n % plan.c == 0, "HAS_WEIGHT": has_weight}
        return Step(kernels.forward_long, (m,), (n, x.stride(0), eps), constants, plan.num_warps, device)
    grid, splits = (m, plan.splits), plan.splits
    constants = {"SPLITS": splits, "C": plan.c}
    scalars = (n, plan.span, x.stride(0))
    first = Step(kernels.forward_partial, grid, scalars, constants, plan.num_warps, device)
    constants = {**constants, "HAS_WEIGHT": has_weight}
    second = Step(kernels.forward_apply, grid, (*scalars, eps), constants, plan.num_warps, device)

    def split(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, rstd: torch.Tensor) -> None:
        partial = torch.empty((m, splits), dtype=torch.float32, device=device)
        first(x, partial)
        second(x, w, y, rstd, partial)

    return split


def forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    y: torch.Tensor,
    rstd: torch.Tensor,
    plan: plans.Plan,
) -> None:
    """x [m, n] of unit column stride, weight [n] contiguous -> y [m, n] contiguous, rstd float32 [m]."""
    prepare_forward(x, weight is not None, eps, plan)(x, x if weight is None else weight, y, rstd)


def prepare_backward(
    g: torch.Tensor, x: torch.Tensor, has_weight: bool, need_dx: bool, need_dw: bool, plan: plans.Plan
) -> Prepared:
    """What to call with (g, x, weight, rstd, dx, dw) like these and as ``backward`` takes them.

    Without weight its place takes x again; an unwanted gradient is None.
    """
    assert isinstance(plan, plans.RowsPlan | plans.SplitPlan)
    m, n = x.shape
    rows = -(-m // plan.rows)
    programs = min(rows, plan.programs or rows)
    flags = {"HAS_WEIGHT": has_weight, "NEED_DX": need_dx, "NEED_DW": need_dw}
    if isinstance(plan, plans.RowsPlan):
        gradients = _backward_rows(g, x, flags, plan, programs)
    else:
        gradients = _backward_split(g, x, flags, plan, programs)
    c = 32 if n >= 4096 else 16
    add = Step(kernels.sum_partials, (-(-n // c),), (programs, n), {"P": 64, "C": c}, 4, x.device)

    def run(
        g: torch.Tensor,
        x: torch.Tensor,
        w: torch.Tensor,
        rstd: torch.Tensor,
        dx: torch.Tensor | None,
        dw: torch.Tensor | None,
    ) -> None:
        partial = x if dw is None else x.new_empty((programs, n), dtype=torch.float32)
        gradients(g, x, w, rstd, dx, partial)
        if dw is not None:
            add(partial, dw)

    return run


def _backward_rows(
    g: torch.Tensor, x: torch.Tensor, flags: dict[str, bool], plan: plans.RowsPlan, programs: int
) -> Prepared:
    m, n = x.shape
    constants = {
        "R": plan.rows,
        "C": plan.c,
        "CHUNKS": plan.chunks,
        "EVEN": plan.c * plan.chunks == n,
        **flags,
        "STAGES": plan.stages,
    }
    scalars = (m, n, g.stride(0), x.stride(0))
    step = Step(kernels.backward_rows, (programs,), scalars, constants, plan.num_warps, x.device)

    def run(
        g: torch.Tensor,
        x: torch.Tensor,
        w: torch.Tensor,
        rstd: torch.Tensor,
        dx: torch.Tensor | None,
        partial: torch.Tensor,
    ) -> None:
        step(g, x, w, rstd, x if dx is None else dx, partial)

    return run


def _backward_split(
    g: torch.Tensor, x: torch.Tensor, flags: dict[str, bool], plan: plans.SplitPlan, programs: int
) -> Prepared:
    m, n = x.shape
    strides = (g.stride(0), x.stride(0))
    constants = {"SPLITS": plan.splits, "C": plan.c, "HAS_WEIGHT": flags["HAS_WEIGHT"]}
    grid, scalars = (m, plan.splits), (n, plan.span, *strides)
    dots = Step(kernels.backward_partial, grid, scalars, constants, plan.num_warps, x.device)
    constants = {
        "SPLITS": plan.splits,
        "R": plan.rows,
        "C": plan.c,
        **flags,
    }
    grid = (-(-n // plan.c), programs)
    apply = Step(kernels.backward_apply, grid, (m, n, *strides), constants, plan.num_warps, x.device)

    def run(
        g: torch.Tensor,
        x: torch.Tensor,
        w: torch.Tensor,
        rstd: torch.Tensor,
        dx: torch.Tensor | None,
        partial: torch.Tensor,
    ) -> None:
        dot = x.new_empty((m, plan.splits), dtype=torch.float32)
        if dx is not None:
            dots(g, x, w, dot)
        apply(g, x, w, rstd, dot, x if dx is None else dx, partial)

    return run


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
    run = prepare_backward(g, x, weight is not None, dx is not None, dw is not None, plan)
    run(g, x, x if weight is None else weight, rstd, dx, dw)
