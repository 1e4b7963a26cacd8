"""BF16 products as a model calls them: ``F.linear`` with and without a bias, on published sizes and Llama's layers.

``aten`` is the same product by ``torch.mm(..., out=)`` and ``torch.addmm(..., out=)``, overloads that are never routed:
what PyTorch does where Octavo was not even asked.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from octavo import operators
from octavo.bench import published
from octavo.bench.agreement import TOLERANCE, relative_error
from octavo.bench.cases import Case
from octavo.bench.timing import Contender, Inputs

ROWS = (1, 16, 64, 256, 1024, 4096)
LAYERS = {
    "llama-3-8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "llama-3-70b": ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)),
}
"""(out features, in features) of the fused qkv, the output, the fused gate and up, and the down projection."""
BIASED = ((16, 4096, 4096), (256, 4096, 4096), (4096, 4096, 4096))


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return F.linear(x, weight, bias)


def _aten(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    out = x.new_empty((x.shape[0], weight.shape[0]))
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


def _check(inputs: Inputs, result: torch.Tensor) -> None:
    x, weight, *bias = inputs
    want = x.double() @ weight.double().t()
    error = relative_error(result, want + bias[0].double() if bias else want)
    assert error <= TOLERANCE, f"the result differs from float64's by {error:.2e}"


def _taken(x: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor) -> bool:
    if bias:
        return operators.why_not("gemm", "aten::addmm", bias[0], x, weight.t()) is None
    return operators.why_not("gemm", "aten::mm", x, weight.t()) is None


def _case(group: str, m: int, n: int, k: int, force: bool, bias: bool = False) -> Case:
    def make() -> Inputs:
        tensors = [torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for rows in (m, n)]
        return (*tensors, *([torch.randn(n, device="cuda", dtype=torch.bfloat16)] if bias else []))

    return Case(
        group=group,
        case=f"bf16 M={m} N={n} K={k}{' bias' if bias else ''}",
        bytes=2 * (m * k + n * k + m * n + n * bias),
        flops=2 * m * n * k,
        make=make,
        contenders={
            "octavo": Contender(_linear, functools.partial(operators.enabled, "gemm", force=force)),
            "aten": Contender(_aten),
        },
        check=_check,
        taken=lambda inputs: force or _taken(*inputs),
        compiled=_linear,
    )


def cases(force: bool = False) -> list[Case]:
    """The published shapes, those with a bias, then each layer of the models at every number of rows."""
    found = [_case("published", *shape, force) for shape in published.DENSE]
    found += [_case("bias", *shape, force, bias=True) for shape in BIASED]
    for model, layers in LAYERS.items():
        shapes = [(m, n, k) for n, k in layers for m in ROWS]
        found += [_case(model, *shape, force) for shape in shapes if shape not in published.DENSE]
    return found
