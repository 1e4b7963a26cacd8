"""``torch._scaled_mm`` and ``F.scaled_mm`` with float32 scales, one a row or in blocks of 128.

PyTorch serves these on every card that has FP8 products, so a table of wins alone decides. What is taken is held to
what PyTorch accepts (ScaledBlas.cpp of 2.11 to 2.14): e4m3 of the device's kind, bfloat16 outputs, scales laid out as
its kernels read them. ``self`` is [M, K] row-major, ``mat2`` [K, N] column-major; the scales are

    row by row         scale_a [M, 1], scale_b [1, N] (``_scaled_mm``) or [N, 1] (``F.scaled_mm``)
    1x128              [M, K / 128] or of mat2 [K / 128, N], rows innermost in memory
    128x128            [M / 128, K / 128] or of mat2 [K / 128, N / 128], the contraction innermost in memory
"""

from __future__ import annotations

from typing import Any

import torch

from octavo import hardware
from octavo.formats import E4M3FN, Format, ScaledTensor
from octavo.operators import wins
from octavo.operators.override import is_copy_on_write

Kinds = tuple[str, str]
KINDS: dict[Kinds, str] = {
    ("rowwise", "rowwise"): "rowwise",
    ("1x128", "128x128"): "block",
    ("1x128", "1x128"): "blockrows",
}
"""Granularities of the two operands, and their name in the tables of wins."""
RECIPES = {1: "rowwise", 4: "1x128", 5: "128x128"}
"""By value of ``torch.nn.functional.ScalingType``."""
_MULTIPLE = 16
_BLOCK = 128


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def kinds_of_shapes(a: torch.Tensor, mat2: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor) -> Kinds | None:
    """What the older operator's scales are, told by their shapes as PyTorch tells it; None for anything else."""
    if a.ndim != 2 or mat2.ndim != 2 or sa.ndim != 2 or sb.ndim != 2:
        return None
    m, n, blocks = a.shape[0], mat2.shape[1], _cdiv(a.shape[1], _BLOCK)
    if tuple(sa.shape) == (m, 1) and tuple(sb.shape) == (1, n):
        return "rowwise", "rowwise"
    if tuple(sa.shape) != (m, blocks):
        return None
    if tuple(sb.shape) == (blocks, n):
        return "1x128", "1x128"
    return ("1x128", "128x128") if tuple(sb.shape) == (blocks, _cdiv(n, _BLOCK)) else None


def _why_not_matrices(a: torch.Tensor, mat2: torch.Tensor, multiple: int) -> str | None:
    if a.ndim != 2 or mat2.ndim != 2 or a.shape[1] != mat2.shape[0] or a.device != mat2.device:
        return "the operands are no matrices that can be multiplied"
    own = hardware.native_format(Format(E4M3FN, "rowwise"), a.device).element.dtype
    if a.dtype is not own or mat2.dtype is not own:
        return "the operands are not both of the device's e4m3 type"
    if 0 in (*a.shape, mat2.shape[1]):
        return "an extent is zero"
    if a.stride(1) != 1 or mat2.stride(0) != 1:
        return "the first operand is not row-major or the second not column-major"
    if a.stride(0) % _MULTIPLE or mat2.stride(1) % _MULTIPLE:
        return "rows do not start at multiples of 16 bytes"
    if a.shape[1] % multiple or mat2.shape[1] % _MULTIPLE:
        return f"K is no multiple of {multiple} or N none of {_MULTIPLE}"
    return "a tensor is copy-on-write" if is_copy_on_write(a) or is_copy_on_write(mat2) else None


