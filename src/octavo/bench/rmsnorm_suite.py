"""``F.rms_norm`` forward and backward: the published cases and hidden sizes of real models."""

from __future__ import annotations

import functools
from typing import Any

import torch

from octavo import operators
from octavo.bench import peers, published
from octavo.bench.cases import Case, dtype_of
from octavo.bench.timing import Contender, Inputs
from octavo.operators.rms_norm import reference

Shape = tuple[str, int, int]
"""(dtype, rows, columns)."""

EPS = 1e-6

MODELS: tuple[tuple[int, int], ...] = (
    (8192, 2048),
    (8192, 2880),
    (8192, 4096),
    (8192, 5120),
    (8192, 7168),
    (8192, 8192),
    (4096, 16384),
    (32768, 4096),
    (4096, 2048),
    (4096, 4096),
    (2048, 8192),
    (1024, 4096),
    (262144, 128),
    (16, 4096),
    (4, 262144),
)
"""(tokens, hidden): 2048 to 16384, a query-key norm over heads of 128, a decode step, few long rows."""


def shapes() -> dict[str, list[Shape]]:
    """Shapes by group."""
    return {"published": list(published.RMS_NORM), "models": [("bf16", *s) for s in MODELS]}


def _relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def _tolerance(dtype: torch.dtype) -> float:
    return 2e-6 if dtype == torch.float32 else 4e-3


def check_forward(inputs: Inputs, result: Any) -> None:
    """Against the float32 reference: relative error within the rounding of the dtype."""
    x, w = inputs
    y, rstd = reference.fused_rms_norm(x, w.shape, w, EPS)
    for name, got, expected in (("y", result[0], y), ("rstd", result[1], rstd)):
        error = _relative(got, expected)
        assert error < _tolerance(got.dtype), f"{name} differs by {error:.2e}"


def check_backward(inputs: Inputs, result: Any) -> None:
    """As ``check_forward``, for dx and dw."""
    g, x, rstd, w = inputs
    dx, dw = reference.fused_rms_norm_backward(g, x, w.shape, rstd, w, [True, True])
    for name, got, expected in (("dx", result[0], dx), ("dw", result[1], dw)):
        assert expected is not None
        error = _relative(got, expected)
        # dw sums thousands of rows in another order than the reference.
        assert error < max(_tolerance(got.dtype), 2e-5), f"{name} differs by {error:.2e}"


def _forward(group: str, dtype: str, m: int, n: int, force: bool) -> Case:
    def make() -> Inputs:
        x = torch.randn(m, n, device="cuda").to(dtype_of(dtype))
        return x, torch.randn(n, device="cuda").to(dtype_of(dtype))

    def call(x: torch.Tensor, w: torch.Tensor) -> Any:
        return torch.ops.aten._fused_rms_norm(x, w.shape, w, EPS)

    def composite(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, w.shape, w, EPS)

    item = dtype_of(dtype).itemsize
    on = functools.partial(operators.enabled, "rms_norm", force=force)

    def taken(inputs: Inputs) -> bool:
        x, w = inputs
        return force or operators.why_not("rms_norm", "aten::_fused_rms_norm", x, w.shape, w, EPS) is None

    return Case(
        group=f"{group}_forward",
        case=f"{dtype} {m}x{n}",
        bytes=2 * m * n * item + n * item + 4 * m,
        flops=0,
        make=make,
        contenders={
            "octavo": Contender(call, on),
            "aten": Contender(call),
            **peers.liger_rms_norm_forward(EPS),
        },
        check=check_forward,
        taken=taken,
        compiled=composite,
    )


def _backward(group: str, dtype: str, m: int, n: int, force: bool) -> Case:
    def make() -> Inputs:
        x, g = (torch.randn(m, n, device="cuda").to(dtype_of(dtype)) for _ in range(2))
        w = torch.randn(n, device="cuda").to(dtype_of(dtype))
        return g, x, torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS), w

    def call(g: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, w: torch.Tensor) -> Any:
        return torch.ops.aten._fused_rms_norm_backward(g, x, w.shape, rstd, w, [True, True])

    def composite(g: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, w: torch.Tensor) -> Any:
        return reference.fused_rms_norm_backward(g, x, w.shape, rstd, w, [True, True])

    def taken(inputs: Inputs) -> bool:
        g, x, rstd, w = inputs
        overload = "aten::_fused_rms_norm_backward"
        return force or operators.why_not("rms_norm", overload, g, x, w.shape, rstd, w, [True, True]) is None

    item = dtype_of(dtype).itemsize
    on = functools.partial(operators.enabled, "rms_norm", force=force)
    return Case(
        group=f"{group}_backward",
        case=f"{dtype} {m}x{n}",
        bytes=3 * m * n * item + 2 * n * item + 4 * m,
        flops=0,
        make=make,
        contenders={
            "octavo": Contender(call, on),
            "aten": Contender(call),
            **peers.liger_rms_norm_backward(),
        },
        check=check_backward,
        taken=taken,
        compiled=composite,
    )


def cases(force: bool = False) -> list[Case]:
    """Forward and backward of every shape."""
    out = []
    for group, group_shapes in shapes().items():
        out += [_forward(group, *shape, force) for shape in group_shapes]
        out += [_backward(group, *shape, force) for shape in group_shapes]
    return out
