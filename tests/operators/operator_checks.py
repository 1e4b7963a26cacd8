"""Checks of the operator kernels on any device: a GPU, or the CPU with Triton's interpreter.

TRITON_INTERPRET=1 python tests/operators/operator_checks.py topk_small     (runs one group, prints its size)
"""

from __future__ import annotations

import itertools
import os
import sys

import torch

from octavo.operators import rms_norm, topk
from octavo.operators.rms_norm import plan as norm_plans
from octavo.operators.rms_norm import reference as norm_reference
from octavo.operators.topk import plan as topk_plans
from octavo.operators.topk import reference as topk_reference

DEVICE = "cuda" if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1" else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, NaN equal to NaN."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(nan=0.0), b.nan_to_num(nan=0.0))


def nasty_rows(n: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """[10, n]: random; zeros; NaN of both signs; infinities; many ties; -0 beside +0; all NaN; periodic; sorted."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(10, n, generator=generator)
    x[1] = 0
    x[2, ::3] = float("nan")
    x[3, ::2] = float("inf")
    x[3, 1::4] = -float("inf")
    x[4] = torch.arange(n) % 7 - 3
    x[5] = -0.0
    x[5, n // 2] = 0.0
    x[6] = float("nan")
    x[7] = torch.randn(16, generator=generator).repeat(n // 16 + 1)[:n]
    x[8] = torch.arange(n)
    x[9] = -torch.arange(n)
    x = x.to(dtype)
    negative_nan = x.view(torch.int32 if dtype == torch.float32 else torch.int16)
    negative_nan[2, ::6] = -4194304 if dtype == torch.float32 else -64
    negative_nan[6, ::2] = -4194304 if dtype == torch.float32 else -64
    return x.to(DEVICE)


def check_topk(
    x: torch.Tensor, k: int, largest: bool, plan: topk_plans.Plan | None, sorted: bool = True
) -> None:
    """Exactly the reference's values and indices, or the same set if unsorted."""
    what = f"{tuple(x.shape)} {x.dtype} k={k} largest={largest} {plan}"
    values, indices = topk.topk(x, k, -1, largest, sorted, plan=plan)
    expected_values, expected = topk_reference.topk(x, k, -1, largest)
    if not sorted:
        expected, _ = expected.sort(-1)
        assert same(values, x.gather(-1, indices)), what
        indices, _ = indices.sort(-1)
        expected_values = x.gather(-1, expected)
        values = x.gather(-1, indices)
    assert torch.equal(indices, expected), f"{what}: indices {indices} instead of {expected}"
    assert same(values, expected_values), f"{what}: values"


def topk_small() -> int:
    """List and threshold kernels, k to 32, awkward row lengths."""
    count = 0
    for dtype, n, largest in itertools.product(DTYPES, (60, 257), (True, False)):
        x = nasty_rows(n, dtype)
        for k in (1, 8, 32) if dtype == torch.float32 else (5,):
            plans = [topk_plans.list_plan(n, k, lanes) for lanes in (2, 8)]
            plans.append(topk_plans.threshold_plan(n, k, x.element_size(), 1))
            for plan in plans:
                check_topk(x, k, largest, plan)
                count += 1
    for n, k in ((160, 8), (1, 1), (33, 33 // 2), (384, 6)):
        check_topk(nasty_rows(n, torch.float32), k, True, None)
        count += 1
    return count


def topk_large() -> int:
    """The streaming kernel: large k, splits, unsorted, ties beyond the candidate buffer."""
    count = 0
    for dtype, largest in itertools.product((torch.float32, torch.bfloat16), (True, False)):
        for n, k, splits in ((333, 40, 1), (333, 40, 2), (304, 130, 1), (64, 64, 1)):
            x = nasty_rows(n, dtype)
            base = topk_plans.select_plan(10, n, k, 4, 2, splits=splits)
            # Small group and candidate counts, so that a row of this size takes every branch.
            kp = topk_plans.next_power_of_2(k)
            small = topk_plans.SelectPlan(base.splits, base.span, 2 * kp, 2, 2 * kp, kp, 4)
            for plan in (base, small):
                check_topk(x, k, largest, plan)
                count += 1
    check_topk(
        nasty_rows(500, torch.float32), 40, True, topk_plans.select_plan(10, 500, 40, 4, 2), sorted=False
    )
    for splits in (1, 2):
        check_topk(
            nasty_rows(300, torch.float32), 1, True, topk_plans.select_plan(10, 300, 1, 4, 1, splits=splits)
        )
    return count + 3


def topk_layouts() -> int:
    """Strided last dimension, N-D, another dimension, expanded rows, one dimension."""
    base = nasty_rows(120, torch.float32)[[0, 2, 4, 5]]
    cases = [base[:, ::2], base.view(2, 2, 120), base[:1].expand(2, 120), base[0], base.t().contiguous().t()]
    for x in cases:
        check_topk(x, 5, True, None)
    check_topk(cases[0][:2], 40, False, None)
    for dim in (0, 1, -2):
        x = base.view(2, 2, 120)[..., :4]
        got = topk.topk(x, 2, dim)
        expected = topk_reference.topk(x, 2, dim)
        assert got[0].is_contiguous()
        assert same(got[0], expected[0])
        assert torch.equal(got[1], expected[1])
    return len(cases) + 4


def _close(name: str, got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    rtol = {torch.float32: 2e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    error = (got.double() - expected.double()).abs()
    allowed = 4 * rtol + rtol * expected.double().abs()
    assert bool((error <= allowed).all()), (
        f"{name}: off by {error.max().item():.3g}, allowed about {4 * rtol:.3g}"
    )


def check_norm(
    x: torch.Tensor, shape: tuple[int, ...], w: torch.Tensor | None, forward=None, backward=None, grad=None
) -> None:
    """Forward and backward against the float32 reference."""
    y, rstd = rms_norm.fused_rms_norm(x, shape, w, 1e-5, plan=forward)
    expected_y, expected_rstd = norm_reference.fused_rms_norm(x, shape, w, 1e-5)
    what = f"{tuple(x.shape)} over {shape} {x.dtype} w={None if w is None else w.dtype} {forward} {backward}"
    assert y.dtype == x.dtype
    assert y.shape == x.shape
    assert rstd.shape == expected_rstd.shape, f"{what}: rstd is {tuple(rstd.shape)}"
    _close(f"{what} rstd", rstd, expected_rstd, torch.float32)
    _close(f"{what} y", y, expected_y, x.dtype)
    g = (
        torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x.device, x.dtype)
        if grad is None
        else grad
    )
    for mask in ([True, True], [True, False], [False, True]):
        dx, dw = rms_norm.fused_rms_norm_backward(g, x, shape, rstd, w, mask, plan=backward)
        expected_dx, expected_dw = norm_reference.fused_rms_norm_backward(g, x, shape, rstd, w, mask)
        assert (dx is None) == (expected_dx is None)
        assert (dw is None) == (expected_dw is None)
        if dx is not None:
            _close(f"{what} dx", dx, expected_dx, x.dtype)
        if dw is not None:
            assert dw.dtype == w.dtype
            scale = expected_dw.float().abs().max().clamp(min=1.0)
            _close(f"{what} dw", dw / scale, expected_dw / scale, w.dtype)


def _x(m: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(m, n, generator=torch.Generator().manual_seed(m + n)).to(DEVICE, dtype)


def norm_rows() -> int:
    """Rows kernels with every combination of row groups, chunks, loops and held weights."""
    count = 0
    for dtype, n in itertools.product(DTYPES, (64, 100, 257)):
        x, w = _x(7, n, dtype), _x(1, n, torch.float32)[0] + 1
        rows = norm_plans.RowsPlan
        pairs = [
            (rows(1, 128, -(-n // 128), 4), rows(1, 128, -(-n // 128), 4, programs=2)),
            (rows(4, 512, 1, 4, programs=1, hold_weight=True), rows(4, 512, 1, 4, programs=1)),
            (None, None),
        ]
        for forward, backward in pairs:
            check_norm(x, (n,), w.to(dtype), forward, backward)
            count += 1
        check_norm(x, (n,), None)
        check_norm(x, (n,), w)
        count += 2
    return count


def norm_long() -> int:
    """Long and split kernels at small sizes."""
    count = 0
    for dtype, n in itertools.product((torch.float32, torch.bfloat16), (512, 700)):
        x, w = _x(5, n, dtype), _x(1, n, dtype)[0]
        split = norm_plans.SplitPlan(4, 256, 128, 4, rows=2, programs=2)
        for forward in (norm_plans.LongPlan(128, 4), split):
            check_norm(x, (n,), w, forward, split)
            check_norm(x, (n,), None, forward, split)
            count += 2
    return count


def norm_inputs() -> int:
    """B44 and B45: expanded, strided and transposed gradients and inputs; several normalized dimensions; extremes."""
    x = _x(12, 64, torch.float32).view(3, 4, 64)
    w = _x(1, 64, torch.float32)[0]
    ones = torch.ones((), device=DEVICE).expand(3, 4, 64)
    strided = _x(12, 128, torch.float32).view(3, 4, 128)[..., ::2]
    transposed = _x(3 * 64, 4, torch.float32).view(3, 64, 4).transpose(1, 2)
    for grad in (ones, strided, transposed):
        check_norm(x, (64,), w, grad=grad)
    check_norm(strided, (64,), w)
    check_norm(_x(12, 128, torch.float32)[:, :64], (64,), w)
    check_norm(x, (4, 64), _x(4, 64, torch.float32))
    zero = torch.zeros(2, 64, device=DEVICE, dtype=torch.float16)
    y, rstd = rms_norm.fused_rms_norm(zero, (64,), None, None)
    assert torch.equal(y, zero)
    assert torch.isfinite(rstd).all()
    large = torch.full((2, 64), 300.0, device=DEVICE, dtype=torch.float16)
    y, _ = rms_norm.fused_rms_norm(large, (64,), None, None)
    assert torch.equal(y, torch.ones_like(y))
    return 8


GROUPS = {f.__name__: f for f in (topk_small, topk_large, topk_layouts, norm_rows, norm_long, norm_inputs)}

if __name__ == "__main__":
    for group in sys.argv[1:]:
        print(group, GROUPS[group](), flush=True)
