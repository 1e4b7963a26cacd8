"""``torch._scaled_mm`` and ``F.scaled_mm``: their arguments read; MX products refused or multiplied.

Products with float32 scales, one a row or in blocks of 128, are handed to :mod:`.fp8`.

PyTorch multiplies ``self[M, K] @ mat2[K, N]`` with ``self`` row-major and ``mat2`` column-major, one e8m0 scale for 32
elements along K (``ScalingType.BlockWise1x32``). Its CUDA kernels want the scales swizzled (``SWIZZLE_32_4_4``), its
ROCm kernels plain; here both are taken on every card, wherever they say which they are. Sizes and dtypes are held to
what PyTorch accepts where it has a kernel, so that a call served here is one that runs on Blackwell or MI350 too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from octavo import hardware
from octavo.formats import MXFP4, MXFP8, MXFP8_E5M2, Format, ScaledTensor, ScaleLayout
from octavo.operators import wins
from octavo.operators.gemm import fp8
from octavo.operators.gemm import plan as plans
from octavo.operators.gemm.reference import swizzled_size
from octavo.operators.override import is_copy_on_write

FORMATS = {torch.float8_e4m3fn: MXFP8, torch.float8_e5m2: MXFP8_E5M2, torch.float4_e2m1fn_x2: MXFP4}
OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)
BLOCKWISE_1X32 = 3
"""``torch.nn.functional.ScalingType.BlockWise1x32``."""
LAYOUTS = {0: ScaleLayout.PLAIN, 1: ScaleLayout.SWIZZLED_32_4_4}
"""By value of ``torch.nn.functional.SwizzleType``."""
WITHOUT_KERNEL = ("sm_90", "gfx942")
"""Architectures on which PyTorch has no MX product: what is right for the kernels is served there, unmeasured."""
_MULTIPLE = 16
_LIMIT = 2**31


def _why_not_matrices(a: torch.Tensor, b: torch.Tensor) -> str | None:
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        return "the operands are no matrices that can be multiplied"
    if a.dtype not in FORMATS or b.dtype not in FORMATS:
        return "the operands are not float8_e4m3fn, float8_e5m2 or float4_e2m1fn_x2"
    if (a.dtype is torch.float4_e2m1fn_x2) != (b.dtype is torch.float4_e2m1fn_x2):
        return "only one operand is float4_e2m1fn_x2"
    if a.dtype is b.dtype is torch.float8_e5m2:
        return "PyTorch multiplies no two float8_e5m2 matrices"
    if a.device != b.device:
        return "the operands are on two devices"
    if 0 in (*a.shape, b.shape[1]):
        return "an extent is zero"
    if a.stride(1) != 1 or b.stride(0) != 1:
        return "the first operand is not row-major or the second not column-major"
    if a.shape[1] * FORMATS[a.dtype].element.packed % _MULTIPLE or b.shape[1] % _MULTIPLE:
        return f"PyTorch wants K and N to be multiples of {_MULTIPLE}"
    return "a tensor is copy-on-write" if is_copy_on_write(a) or is_copy_on_write(b) else None


def _why_not_scale(
    scale: torch.Tensor, layout: ScaleLayout, rows: int, k: int, data: torch.Tensor
) -> str | None:
    if scale.dtype is not torch.float8_e8m0fnu:
        return "the scales are not float8_e8m0fnu"
    if scale.device != data.device or not scale.is_contiguous() or is_copy_on_write(scale):
        return "the scales are not contiguous beside their operand"
    codes = -(-k // 32)
    size = rows * codes if layout is ScaleLayout.PLAIN else swizzled_size(rows, codes)
    if scale.numel() != size:
        return f"there are not as many scales as {layout.value} blocks of 32"
    return None if size < _LIMIT else "there are more than 2**31 scales"


def _why_not_result(
    bias: torch.Tensor | None, out_dtype: torch.dtype | None, b: torch.Tensor, fast_accum: bool
) -> str | None:
    if out_dtype not in OUTPUTS:
        return "the output is not bfloat16, float16 or float32"
    if bias is not None:
        # What PyTorch takes where it has a kernel: no bias beside float32, else one of the output's dtype.
        if bias.dtype is not out_dtype or out_dtype is torch.float32:
            return "PyTorch takes a bias of the output's dtype alone, and none beside float32"
        if bias.numel() != b.shape[1] or bias.device != b.device or is_copy_on_write(bias):
            return "the bias is not one value for each column"
    return "fast accumulation is not for float4" if fast_accum and b.dtype is torch.float4_e2m1fn_x2 else None


def _why_not(
    a: torch.Tensor,
    b: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor],
    layouts: tuple[ScaleLayout, ScaleLayout],
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    fast_accum: bool,
) -> str | None:
    reason = _why_not_matrices(a, b)
    if reason is not None:
        return reason
    k = a.shape[1] * FORMATS[a.dtype].element.packed
    for x, scale, layout, rows in zip((a, b), scales, layouts, (a.shape[0], b.shape[1])):
        reason = reason or _why_not_scale(scale, layout, rows, k, x)
    return reason or _why_not_result(bias, out_dtype, b, fast_accum) or hardware.why_no_triton(a.device)


def _why_not_out(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None
) -> str | None:
    if tuple(out.shape) != (a.shape[0], b.shape[-1]) or out.device != a.device or not out.is_contiguous():
        return "out is not contiguous and of the result's shape"
    if out_dtype is not None and out.dtype is not out_dtype:
        return "out is not of out_dtype"
    return "a tensor is copy-on-write" if is_copy_on_write(out) else None


def _operand(data: torch.Tensor, scale: torch.Tensor, layout: ScaleLayout) -> ScaledTensor:
    """``data`` [rows, K] with its scales as the kernels want them."""
    fmt: Format = FORMATS[data.dtype]
    if layout is ScaleLayout.PLAIN:
        scale = scale.view(data.shape[0], -1)
    return ScaledTensor(data, scale, fmt, layout)


def scaled_mm(
    a: ScaledTensor,
    b: ScaledTensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    out: torch.Tensor | None = None,
    plan: plans.Plan | None = None,
) -> torch.Tensor:
    """``a[M, K] @ b[N, K].T + bias[N]`` of MX operands by the kernels; scales in either layout.

    Args:
        a, b: MXFP8 (e4m3fn or e5m2) or MXFP4, both of as many bits; no extent is 0.
        bias: added in float32 before the one rounding.
        out_dtype: bfloat16, float16 or float32.
        out: where to write, rows contiguous; made by default.
        plan: tiles, in place of the table's.

    Returns:
        [M, N]: exact products of the decoded values (as far as they are normal numbers of bfloat16), summed in float32.
    """
    from octavo.operators.gemm import launch

    m, n = a.shape[0], b.shape[0]
    if out is None:
        out = torch.empty((m, n), dtype=out_dtype, device=a.device)
    work = plans.work_of(a.format, b.format)
    plan = plan or plans.choose(hardware.architecture(a.device), work, m)
    return launch.product(a, b, bias, out, plan)


def measured(a: torch.Tensor, b: torch.Tensor) -> str | None:
    """Why no measurement says that the kernels win, or None; where PyTorch has no kernel there is none to lose to."""
    if hardware.architecture(a.device) in WITHOUT_KERNEL:
        return None
    fmt = FORMATS[a.dtype]
    work, k = plans.work_of(fmt, FORMATS[b.dtype]), a.shape[1] * fmt.element.packed
    return wins.why_not("scaled_mm", a.device, format=work, m=a.shape[0], n=b.shape[1], k=k)


# ---- aten::_scaled_mm_v2 --------------------------------------------------------------------------------------

OTHER_SCALES = "the scales of both operands are not BlockWise1x32, RowWise, or in blocks of 128"


def _fp8_kinds(recipe_a: Sequence[int], recipe_b: Sequence[int]) -> fp8.Kinds | None:
    if len(recipe_a) != 1 or len(recipe_b) != 1:
        return None
    kinds = fp8.RECIPES.get(recipe_a[0], ""), fp8.RECIPES.get(recipe_b[0], "")
    return kinds if kinds in fp8.KINDS else None


def _layouts(swizzles: Sequence[Sequence[int]]) -> tuple[ScaleLayout, ScaleLayout] | None:
    found = [LAYOUTS.get(swizzle[0] if swizzle else 0) for swizzle in swizzles]
    if any(len(swizzle) > 1 for swizzle in swizzles) or found[0] is None or found[1] is None:
        return None
    return found[0], found[1]


def why_not_v2(
    self: torch.Tensor,
    mat2: torch.Tensor,
    scale_a: list[torch.Tensor],
    recipe_a: list[int],
    swizzle_a: list[int],
    scale_b: list[torch.Tensor],
    recipe_b: list[int],
    swizzle_b: list[int],
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
) -> str | None:
    """Why the kernels are not right for a call of ``aten::_scaled_mm_v2``, or None."""
    kinds = _fp8_kinds(recipe_a, recipe_b)
    if kinds is None and (list(recipe_a) != [BLOCKWISE_1X32] or list(recipe_b) != [BLOCKWISE_1X32]):
        return OTHER_SCALES
    if len(scale_a) != 1 or len(scale_b) != 1:
        return "an operand has more than one tensor of scales"
    layouts = _layouts((swizzle_a, swizzle_b))
    if layouts is None or (kinds is not None and any((*swizzle_a, *swizzle_b))):
        return "a swizzle is neither NO_SWIZZLE nor, of MX scales, SWIZZLE_32_4_4"
    if list(contraction_dim) not in ([], [1, 0], [-1, -2], [-1, 0], [1, -2]):
        return "the contraction is not over the last dimension of self and the first of mat2"
    if kinds is not None:
        return fp8.why_not(self, mat2, scale_a[0], scale_b[0], kinds, bias, out_dtype)
    return _why_not(self, mat2, (scale_a[0], scale_b[0]), layouts, bias, out_dtype, use_fast_accum)


def why_not_v2_out(*args: Any, out: torch.Tensor, **kwargs: Any) -> str | None:
    """As ``why_not_v2``, for the overload with ``out``."""
    named = {**dict(zip(_V2, args)), **kwargs}
    named["out_dtype"] = out.dtype if named.get("out_dtype") is None else named["out_dtype"]
    return why_not_v2(**named) or _why_not_out(out, named["self"], named["mat2"], named["out_dtype"])


_V2 = (
    "self", "mat2", "scale_a", "recipe_a", "swizzle_a", "scale_b", "recipe_b", "swizzle_b", "bias", "out_dtype",
    "contraction_dim", "use_fast_accum",
)  # fmt: skip
_V1 = ("self", "mat2", "scale_a", "scale_b", "bias", "scale_result", "out_dtype", "use_fast_accum")


def run_v2(*args: Any, out: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
    """Serve a call of ``aten::_scaled_mm_v2`` that the gate accepted."""
    named = {**dict(zip(_V2, args)), **kwargs}
    kinds = _fp8_kinds(named["recipe_a"], named["recipe_b"])
    if kinds is not None:
        named |= {"scale_a": named["scale_a"][0], "scale_b": named["scale_b"][0]}
        return _run_fp8(named, kinds, out)
    layouts = _layouts((named["swizzle_a"], named["swizzle_b"]))
    assert layouts is not None
    a = _operand(named["self"], named["scale_a"][0], layouts[0])
    b = _operand(named["mat2"].t(), named["scale_b"][0], layouts[1])
    dtype = named.get("out_dtype") if out is None else out.dtype
    assert dtype is not None
    return scaled_mm(a, b, named.get("bias"), dtype, out=out)


def _run_fp8(named: dict[str, Any], kinds: fp8.Kinds, out: torch.Tensor | None) -> torch.Tensor:
    a, mat2, scale_a, scale_b = (named[word] for word in ("self", "mat2", "scale_a", "scale_b"))
    fast_accum = bool(named.get("use_fast_accum"))
    return fp8.run(a, mat2, scale_a, scale_b, kinds, named.get("bias"), fast_accum, out)


def measured_v2(*args: Any, **kwargs: Any) -> str | None:
    """Why no measurement says that the kernels win for a call of ``aten::_scaled_mm_v2``, or None."""
    named = {**dict(zip(_V2, args)), **kwargs}
    kinds = _fp8_kinds(named["recipe_a"], named["recipe_b"])
    if kinds is not None:
        return fp8.measured(named["self"], named["mat2"], kinds, bool(named.get("use_fast_accum")))
    return measured(named["self"], named["mat2"])


# ---- aten::_scaled_mm -----------------------------------------------------------------------------------------


def _layout_of_v1() -> ScaleLayout:
    """What PyTorch's older operator, which cannot be told, takes scales to be."""
    return ScaleLayout.PLAIN if torch.version.hip else ScaleLayout.SWIZZLED_32_4_4


