"""FP8 products by ``torch._scaled_mm``: one scale a row, with and without fast accumulation, and blocks of 128.

The shapes are a Llama-3-8B's layers, where PyTorch has products of its own on Hopper and MI300; both contenders get
the same operands. Octavo's take the call through the same operator.
"""

from __future__ import annotations

import functools

import torch

from octavo import hardware, operators, quantize
from octavo.bench.agreement import FAST_TOLERANCE, TOLERANCE, relative_error
from octavo.bench.cases import Case
from octavo.bench.timing import Contender, Inputs
from octavo.formats import E4M3FN, Format, ScaledTensor
from octavo.matmul import reference
from octavo.operators.gemm import fp8

ROWS = (16, 256, 8192)
LAYERS = ((6144, 4096), (4096, 4096), (14336, 4096), (4096, 14336))
SCALED_MM = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
GROUPS = (
    ("rowwise", ("rowwise", "rowwise"), False),
    ("rowwise_fast", ("rowwise", "rowwise"), True),
    ("block", ("1x128", "128x128"), False),
    ("blockrows", ("1x128", "1x128"), False),
)


def _scale(x: ScaledTensor, second: bool) -> torch.Tensor:
    """The scales as PyTorch's kernel reads them."""
    if x.format.granularity == "1x128":
        outer = x.scale.t().contiguous()
        return outer if second else outer.t()
    return x.scale.t() if second else x.scale.contiguous()


def _case(group: str, kinds: fp8.Kinds, fast: bool, m: int, n: int, k: int, force: bool) -> Case:
    def formats() -> list[Format]:
        return [hardware.native_format(Format(E4M3FN, kind), "cuda") for kind in kinds]

    def make() -> Inputs:
        sides = [
            quantize(torch.randn(rows, k, device="cuda", dtype=torch.bfloat16), fmt)
            for rows, fmt in zip((m, n), formats())
        ]
        return (*(x.data for x in sides), _scale(sides[0], False), _scale(sides[1], True))

    def call(a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor) -> torch.Tensor:
        return SCALED_MM(a, b.t(), sa, sb, out_dtype=torch.bfloat16, use_fast_accum=fast)

    def check(inputs: Inputs, result: torch.Tensor) -> None:
        a, b, sa, sb = inputs
        left, right = (ScaledTensor(x, s, fmt) for x, s, fmt in zip((a, b), (sa, sb.t()), formats()))
        error = relative_error(result, reference.scaled_mm(left, right, None, torch.float32, False))
        assert error <= (FAST_TOLERANCE if fast else TOLERANCE), (
            f"the result differs from the reference's by {error:.2e}"
        )

    def why_not(a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor) -> str | None:
        return operators.why_not(
            "gemm", "aten::_scaled_mm", a, b.t(), sa, sb, out_dtype=torch.bfloat16, use_fast_accum=fast
        )

    scales = (m + n) * (4 if group.startswith("rowwise") else 4 * k // 128)
    return Case(
        group=group,
        case=f"e4m3 M={m} N={n} K={k}",
        bytes=(m + n) * k + scales + 2 * m * n,
        flops=2 * m * n * k,
        make=make,
        contenders={
            "octavo": Contender(call, functools.partial(operators.enabled, "gemm", force=force)),
            "aten": Contender(call),
        },
        check=check,
        taken=lambda inputs: force or why_not(*inputs) is None,
    )


def cases(force: bool = False) -> list[Case]:
    """Each kind of scales that PyTorch has here, on each layer at every number of rows."""
    shapes = [(m, n, k) for n, k in LAYERS for m in ROWS]
    hopper = not torch.cuda.is_available() or hardware.architecture("cuda") == "sm_90"
    groups = [group for group in GROUPS if hopper or group[0].startswith("rowwise")]
    return [_case(*group, *shape, force) for group in groups for shape in shapes]
