"""PyTorch's own scaled products, where they compute exactly what the reference defines.

Each ``why_not`` mirrors what the operator accepts (``torch._scaled_mm``, ``torch._scaled_grouped_mm`` of
PyTorch 2.11 to 2.14); what it wants of sizes is padded here, what it wants of scales is laid out here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from octavo import hardware
from octavo.formats import Format, ScaledTensor

_MULTIPLE = 16
_ROW = ("rowwise", "tensorwise")
_BLOCKS = (("1x128", "128x128"), ("1x128", "1x128"), ("128x128", "1x128"))


def why_not_scaled_mm(
    a: ScaledTensor, b: ScaledTensor, bias: torch.Tensor | None, out_dtype: torch.dtype, fast_accum: bool
) -> str | None:
    """Why ``torch._scaled_mm`` cannot serve these operands, or None."""
    return (
        _why_not_device(a, b)
        or _why_not_formats(a.format, b.format, hardware.architecture(a.device))
        or _why_not_output(a, b, out_dtype)
        or _why_not_size(a, b)
    )


def _why_not_device(a: ScaledTensor, b: ScaledTensor) -> str | None:
    arch = hardware.architecture(a.device)
    if arch not in hardware.FP8_MATMUL_ARCHITECTURES:
        return f"no native FP8 product on {arch}"
    family = hardware.fp8_family(a.device)
    for x in (a, b):
        if x.format.with_family(family) != x.format:
            return f"{x.format.element.name} is not the FP8 type of {arch}"
    return None


def _why_not_formats(a: Format, b: Format, arch: str) -> str | None:
    if a.is_mx or b.is_mx:
        return "MX products go through kernels of our own: torch accepts other scale layouts on each card"
    if a.element.name.startswith("e5m2") and b.element.name.startswith("e5m2"):
        return "no product of two e5m2 operands"
    pair = (a.granularity, b.granularity)
    if pair[0] in _ROW and pair[1] in _ROW:
        if b.element.name.startswith("e5m2") and pair != ("tensorwise", "tensorwise"):
            return "the second operand must be e4m3 unless both have one scale"
        return None
    if pair in _BLOCKS:
        return None if arch == "sm_90" else f"128-blocks are served on sm_90 alone, not on {arch}"
    return f"no product of {pair[0]} by {pair[1]} scales"


def _is_tensorwise(a: ScaledTensor, b: ScaledTensor) -> bool:
    return a.format.granularity == b.format.granularity == "tensorwise"


def _why_not_output(a: ScaledTensor, b: ScaledTensor, out_dtype: torch.dtype) -> str | None:
    if out_dtype == torch.bfloat16 or (_is_tensorwise(a, b) and out_dtype in (torch.float16, torch.float32)):
        return None
    return f"no {out_dtype} output with {a.format.granularity} scales"


def _why_not_size(a: ScaledTensor, b: ScaledTensor) -> str | None:
    if 0 in (a.shape[0], b.shape[0], a.shape[1]):
        return "an extent is zero"
    # cuBLAS reads a column of 128x128 scales as if it were padded to a multiple of 4, and computes nonsense if not.
    blocks = -(-a.shape[1] // 128)
    if "128x128" in (a.format.granularity, b.format.granularity) and blocks % 4:
        return f"128x128 scales need a multiple of 4 blocks along K, not {blocks}"
    # A column of 1x128 scales is as long as the rows and must start at a multiple of 16 bytes; b's rows are padded.
    if a.format.granularity == "1x128" and a.shape[0] % 4:
        return f"1x128 scales need a multiple of 4 rows, not {a.shape[0]}"
    return None


def scaled_mm(
    a: ScaledTensor, b: ScaledTensor, bias: torch.Tensor | None, out_dtype: torch.dtype, fast_accum: bool
) -> torch.Tensor:
    """``a[M, K] @ b[N, K].T + bias[N]`` by ``torch._scaled_mm``, operands padded with zeros to what it takes."""
    m, n = a.shape[0], b.shape[0]
    blocks = a.format.granularity not in _ROW
    k_multiple = 128 if blocks else _MULTIPLE
    a_data, b_data = _pad(a.data, k_multiple), _pad(b.data, k_multiple, _MULTIPLE)
    a_scale, b_scale = (_block_scales if blocks else _row_scales)(a, b, b_data.shape[0])
    # A float32 bias or a bias beside a float32 output is not taken by the operator: add it after.
    inner_bias = bias if out_dtype == torch.bfloat16 and b_data.shape[0] == n else None
    out = torch._scaled_mm(
        a_data, b_data.t(), a_scale, b_scale, bias=inner_bias, out_dtype=out_dtype, use_fast_accum=fast_accum
    )
    out = out[:m, :n]
    return out if bias is inner_bias else out + bias


def _pad(data: torch.Tensor, k_multiple: int, row_multiple: int = 1) -> torch.Tensor:
    rows, k = (-data.shape[0] % row_multiple, -data.shape[1] % k_multiple)
    if not rows and not k:
        return data.contiguous()
    return F.pad(data.view(torch.uint8), (0, k, 0, rows)).view(data.dtype)


def _row_scales(a: ScaledTensor, b: ScaledTensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    if _is_tensorwise(a, b):
        return a.scale.reshape(()), b.scale.reshape(())
    return a.scale.expand(a.shape[0], 1).contiguous(), _rows(b.scale, n).t()


def _rows(scale: torch.Tensor, n: int) -> torch.Tensor:
    """[n, 1] contiguous: one scale repeated, or a vector padded with ones."""
    if scale.shape[0] == 1:
        return scale.expand(n, 1).contiguous()
    return F.pad(scale, (0, 0, 0, n - scale.shape[0]), value=1.0)


def _block_scales(a: ScaledTensor, b: ScaledTensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    def outer_major(x: ScaledTensor, rows: int) -> torch.Tensor:
        if x.format.granularity == "128x128":
            return x.scale.contiguous()
        padded = F.pad(x.scale, (0, 0, 0, rows - x.scale.shape[0]), value=1.0)
        return padded.t().contiguous().t()

    return outer_major(a, a.shape[0]), outer_major(b, n).t()


def why_not_scaled_grouped_mm(
    a: ScaledTensor,
    b: ScaledTensor,
    offs: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> str | None:
    """Why ``torch._scaled_grouped_mm`` cannot serve these operands, or None."""
    arch = hardware.architecture(a.device)
    if arch not in ("sm_90", "gfx942", "gfx950"):
        return f"no native grouped FP8 product on {arch}"
    if arch == "sm_90" and fast_accum and hardware.has_triton():
        return "measured slower than the Triton kernel on sm_90 with fast accumulation (docs/measured.md)"
    if a.format.granularity != "rowwise" or b.format.granularity != "rowwise":
        return f"rowwise scales alone, not {a.format.granularity} by {b.format.granularity}"
    if not (a.format.element.name.startswith("e4m3") and b.format.element.name.startswith("e4m3")):
        return f"e4m3 alone, not {a.format.element.name} by {b.format.element.name}"
    if bias is not None:
        return "no bias"
    if out_dtype != torch.bfloat16:
        return f"no {out_dtype} output"
    if a.shape[-1] % _MULTIPLE or b.shape[-2] % _MULTIPLE or 0 in (*a.shape, *b.shape, *offs.shape):
        return f"sizes must be multiples of {_MULTIPLE} and not zero"
    return _why_not_device(a, b)


def scaled_grouped_mm(
    a: ScaledTensor,
    b: ScaledTensor,
    offs: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> torch.Tensor:
    """Both grouped products by ``torch._scaled_grouped_mm``; rows past the last end are set to zero."""
    out = torch._scaled_grouped_mm(
        a.data, b.data.mT, a.scale.flatten(), b.scale.squeeze(-1) if b.ndim == 3 else b.scale.flatten(),
        offs=offs, out_dtype=out_dtype, use_fast_accum=fast_accum,
    )  # fmt: skip
    if b.ndim == 3:
        return _zero_tail(out, offs)
    return _zero_empty_groups(out, offs)


def why_not_grouped_mm(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, bias: torch.Tensor | None
) -> str | None:
    """Why ``torch._grouped_mm`` cannot serve these operands, or None."""
    if a.device.type != "cuda":
        return "the loop over groups is as fast on the CPU"
    if a.dtype != torch.bfloat16:
        return f"bfloat16 alone, not {a.dtype}"
    if bias is not None:
        return "no bias"
    # Over groups the contraction may be anything; elsewhere all three extents are rows in memory.
    extents = (a.shape[0], b.shape[0]) if b.ndim == 2 else (a.shape[1], b.shape[1])
    if any(size % 8 or size == 0 for size in extents) or 0 in (*a.shape, *offs.shape):
        return "sizes must be multiples of 8 and not zero"
    return None


def grouped_mm(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Both grouped products by ``torch._grouped_mm``; rows past the last end and empty groups are zero."""
    if b.ndim == 3:
        # The operator takes either order of the last two dimensions: no weight is copied for a transposed one.
        weight = b if b.is_contiguous() or b.mT.is_contiguous() else b.contiguous()
        out = torch._grouped_mm(a.contiguous(), weight.mT, offs=offs)
        return _zero_tail(out, offs)
    # With the rows of the groups outermost in memory: a contraction that is contiguous would have to end each
    # group at a multiple of 16 bytes, which the operator checks by an assertion on the device.
    out = torch._grouped_mm(a.mT.contiguous().mT, b.mT.contiguous(), offs=offs)
    return _zero_empty_groups(out, offs)


def _zero_tail(out: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """``out`` [M, N] with zeros past the last end, which the operator leaves as the memory was."""
    if out.is_contiguous() and hardware.why_no_triton(out.device) is None:
        from octavo.matmul import zero_launch

        return zero_launch.zero_tail(out, offs)
    dead = torch.arange(out.shape[0], device=out.device) >= offs[-1]
    return out.masked_fill_(dead[:, None], 0)


def _zero_empty_groups(out: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """``out`` [G, N, K] with zeros for groups without rows, which the operator leaves as the memory was."""
    if out.is_contiguous() and hardware.why_no_triton(out.device) is None:
        from octavo.matmul import zero_launch

        return zero_launch.zero_empty_groups(out, offs)
    sizes = torch.diff(offs, prepend=offs.new_zeros(1))
    return out.masked_fill_((sizes == 0)[:, None, None], 0)


def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, K] @ b [N, K].T by ``torch.mm``."""
    return torch.mm(a, b.t())
