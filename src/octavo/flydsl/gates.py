"""What the FlyDSL kernels are right for; each gate takes its op's arguments and reads no data."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from octavo import hardware
from octavo.flydsl.plan import MAX_COLUMNS


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
