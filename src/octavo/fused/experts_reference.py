"""What the producers of the expert MLP compute, step by step; kernels equal this bit for bit but for exp."""

from __future__ import annotations

import torch

from octavo.formats import Format
from octavo.fused.reference import swiglu, swiglu_backward
from octavo.quantize import reference as quantization
from octavo.quantize.grouped import quantize_rows, quantize_transposed

Pair = tuple[torch.Tensor | None, torch.Tensor | None]


def _rows(x: torch.Tensor, offs: torch.Tensor, fmt: Format | None) -> Pair:
    if fmt is None:
        return None, None
    return quantize_rows(x, offs, fmt) if fmt.granularity == "tensorwise" else quantization.quantize(x, fmt)


def _columns(x: torch.Tensor, offs: torch.Tensor, fmt: Format | None, align: int) -> Pair:
    return (None, None) if fmt is None else quantize_transposed(x, offs, fmt, align)


def permute_quantize(
    x: torch.Tensor,
    rows: torch.Tensor | None,
    offs: torch.Tensor,
    fmt: Format | None,
    transposed_fmt: Format | None,
    align: int,
) -> tuple[torch.Tensor | None, ...]:
    """(data, scale) of ``x[rows]`` and of its transpose in padded groups; None where not asked for."""
    x = x if rows is None else x[rows]
    return *_rows(x, offs, fmt), *_columns(x, offs, transposed_fmt, align)


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
) -> tuple[torch.Tensor | None, ...]:
    """Everything in float32; the gradient of h and the scaled activation are rounded once to the dtype of h."""
    act, wide, d_scores = swiglu(h), grad.float(), None
    if scores is not None:
        d_scores = (wide * act).sum(-1)
        act, wide = act * scores[:, None], wide * scores[:, None]
    dh, act = swiglu_backward(h, wide).to(h.dtype), act.to(h.dtype)
    return (
        *_rows(dh, offs, fmt),
        *_columns(dh, offs, transposed_fmt, align),
        *_columns(act, offs, activation_fmt, align),
        d_scores,
        *((dh, act) if keep else (None, None)),
    )


def combine_rows(y: torch.Tensor, back: torch.Tensor, scores: torch.Tensor | None) -> torch.Tensor:
    """One choice after another, so that the order of the sum is fixed."""
    total = torch.zeros((back.shape[0], y.shape[1]), dtype=torch.float32, device=y.device)
    for choice in range(back.shape[1]):
        rows = y[back[:, choice]].float()
        total += rows if scores is None else rows * scores[:, choice, None]
    return total.to(y.dtype)
