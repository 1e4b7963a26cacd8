"""Products of 16-bit operands behind ``torch.mm`` and ``torch.addmm`` (which ``F.linear`` calls), by measurement alone.

``self[M, K] @ mat2[K, N]`` with ``self`` row-major and ``mat2`` column-major, as a linear layer's forward has them.
PyTorch's own product is the better one on most sizes, and a call lasts a few microseconds: so these overloads are not
even registered unless a table of wins names ``mm`` (or ``enable(force=True)`` asks for them).
"""

from __future__ import annotations

from typing import Any

import torch

from octavo import hardware
from octavo.operators import wins
from octavo.operators.gemm import plan as plans
from octavo.operators.override import is_copy_on_write

DTYPES = (torch.bfloat16, torch.float16)
_ALIGNMENT = 8
"""Elements: rows start at multiples of 16 bytes."""


def why_not(a: torch.Tensor, mat2: torch.Tensor) -> str | None:
    """Why the kernels are not right for ``torch.mm(a, mat2)``, or None."""
    if a.dtype not in DTYPES or mat2.dtype is not a.dtype:
        return "the operands are not both bfloat16 or both float16"
    if a.ndim != 2 or mat2.ndim != 2 or a.shape[1] != mat2.shape[0] or a.device != mat2.device:
        return "the operands are no matrices that can be multiplied"
    if 0 in (*a.shape, mat2.shape[1]):
        return "an extent is zero"
    if a.stride(1) != 1 or mat2.stride(0) != 1:
        return "the first operand is not row-major or the second not column-major"
    (m, k), n = a.shape, mat2.shape[1]
    if a.stride(0) % _ALIGNMENT or mat2.stride(1) % _ALIGNMENT or a.stride(0) < k or mat2.stride(1) < k:
        return "rows do not start at multiples of 16 bytes"
    if max(m, n) * k >= 2**31 or m * n >= 2**31:
        return "there are 2**31 elements or more"
    if is_copy_on_write(a) or is_copy_on_write(mat2):
        return "a tensor is copy-on-write"
    return hardware.why_no_triton(a.device)


def why_not_mm(self: torch.Tensor, mat2: torch.Tensor) -> str | None:
    """Why the kernels are not right for a call of ``aten::mm``, or None."""
    return why_not(self, mat2)


def why_not_addmm(
    self: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor, *, beta: Any = 1, alpha: Any = 1
) -> str | None:
    """Why the kernels are not right for a call of ``aten::addmm``, or None."""
    if beta != 1 or alpha != 1:
        return "beta or alpha is not 1"
    reason = why_not(mat1, mat2)
    if reason is None and (self.ndim != 1 or self.shape[0] != mat2.shape[1] or self.dtype is not mat1.dtype):
        return "what is added is not one value of the operands' dtype for each column"
    if reason is None and (self.device != mat1.device or is_copy_on_write(self)):
        return "what is added is copy-on-write or on another device"
    return reason


def product(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, plan: plans.Plan | None = None
) -> torch.Tensor:
    """``a[M, K] @ b[N, K].T + bias[N]`` in the operands' dtype: summed in float32, rounded once; no extent is 0."""
    from octavo.operators.gemm import launch

    plan = plan or plans.choose(hardware.architecture(a.device), plans.DENSE, a.shape[0])
    out = torch.empty((a.shape[0], b.shape[0]), dtype=a.dtype, device=a.device)
    return launch.product(a, b, bias, out, plan)


def run_mm(self: torch.Tensor, mat2: torch.Tensor) -> torch.Tensor:
    """Serve a call of ``aten::mm`` that the gate accepted."""
    return product(self, mat2.t())


def run_addmm(
    self: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor, *, beta: Any = 1, alpha: Any = 1
) -> torch.Tensor:
    """Serve a call of ``aten::addmm`` that the gate accepted."""
    return product(mat1, mat2.t(), self)


def measured_mm(self: torch.Tensor, mat2: torch.Tensor) -> str | None:
    """Why no measurement says that the product wins here, or None."""
    sizes = {"m": self.shape[0], "n": mat2.shape[1], "k": self.shape[1]}
    return wins.why_not("mm", self.device, dtype=str(self.dtype)[6:], **sizes)


def measured_addmm(self: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor, **_: Any) -> str | None:
    """As ``measured_mm``: the bias adds as little to our kernel as to PyTorch's."""
    return measured_mm(mat1, mat2)
