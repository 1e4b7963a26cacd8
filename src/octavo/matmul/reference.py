"""Matrix products of quantized operands, defined: decode to float32, multiply, add the bias, round once."""

from __future__ import annotations

import torch

from octavo.formats import ALL, ScaledTensor
from octavo.quantize import reference as quantization
from octavo.quantize.grouped import group_bounds


def _decode(x: ScaledTensor) -> torch.Tensor:
    return quantization.dequantize(x.data, x.scale, x.format, torch.float32)


def scaled_mm(
    a: ScaledTensor, b: ScaledTensor, bias: torch.Tensor | None, out_dtype: torch.dtype, fast_accum: bool
) -> torch.Tensor:
    """``a[M, K] @ b[N, K].T + bias[N]``; always accumulates in float32."""
    return _finish(_multiply(_decode(a), _decode(b)), bias, out_dtype)


def _multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b.T`` without TF32, which the user's matmul precision may allow for float32 on a GPU."""
    if a.dtype == torch.float32 and a.is_cuda and torch.get_float32_matmul_precision() != "highest":
        return (a.double() @ b.double().T).float()
    return a @ b.T


def _finish(out: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    if bias is None:
        return out.to(out_dtype)
    wide = torch.promote_types(out.dtype, torch.float32)
    return (out.to(wide) + bias.to(wide)).to(out_dtype)


def scaled_grouped_mm(
    a: ScaledTensor,
    b: ScaledTensor,
    offs: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> torch.Tensor:
    """Rows by expert: ``a[M, K]``, ``b[G, N, K]`` -> [M, N]; over groups: ``a[N, C]``, ``b[K, C]`` -> [G, N, K].

    Reads the group ends on the host.
    """
    if b.ndim == 2:
        out = torch.zeros((offs.shape[0], a.shape[0], b.shape[0]), dtype=out_dtype, device=a.device)
        for group, (start, end) in enumerate(group_bounds(offs)):
            out[group] = _multiply(_group(a, group, start, end), _group(b, group, start, end))
        return out
    return grouped_rows(_decode(a), _decode(b), offs, bias, out_dtype)


def _group(x: ScaledTensor, index: int, start: int, end: int) -> torch.Tensor:
    """float32 columns [start, end) of an operand in the padded group layout."""
    packed, block = x.format.element.packed, x.format.block[1]
    data = x.data[:, start // packed : end // packed]
    scale = x.scale[index] if block == ALL else x.scale[:, start // block : end // block]
    return quantization.dequantize(data, scale, x.format, torch.float32)


def grouped_rows(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """``a[rows of g] @ b[g].T + bias[g]`` for each group; rows past the last end are zero."""
    out = a.new_zeros((a.shape[0], b.shape[1]), dtype=out_dtype)
    for group, (start, end) in enumerate(group_bounds(offs)):
        if start < end:
            row_bias = None if bias is None else bias[group]
            out[start:end] = _finish(_multiply(a[start:end], b[group]), row_bias, out_dtype)
    return out


def grouped_mm(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """The same two products of high-precision operands, in their dtype."""
    if b.ndim == 3:
        return grouped_rows(a, b, offs, bias, a.dtype)
    out = a.new_zeros((offs.shape[0], a.shape[0], b.shape[0]))
    for group, (start, end) in enumerate(group_bounds(offs)):
        out[group] = _multiply(a[:, start:end], b[:, start:end])
    return out
