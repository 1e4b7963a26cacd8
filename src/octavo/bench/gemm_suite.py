"""Grouped products, rows by expert, on the published sizes: BF16 by ``F.grouped_mm``, FP8 by ``_scaled_grouped_mm``.

FLOPs and bytes are those of the rows that are in a group; a matrix that no row needs is not read.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F

from octavo import hardware, operators, quantize
from octavo.bench import published
from octavo.bench.agreement import FAST_TOLERANCE, TOLERANCE, relative_error
from octavo.bench.cases import Case
from octavo.bench.timing import Contender, Inputs
from octavo.formats import E4M3FN, Format, ScaledTensor
from octavo.matmul import reference

SCALED_GROUPED_MM = torch._scaled_grouped_mm  # pyright: ignore[reportPrivateImportUsage]


def check(inputs: Inputs, result: Any) -> None:
    """Against the reference, in the rows of the groups."""
    x, weight, offs = inputs
    rows = int(offs[-1])
    want = reference.grouped_mm(x.float(), weight.float(), offs, None)[:rows].double()
    error = ((result[:rows].double() - want).norm() / want.norm()).item()
    assert error <= TOLERANCE, f"the result differs from the reference's by {error:.2e}"


def _call(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    return F.grouped_mm(x, weight.mT, offs=offs)


def _words(sizes: tuple[int, ...], k: int, n: int) -> str:
    rows = f"{len(sizes)}x{sizes[0]}" if len(set(sizes)) == 1 else ",".join(map(str, sizes))
    return f"rows {rows} K={k} N={n}"


def _ends(sizes: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(sizes, device="cuda").cumsum(0).to(torch.int32)


def _case(group: str, sizes: tuple[int, ...], k: int, n: int, force: bool) -> Case:
    rows, live = sum(sizes), sum(size > 0 for size in sizes)

    def make() -> Inputs:
        x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(len(sizes), n, k, device="cuda", dtype=torch.bfloat16)
        return x, weight, _ends(sizes)

    def why_not(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> str | None:
        return operators.why_not("gemm", "aten::_grouped_mm", x, weight.mT, offs)

    on = functools.partial(operators.enabled, "gemm", force=force)
    return Case(
        group=group,
        case=_words(sizes, k, n),
        bytes=2 * (rows * k + live * n * k + rows * n),
        flops=2 * rows * n * k,
        make=make,
        contenders={"octavo": Contender(_call, on), "aten": Contender(_call)},
        check=check,
        taken=lambda inputs: force or why_not(*inputs) is None,
        compiled=_call,
    )


def cases(force: bool = False) -> list[Case]:
    """The 24 published cases."""
    return [_case(*sizes, force) for sizes in published.GROUPED]


def _fp8_case(group: str, sizes: tuple[int, ...], k: int, n: int, fast: bool, force: bool) -> Case:
    rows, live = sum(sizes), sum(size > 0 for size in sizes)
    on = functools.partial(operators.enabled, "gemm", force=force)

    def make() -> Inputs:
        fmt = hardware.native_format(Format(E4M3FN, "rowwise"), "cuda")
        shapes = ((rows, k), (len(sizes), n, k))
        sides = [quantize(torch.randn(shape, device="cuda", dtype=torch.bfloat16), fmt) for shape in shapes]
        return (*(x.data for x in sides), *(x.scale.squeeze(-1) for x in sides), _ends(sizes))

    def call(a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor, offs: torch.Tensor) -> Any:
        return SCALED_GROUPED_MM(a, b.mT, sa, sb, offs, out_dtype=torch.bfloat16, use_fast_accum=fast)

    def check_fp8(inputs: Inputs, result: Any) -> None:
        a, b, sa, sb, offs = inputs
        fmt = hardware.native_format(Format(E4M3FN, "rowwise"), a.device)
        left, right = ScaledTensor(a, sa[..., None], fmt), ScaledTensor(b, sb[..., None], fmt)
        want = reference.scaled_grouped_mm(left, right, offs, None, torch.float32, False)[:rows]
        error = relative_error(result[:rows], want)
        assert error <= (FAST_TOLERANCE if fast else TOLERANCE), f"the result is off by {error:.2e}"

    def why_not(a: Any, b: Any, sa: Any, sb: Any, offs: Any) -> str | None:
        arguments = {"out_dtype": torch.bfloat16, "use_fast_accum": fast}
        return operators.why_not("gemm", "aten::_scaled_grouped_mm", a, b.mT, sa, sb, offs, **arguments)

    return Case(
        group=f"{group}{'_fast' if fast else ''}",
        case=_words(sizes, k, n),
        bytes=rows * k + live * n * k + 2 * rows * n + 4 * (rows + live * n),
        flops=2 * rows * n * k,
        make=make,
        contenders={"octavo": Contender(call, on), "aten": Contender(call)},
        check=check_fp8,
        taken=lambda inputs: force or why_not(*inputs) is None,
    )


def cases_fp8(force: bool = False) -> list[Case]:
    """Every second of them in FP8, one scale a row, with and without fast accumulation."""
    return [_fp8_case(*sizes, fast, force) for fast in (False, True) for sizes in published.GROUPED[::2]]
