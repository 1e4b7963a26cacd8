"""``torch._grouped_mm``, ``F.grouped_mm`` and FP8 ``_scaled_grouped_mm`` through the grouped products of octavo.matmul.

Two forms are taken: rows by expert, ``self[M, K]`` by ``mat2[G, K, N]`` with ``offs`` cutting M, and over groups,
``self[M, K]`` by ``mat2[K, N]`` with ``offs`` cutting K. Empty groups and rows past the last end give zeros. Group
sizes stay on the device. A bias, which PyTorch declares and refuses so far, is [G, N] and added in the first form.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from octavo import hardware
from octavo.formats import E4M3FN, E4M3FNUZ, Format, ScaledTensor
from octavo.operators import wins
from octavo.operators.override import is_copy_on_write

DTYPES = (torch.bfloat16, torch.float16)
ROWWISE = 1
"""``torch.nn.functional.ScalingType.RowWise``."""
_ELEMENTS = {torch.float8_e4m3fn: E4M3FN, torch.float8_e4m3fnuz: E4M3FNUZ}


def _why_not_forms(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None, bias: torch.Tensor | None
) -> str | None:
    if a.ndim != 2 or b.ndim not in (2, 3):
        return "only a 2-D first operand is served, by a 3-D or 2-D one"
    if offs is None or offs.ndim != 1 or offs.dtype is not torch.int32 or offs.device != a.device:
        return "the group ends are not one int32 for each group beside the operands"
    if a.dtype is not b.dtype or a.device != b.device or a.shape[1] != b.shape[-2]:
        return "the operands do not match"
    if b.ndim == 3 and b.shape[0] != offs.shape[0]:
        return "there are not as many groups as matrices"
    if 0 in (*a.shape, *b.shape, *offs.shape):
        return "an extent is zero"
    if bias is not None:
        fits = b.ndim == 3 and tuple(bias.shape) == (b.shape[0], b.shape[2])
        if not fits or bias.dtype is not torch.bfloat16 or bias.device != a.device:
            return "a bias is served as bfloat16 [G, N] beside a 3-D operand alone"
    tensors = (a, b, offs) if bias is None else (a, b, offs, bias)
    return "a tensor is copy-on-write" if any(map(is_copy_on_write, tensors)) else None


def _strides_fit(x: torch.Tensor) -> bool:
    """What PyTorch asks of either operand: one of the last two dimensions contiguous, the other 16-byte aligned."""
    for inner, outer in ((-1, -2), (-2, -1)):
        if x.stride(inner) == 1 and x.stride(outer) >= max(1, x.shape[inner]):
            return x.stride(outer) * x.element_size() % 16 == 0
    return False


def why_not_grouped(
    self: torch.Tensor,
    mat2: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> str | None:
    """Why the kernels are not right for a call of ``aten::_grouped_mm``, or None."""
    if self.dtype not in DTYPES:
        return "the operands are not bfloat16 or float16"
    if out_dtype not in (None, self.dtype):
        return "the output is of another dtype than the operands"
    reason = _why_not_forms(self, mat2, offs, bias)
    if reason is None and bias is not None and self.dtype is not torch.bfloat16:
        return "a bias is served beside bfloat16 alone"
    if reason is None and not (_strides_fit(self) and _strides_fit(mat2)):
        return "an operand's strides are not what PyTorch takes"
    return reason or hardware.why_no_triton(self.device)


def _padded_like_pytorch(out: torch.Tensor) -> torch.Tensor:
    """``out`` with rows that start at multiples of 16 bytes, as PyTorch's CUDA kernel and shape function lay it out."""
    multiple = 16 // out.element_size()
    columns = -(-out.shape[-1] // multiple) * multiple
    if torch.version.hip or columns == out.shape[-1]:
        return out
    wide = out.new_empty((*out.shape[:-1], columns))
    return wide[..., : out.shape[-1]].copy_(out)


def run_grouped(
    self: torch.Tensor,
    mat2: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Serve a call of ``aten::_grouped_mm`` that the gate accepted."""
    from octavo.matmul import triton_launch

    assert offs is not None
    return _padded_like_pytorch(triton_launch.grouped_mm(self, mat2.mT, offs, bias))


def measured_grouped(
    self: torch.Tensor, mat2: torch.Tensor, offs: torch.Tensor | None = None, *rest: Any, **_: Any
) -> str | None:
    """Why no measurement says that the grouped product wins here, or None."""
    return _measured("grouped_mm", self, mat2, offs)


def _measured(
    kind: str, a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None, **more: str
) -> str | None:
    assert offs is not None
    form = "rows" if b.ndim == 3 else "columns"
    sizes = {"m": a.shape[0], "n": b.shape[-1], "k": a.shape[1], "groups": offs.shape[0]}
    return wins.why_not(kind, a.device, form=form, dtype=str(a.dtype)[6:], **more, **sizes)


# ---- FP8, one scale a row -------------------------------------------------------------------------------------


def why_not_scaled(
    self: torch.Tensor,
    mat2: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> str | None:
    """Why the kernels are not right for a call of ``aten::_scaled_grouped_mm``, or None."""
    if self.dtype not in _ELEMENTS:
        return "the operands are not e4m3"
    if hardware.native_format(Format(E4M3FN, "rowwise"), self.device).element is not _ELEMENTS[self.dtype]:
        return "the operands are not of the device's FP8 type"
    if out_dtype not in (None, torch.bfloat16) or scale_result is not None:
        return "the output is not bfloat16 without a scale of its own"
    reason = _why_not_forms(self, mat2, offs, bias)
    if reason is not None or offs is None:
        return reason
    if self.stride(1) != 1 or mat2.stride(-2) != 1 or not (_strides_fit(self) and _strides_fit(mat2)):
        return "the first operand is not row-major or the second not column-major"
    if self.shape[1] % 16 or mat2.shape[-1] % 16:
        return "PyTorch wants K and N to be multiples of 16"
    repeats = 1 if mat2.ndim == 3 else offs.shape[0]
    shapes = ((self.shape[0] * repeats,), (*mat2.shape[:-2], mat2.shape[-1] * repeats))
    for scale, shape in zip((scale_a, scale_b), shapes):
        if scale.dtype is not torch.float32 or scale.device != self.device or tuple(scale.shape) != shape:
            return "the scales are not one float32 for each row, of each group"
        if scale.stride(-1) != 1 or is_copy_on_write(scale):
            return "the scales are not contiguous"
    return hardware.why_no_triton(self.device)


def run_scaled(
    self: torch.Tensor,
    mat2: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """Serve a call of ``aten::_scaled_grouped_mm`` that the gate accepted.

    Over groups the ends must be multiples of 16, as PyTorch's kernel wants them.
    """
    from octavo.matmul import triton_launch

    assert offs is not None
    fmt = Format(_ELEMENTS[self.dtype], "rowwise")
    groups = offs.shape[0]
    if mat2.ndim == 2:
        scale_a, scale_b = scale_a.view(groups, -1), scale_b.view(groups, -1)
    a = ScaledTensor(self, scale_a[..., None], fmt)
    b = ScaledTensor(mat2.mT, scale_b[..., None], fmt)
    return triton_launch.scaled_grouped_mm(a, b, offs, bias, torch.bfloat16, use_fast_accum)


def measured_scaled(
    self: torch.Tensor,
    mat2: torch.Tensor,
    scale_a: object,
    scale_b: object,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> str | None:
    """Why no measurement says that the scaled grouped product wins here, or None."""
    return _measured("scaled_grouped_mm", self, mat2, offs, fast=str(use_fast_accum).lower())


# ---- the same with recipes: aten::_scaled_grouped_mm_v2 -------------------------------------------------------


def _v2(call: Any) -> Any:
    """``call`` of the older operator's arguments, taking the newer one's: one scale a row and no swizzle."""

    def with_recipes(
        self: torch.Tensor,
        mat2: torch.Tensor,
        scale_a: Sequence[torch.Tensor],
        recipe_a: Sequence[int],
        swizzle_a: Sequence[int],
        scale_b: Sequence[torch.Tensor],
        recipe_b: Sequence[int],
        swizzle_b: Sequence[int],
        offs: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        contraction_dim: Sequence[int] = (),
        use_fast_accum: bool = False,
    ) -> Any:
        return call(self, mat2, scale_a[0], scale_b[0], offs, bias, None, out_dtype, use_fast_accum)

    return with_recipes


def why_not_scaled_v2(
    self: torch.Tensor,
    mat2: torch.Tensor,
    scale_a: Sequence[torch.Tensor],
    recipe_a: Sequence[int],
    swizzle_a: Sequence[int],
    scale_b: Sequence[torch.Tensor],
    recipe_b: Sequence[int],
    swizzle_b: Sequence[int],
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
) -> str | None:
    """Why the kernels are not right for a call of ``aten::_scaled_grouped_mm_v2``, or None."""
    if list(recipe_a) != [ROWWISE] or list(recipe_b) != [ROWWISE] or any((*swizzle_a, *swizzle_b)):
        return "the scales of both operands are not RowWise"
    if len(scale_a) != 1 or len(scale_b) != 1 or list(contraction_dim) not in ([], [-1, -2]):
        return "there is more than one scale, or another contraction"
    return why_not_scaled(self, mat2, scale_a[0], scale_b[0], offs, bias, None, out_dtype, use_fast_accum)


run_scaled_v2 = _v2(run_scaled)
measured_scaled_v2 = _v2(measured_scaled)
