"""What the Triton matrix products can serve, decided without importing Triton."""

from __future__ import annotations

import torch

from octavo import hardware
from octavo.formats import Format, ScaledTensor

ALONG_CONTRACTION = ("columnwise", "128x1")


def why_not_scaled_mm(
    a: ScaledTensor, b: ScaledTensor, bias: torch.Tensor | None, out_dtype: torch.dtype, fast_accum: bool
) -> str | None:
    """Why the Triton kernels cannot multiply these operands, or None."""
    return hardware.why_no_triton(a.device) or _why_not_formats(a.format, b.format, a.device)


def why_not_scaled_grouped_mm(
    a: ScaledTensor,
    b: ScaledTensor,
    offs: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> str | None:
    """Why the Triton kernels cannot multiply these groups, or None."""
    reason = hardware.why_no_triton(a.device) or _why_not_formats(a.format, b.format, a.device)
    if reason is None and offs.shape[0] == 0:
        return "there are no groups"
    return reason


def why_not_grouped_mm(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, bias: torch.Tensor | None
) -> str | None:
    """Why the Triton kernels cannot multiply these 16- or 32-bit groups, or None."""
    reason = hardware.why_no_triton(a.device)
    if reason is None and a.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"bfloat16, float16 and float32 alone, not {a.dtype}"
    if reason is None and offs.shape[0] == 0:
        return "there are no groups"
    return reason


def _why_not_formats(a: Format, b: Format, device: torch.device) -> str | None:
    for fmt in (a, b):
        if fmt.granularity in ALONG_CONTRACTION:
            return f"{fmt.granularity} scales change with every element of the contraction"
    if a.is_mx != b.is_mx:
        return f"no product of {a.granularity} by {b.granularity} scales"
    mixed = a.element != b.element and not a.is_mx
    if mixed and hardware.architecture(device) == "gfx942" and hardware.triton_version() < (3, 7):
        return "before 3.7 Triton multiplies e5m2 by e4m3 wrongly on gfx942 (triton-lang/triton#9567): upgrade it"
    # Triton's interpreter multiplies any type; a card only its own, the other in slow emulation.
    if device.type != "cpu":
        for fmt in (a, b):
            if hardware.native_format(fmt, device) != fmt:
                return f"{fmt.element.name} is not the FP8 type of {hardware.architecture(device)}"
    return None
