"""BF16 grouped products by ``F.grouped_mm``: rows by expert, on the published sizes.

FLOPs and bytes are those of the rows that are in a group; a matrix that no row needs is not read.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F

from octavo import operators
from octavo.bench import published
from octavo.bench.cases import Case
from octavo.bench.timing import Contender, Inputs
from octavo.matmul import reference

TOLERANCE = 10 ** (-50 / 20)
"""Relative error of a bfloat16 output: 50 dB."""


def check(inputs: Inputs, result: Any) -> None:
    """Against the reference, in the rows of the groups."""
    x, weight, offs = inputs
    rows = int(offs[-1])
    want = reference.grouped_mm(x.float(), weight.float(), offs, None)[:rows].double()
    error = ((result[:rows].double() - want).norm() / want.norm()).item()
    assert error <= TOLERANCE, f"the result differs from the reference's by {error:.2e}"


def _call(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    return F.grouped_mm(x, weight.mT, offs=offs)


def _case(group: str, sizes: tuple[int, ...], k: int, n: int, force: bool) -> Case:
    rows, live = sum(sizes), sum(size > 0 for size in sizes)

    def make() -> Inputs:
        x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(len(sizes), n, k, device="cuda", dtype=torch.bfloat16)
        return x, weight, torch.tensor(sizes, device="cuda").cumsum(0).to(torch.int32)

    def why_not(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> str | None:
        return operators.why_not("gemm", "aten::_grouped_mm", x, weight.mT, offs)

    words = f"{len(sizes)}x{sizes[0]}" if len(set(sizes)) == 1 else ",".join(map(str, sizes))
    on = functools.partial(operators.enabled, "gemm", force=force)
    return Case(
        group=group,
        case=f"rows {words} K={k} N={n}",
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