def _rows_of(scale: torch.Tensor, kind: str, rows: int, k: int, second: bool) -> torch.Tensor | None:
    """The scale as [rows or row blocks, K blocks], or None where PyTorch reads another shape or layout.

    ``second``: it is mat2's, whose rows are the second dimension.
    """
    if kind == "rowwise":
        return scale.reshape(rows, 1) if scale.numel() == rows and scale.is_contiguous() else None
    if scale.ndim != 2:
        return None
    scale = scale.t() if second else scale
    blocks = _cdiv(k, _BLOCK)
    if kind == "1x128":
        fits = tuple(scale.shape) == (rows, blocks) and scale.stride(0) == 1
        return scale if fits and (blocks == 1 or scale.stride(1) == rows) else None
    # PyTorch wants a multiple of 4 blocks along K, which cuBLAS reads without asking.
    fits = tuple(scale.shape) == (_cdiv(rows, _BLOCK), blocks) and blocks % 4 == 0
    return scale if fits and scale.stride(1) == 1 and scale.stride(0) == blocks else None


def _scales(
    a: torch.Tensor, mat2: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor, kinds: Kinds
) -> tuple[torch.Tensor, torch.Tensor] | None:
    left = _rows_of(sa, kinds[0], a.shape[0], a.shape[1], second=False)
    right = _rows_of(sb, kinds[1], mat2.shape[1], a.shape[1], second=True)
    return None if left is None or right is None else (left, right)


def why_not(
    a: torch.Tensor,
    mat2: torch.Tensor,
    sa: torch.Tensor,
    sb: torch.Tensor,
    kinds: Kinds | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
) -> str | None:
    """Why the kernels are not right for such a product, or None."""
    if kinds not in KINDS or kinds is None:
        return "the scales are neither one a row nor in blocks of 128"
    reason = _why_not_matrices(a, mat2, _MULTIPLE if KINDS[kinds] == "rowwise" else _BLOCK)
    if reason is not None:
        return reason
    if out_dtype is not torch.bfloat16:
        return "the output is not bfloat16"
    for scale in (sa, sb):
        if scale.dtype is not torch.float32 or scale.device != a.device or is_copy_on_write(scale):
            return "the scales are not float32 beside their operands"
    if _scales(a, mat2, sa, sb, kinds) is None:
        return "the scales are not of the shape and layout that PyTorch reads"
    if kinds[0] == "1x128" and a.shape[0] % 4:
        return "1x128 scales want a multiple of 4 rows"
    if bias is not None:
        fits = bias.dtype is torch.bfloat16 and bias.numel() == mat2.shape[1] and bias.device == a.device
        if not fits or not bias.is_contiguous() or is_copy_on_write(bias):
            return "the bias is not one bfloat16 for each column"
    return hardware.why_no_triton(a.device)


def run(
    a: torch.Tensor,
    mat2: torch.Tensor,
    sa: torch.Tensor,
    sb: torch.Tensor,
    kinds: Kinds,
    bias: torch.Tensor | None,
    fast_accum: bool,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Serve a product that the gate accepted."""
    from octavo.matmul import triton_launch

    scales = _scales(a, mat2, sa, sb, kinds)
    assert scales is not None
    element = hardware.native_format(Format(E4M3FN, "rowwise"), a.device).element
    left = ScaledTensor(a, scales[0], Format(element, kinds[0]))
    right = ScaledTensor(mat2.t(), scales[1], Format(element, kinds[1]))
    bias = None if bias is None else bias.reshape(-1)
    made = triton_launch.scaled_mm(left, right, bias, torch.bfloat16, fast_accum)
    return made if out is None else out.copy_(made)


def measured(a: torch.Tensor, mat2: torch.Tensor, kinds: Kinds, fast_accum: bool) -> str | None:
    """Why no measurement says that the product wins here, or None."""
    sizes: dict[str, Any] = {"m": a.shape[0], "n": mat2.shape[1], "k": a.shape[1]}
    # Only a scale after the whole contraction leaves anything to accumulate fast.
    fast = str(fast_accum and KINDS[kinds] == "rowwise").lower()
    return wins.why_not("scaled_mm", a.device, format=KINDS[kinds], fast=fast, **sizes)
