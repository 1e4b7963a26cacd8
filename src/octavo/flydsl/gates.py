"""What the FlyDSL kernels are right for; each gate takes its op's arguments and reads no data."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from octavo import hardware
from octavo.flydsl.plan import MAX_COLUMNS, MX_BLOCK, MX_ELEMENTS
from octavo.formats import ScaledTensor, ScaleLayout


def why_not_rms_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None, eps: float | None
) -> str | None:
    """Why the FlyDSL kernel is not right for these arguments of ``aten::_fused_rms_norm``, or None if it is."""
    dims = len(normalized_shape)
    if dims == 0 or input.ndim < dims or list(input.shape[-dims:]) != list(normalized_shape):
        return "normalized_shape does not match the input"
    if weight is not None and (list(weight.shape) != list(normalized_shape) or weight.device != input.device):
        return "the weight has another device or shape"
    if input.dtype != torch.bfloat16 or (weight is not None and weight.dtype != torch.bfloat16):
        return "the FlyDSL kernel takes bfloat16 alone"
    if input.layout is not torch.strided:
        return "the tensor is not strided"
    if input.numel() == 0:
        return "the tensor is empty"
    if math.prod(normalized_shape) > MAX_COLUMNS:
        return f"rows are longer than {MAX_COLUMNS}, the FlyDSL kernel's limit"
    return hardware.why_no_flydsl_on(input.device)


def why_not_mm(a: torch.Tensor, b: torch.Tensor) -> str | None:
    """Why the FlyDSL kernel is not right for a[M, K] @ b[N, K].T, or None if it is."""
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        return "the operands are not [M, K] and [N, K]"
    if a.dtype != torch.bfloat16 or b.dtype != torch.bfloat16:
        return "the FlyDSL kernel takes bfloat16 alone"
    if a.device != b.device or a.layout is not torch.strided or b.layout is not torch.strided:
        return "the operands are not strided tensors of one device"
    return _why_not_sizes(a.shape[0], b.shape[0], a.shape[1], 8) or hardware.why_no_flydsl_on(a.device)


def why_not_scaled_mm(
    a: ScaledTensor, b: ScaledTensor, bias: torch.Tensor | None, out_dtype: torch.dtype, fast_accum: bool
) -> str | None:
    """Why the FlyDSL kernel cannot multiply these operands, or None if it can: MXFP8 by MXFP8 into bfloat16."""
    for side in (a, b):
        if side.format.granularity != "1x32" or side.format.element.name not in MX_ELEMENTS:
            return f"the FlyDSL kernel takes MXFP8 ({', '.join(MX_ELEMENTS)}), not {side.format.key}"
        if side.layout is not ScaleLayout.PLAIN:
            return f"the FlyDSL kernel takes plain scales, not {side.layout.value}"
        if side.ndim != 2 or side.group_ends is not None:
            return "the FlyDSL kernel takes two matrices, no groups"
    if bias is not None or out_dtype != torch.bfloat16:
        return "the FlyDSL kernel writes bfloat16 and adds no bias"
    return _why_not_sizes(a.shape[0], b.shape[0], a.shape[1], MX_BLOCK) or hardware.why_no_flydsl_on(a.device)


def _why_not_sizes(m: int, n: int, k: int, multiple: int) -> str | None:
    if 0 in (m, n, k):
        return "an operand is empty"
    if n % 8 or k % multiple:
        return f"N is not a multiple of 8 or K not one of {multiple}"
    if max(m, n, k) >= 2**30:
        return "a size is 2**30 or more"
    return None