def _kinds_of_v1(
    a: torch.Tensor, mat2: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor
) -> fp8.Kinds | None:
    if scale_a.dtype is not torch.float32 or scale_b.dtype is not torch.float32:
        return None
    return fp8.kinds_of_shapes(a, mat2, scale_a, scale_b)


def why_not_v1(
    self: torch.Tensor,
    mat2: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> str | None:
    """Why the kernels are not right for a call of ``aten::_scaled_mm``, or None."""
    if scale_result is not None:
        return "a scale of the result is asked for"
    kinds = _kinds_of_v1(self, mat2, scale_a, scale_b)
    if kinds is not None:
        return fp8.why_not(self, mat2, scale_a, scale_b, kinds, bias, out_dtype)
    if scale_a.dtype is not torch.float8_e8m0fnu or scale_b.dtype is not torch.float8_e8m0fnu:
        return OTHER_SCALES
    layout = _layout_of_v1()
    return _why_not(self, mat2, (scale_a, scale_b), (layout, layout), bias, out_dtype, use_fast_accum)


def why_not_v1_out(*args: Any, out: torch.Tensor, **kwargs: Any) -> str | None:
    """As ``why_not_v1``, for the overload with ``out``."""
    named = {**dict(zip(_V1, args)), **kwargs}
    named["out_dtype"] = out.dtype if named.get("out_dtype") is None else named["out_dtype"]
    return why_not_v1(**named) or _why_not_out(out, named["self"], named["mat2"], named["out_dtype"])


def run_v1(*args: Any, out: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
    """Serve a call of ``aten::_scaled_mm`` that the gate accepted."""
    named = {**dict(zip(_V1, args)), **kwargs}
    kinds = _kinds_of_v1(*(named[word] for word in _V1[:4]))
    if kinds is not None:
        return _run_fp8(named, kinds, out)
    layout = _layout_of_v1()
    a = _operand(named["self"], named["scale_a"], layout)
    b = _operand(named["mat2"].t(), named["scale_b"], layout)
    dtype = named.get("out_dtype") if out is None else out.dtype
    assert dtype is not None
    return scaled_mm(a, b, named.get("bias"), dtype, out=out)


def measured_v1(*args: Any, **kwargs: Any) -> str | None:
    """Why no measurement says that the kernels win for a call of ``aten::_scaled_mm``, or None."""
    named = {**dict(zip(_V1, args)), **kwargs}
    kinds = _kinds_of_v1(*(named[word] for word in _V1[:4]))
    if kinds is not None:
        return fp8.measured(named["self"], named["mat2"], kinds, bool(named.get("use_fast_accum")))
    return measured(named["self"], named["mat2"])
