"""Launches of the expert MLP's producers: what is new here in one kernel each, quantization by its own kernels."""

from __future__ import annotations

import torch

from octavo.formats import Format
from octavo.fused import experts_kernels as kernels
from octavo.launch import launch
from octavo.quantize import triton_launch

Tensors = tuple[torch.Tensor | None, ...]

BLOCK_R, BLOCK_F, BACKWARD_WARPS = 4, 512, 8
BLOCK_T, BLOCK_D, COMBINE_WARPS = 4, 512, 4
"""Tiles that hold a few kilobytes a warp whatever the sizes, so that no token count chooses another kernel."""


def permute_quantize(
    x: torch.Tensor,
    rows: torch.Tensor | None,
    offs: torch.Tensor,
    fmt: Format | None,
    transposed_fmt: Format | None,
    align: int,
) -> Tensors:
    """Kernel of ``octavo::permute_quantize``: tokens are quantized once and their codes permuted."""
    by_expert = fmt is not None and fmt.granularity == "tensorwise"
    wide = x
    if rows is not None and (by_expert or transposed_fmt is not None):
        wide = x.index_select(0, rows)
    if fmt is None:
        direct: Tensors = (None, None)
    elif by_expert or rows is None:
        direct = _rows(wide, offs, fmt)
    else:
        direct = tuple(_take(t, rows) for t in triton_launch.quantize(x, fmt, False))
    return *direct, *_columns(wide, offs, transposed_fmt, align)


def _rows(x: torch.Tensor, offs: torch.Tensor, fmt: Format | None) -> Tensors:
    if fmt is None:
        return None, None
    if fmt.granularity == "tensorwise":
        return triton_launch.quantize_groups(x, offs, fmt, False, 16)
    return triton_launch.quantize(x, fmt, False)


def _columns(x: torch.Tensor, offs: torch.Tensor, fmt: Format | None, align: int) -> Tensors:
    return (None, None) if fmt is None else triton_launch.quantize_groups(x, offs, fmt, True, align)


def _take(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``x[rows]`` of codes or scales, in the widest elements that fill a row: narrow types have no index_select."""
    size = x.shape[1] * x.element_size()
    width = next(w for w in (torch.int64, torch.int32, torch.int16, torch.uint8) if size % w.itemsize == 0)
    return x.view(torch.uint8).view(width).index_select(0, rows).view(torch.uint8).view(x.dtype)


def swiglu_backward_rows(
    h: torch.Tensor,
    grad: torch.Tensor,
    scores: torch.Tensor | None,
    offs: torch.Tensor,
    fmt: Format | None,
    transposed_fmt: Format | None,
    activation_fmt: Format | None,
    align: int,
    keep: bool,
) -> Tensors:
    """Kernel of ``octavo::swiglu_backward_rows``: the values in 16 bits from one read, then their codes."""
    h, grad = (t if t.stride(1) == 1 else t.contiguous() for t in (h, grad))
    rows, columns = grad.shape
    wants_dh = keep or fmt is not None or transposed_fmt is not None
    wants_act = keep or activation_fmt is not None
    dh = h.new_empty((rows, 2 * columns)) if wants_dh else None
    act = h.new_empty((rows, columns)) if wants_act else None
    d_scores = None if scores is None else scores.new_empty(rows)
    if rows:
        with triton_launch.on_device(h.device):
            launch(
                kernels.swiglu_backward_rows, (-(-rows // BLOCK_R),),
                (h, grad, scores, dh, act, d_scores, rows, columns, h.stride(0), grad.stride(0)),
                {"SCORED": scores is not None, "DH": wants_dh, "ACT": wants_act, "BLOCK_R": BLOCK_R,
                 "BLOCK_F": BLOCK_F},
                BACKWARD_WARPS,
            )  # fmt: skip
    direct, turned, activation = (None, None), (None, None), (None, None)
    if dh is not None:
        direct, turned = _rows(dh, offs, fmt), _columns(dh, offs, transposed_fmt, align)
    if act is not None:
        activation = _columns(act, offs, activation_fmt, align)
    return *direct, *turned, *activation, d_scores, *((dh, act) if keep else (None, None))


def combine_rows(y: torch.Tensor, back: torch.Tensor, scores: torch.Tensor | None) -> torch.Tensor:
    """Kernel of ``octavo::combine_rows``."""
    y = y if y.stride(1) == 1 else y.contiguous()
    (tokens, choices), columns = back.shape, y.shape[1]
    out = y.new_empty((tokens, columns))
    if out.numel():
        tiles_d = -(-columns // BLOCK_D)
        with triton_launch.on_device(y.device):
            launch(
                kernels.combine_rows, (-(-tokens // BLOCK_T) * tiles_d,),
                (y, back.contiguous(), None if scores is None else scores.contiguous(), out, tokens, columns,
                 y.stride(0), choices, tiles_d),
                {"SCORED": scores is not None, "BLOCK_T": BLOCK_T, "BLOCK_D": BLOCK_D},
                COMBINE_WARPS,
            )  # fmt: skip
    return out
