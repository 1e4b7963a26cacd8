"""Producers of the expert MLP: rows are permuted, activated and combined where they are quantized or summed.

Shape letters: T tokens, k experts a token is sent to, R = T k rows in the order of the experts, G experts, D model
width, F width of an expert. ``offs`` int32 [G] are the cumulative ends of the experts' rows on the device; rows
past the last end belong to no expert. None of these functions has gradients of its own:
:mod:`octavo.training.expert_spanning` calls them on both ways.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from octavo import dispatch, hardware, library
from octavo.formats import ALL, Format, ScaledTensor
from octavo.fused import swiglu_quantize
from octavo.fused.reference import swiglu
from octavo.quantize import check_offs_values, quantize_grouped
from octavo.quantize import grouped as _grouped

__all__ = ["combine_rows", "permute_quantize", "swiglu_backward_rows", "swiglu_quantize_rows"]

Operand = ScaledTensor | None


def permute_quantize(
    x: torch.Tensor,
    rows: torch.Tensor | None,
    offs: torch.Tensor,
    fmt: Format | None,
    transposed_fmt: Format | None,
    align: int,
) -> tuple[Operand, Operand]:
    """``quantize_grouped(x[rows], offs, ...)`` as the rows lie and transposed, without writing ``x[rows]`` wide.

    Args:
        x: [T, D] float32, bfloat16 or float16.
        rows: int64 [R], the row of ``x`` that each row of the output is; None: x as it lies, R = T.
        offs: int32 [G].
        fmt: of the rows [R, D], or None. Blocks within a row are computed once a token and their codes are
            permuted; tensorwise means one scale an expert.
        transposed_fmt: of the transpose [D, capacity] in padded groups, or None.
        align: of the padded groups, as :func:`octavo.quantize.quantize_grouped`.

    Returns:
        The operands asked for, bit for bit those of ``quantize_grouped``. Rows past the last end hold anything.
    """
    data, scale, data_t, scale_t = torch.ops.octavo.permute_quantize(
        x, rows, offs, _key(fmt), _key(transposed_fmt), align
    )
    return _rows_operand(data, scale, fmt), _columns_operand(data_t, scale_t, transposed_fmt, offs, align)


def swiglu_quantize_rows(h: torch.Tensor, offs: torch.Tensor, fmt: Format) -> ScaledTensor:
    """``silu(gate) * up`` of the experts' rows h = [gate | up] [R, 2 F], quantized: [R, F], tensorwise an expert."""
    if fmt.granularity == "tensorwise":
        return quantize_grouped(swiglu(h).to(h.dtype), offs, fmt)
    return swiglu_quantize(h, fmt)


def swiglu_backward_rows(
    h: torch.Tensor,
    grad: torch.Tensor,
    scores: torch.Tensor | None,
    offs: torch.Tensor,
    fmt: Format | None,
    transposed_fmt: Format | None,
    activation_fmt: Format | None,
    align: int,
    *,
    keep: bool = False,
) -> tuple[Operand, Operand, Operand, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Backward of ``scores * silu(gate) * up`` over the experts' rows, with its outputs quantized.

    The router's weight stands behind the down projection, which is linear: it may as well multiply the activation.
    So its gradient is a product of what is at hand here, and no output of an expert is saved for it.

    Args:
        h: [R, 2 F] = [gate | up].
        grad: [R, F], gradient of ``scores * activation``.
        scores: float32 [R], the router's weight of each row; None: all one.
        offs: int32 [G].
        fmt: of the gradient of ``h`` [R, 2 F], or None.
        transposed_fmt: of its transpose [2 F, capacity] in padded groups, or None.
        activation_fmt: of the transpose of ``scores * activation`` [F, capacity] in padded groups, or None.
        align: of the padded groups.
        keep: also return the two in the dtype of ``h``; empty otherwise.

    Returns:
        The gradient of h as it lies and transposed, the transposed activation, the gradient of ``scores`` float32
        [R] (empty without them), and the gradient [R, 2 F] and the activation [R, F] in the dtype of ``h``.
    """
    out = torch.ops.octavo.swiglu_backward_rows(
        h, grad, scores, offs, _key(fmt), _key(transposed_fmt), _key(activation_fmt), align, keep
    )
    return (
        _rows_operand(out[0], out[1], fmt),
        _columns_operand(out[2], out[3], transposed_fmt, offs, align),
        _columns_operand(out[4], out[5], activation_fmt, offs, align),
        *out[6:],
    )


def combine_rows(y: torch.Tensor, back: torch.Tensor, scores: torch.Tensor | None) -> torch.Tensor:
    """``sum over j of scores[t, j] * y[back[t, j]]``, in float32 in the order of j, rounded once.

    Args:
        y: [R, D].
        back: int64 [T, k], the row of each token's choice.
        scores: float32 [T, k]; None: all one.

    Returns:
        [T, D] in the dtype of ``y``.
    """
    return torch.ops.octavo.combine_rows(y, back, scores)


def _key(fmt: Format | None) -> str:
    return "" if fmt is None else fmt.key


def _format(key: str) -> Format | None:
    return Format.from_key(key) if key else None


def _rows_operand(data: torch.Tensor, scale: torch.Tensor, fmt: Format | None) -> Operand:
    if fmt is None:
        return None
    # One scale an expert is spread over its rows.
    spread = Format(fmt.element, "rowwise", fmt.rounding) if fmt.granularity == "tensorwise" else fmt
    return ScaledTensor(data, scale, spread)


def _columns_operand(
    data: torch.Tensor, scale: torch.Tensor, fmt: Format | None, offs: torch.Tensor, align: int
) -> Operand:
    if fmt is None:
        return None
    return ScaledTensor(data, scale, fmt, group_ends=_grouped.padded_ends(offs, align))


# ---- ops ------------------------------------------------------------------------------------------------
# An op's outputs are fixed in number: one that was not asked for is an empty tensor.


def _filled(like: torch.Tensor, outputs: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(like.new_empty(0) if out is None else out for out in outputs)


def _fake_rows(x: torch.Tensor, shape: tuple[int, int], key: str) -> tuple[torch.Tensor, ...]:
    fmt = _format(key)
    if fmt is None:
        return x.new_empty(0), x.new_empty(0)
    scale = (shape[0], 1) if fmt.granularity == "tensorwise" else fmt.scale_shape(shape)
    return (
        x.new_empty(fmt.data_shape(shape), dtype=fmt.element.dtype),
        x.new_empty(scale, dtype=fmt.scale_dtype),
    )


def _fake_columns(
    x: torch.Tensor, shape: tuple[int, int], offs: torch.Tensor, key: str, align: int
) -> tuple[torch.Tensor, ...]:
    fmt = _format(key)
    if fmt is None:
        return x.new_empty(0), x.new_empty(0)
    padded = (shape[1], _grouped.capacity(shape[0], offs.shape[0], align))
    scale = fmt.scale_shape(padded)
    if fmt.block[1] == ALL:
        scale = (offs.shape[0], *scale)
    return (
        x.new_empty(fmt.data_shape(padded), dtype=fmt.element.dtype),
        x.new_empty(scale, dtype=fmt.scale_dtype),
    )


def _fake_permute(
    x: torch.Tensor, rows: torch.Tensor | None, offs: torch.Tensor, key: str, key_t: str, align: int
) -> tuple[torch.Tensor, ...]:
    shape = (x.shape[0] if rows is None else rows.shape[0], x.shape[1])
    return *_fake_rows(x, shape, key), *_fake_columns(x, shape, offs, key_t, align)


def _fake_backward(
    h: torch.Tensor,
    grad: torch.Tensor,
    scores: torch.Tensor | None,
    offs: torch.Tensor,
    key: str,
    key_t: str,
    key_a: str,
    align: int,
    keep: bool,
) -> tuple[torch.Tensor, ...]:
    (r, n), f = h.shape, grad.shape[1]
    return (
        *_fake_rows(h, (r, n), key),
        *_fake_columns(h, (r, n), offs, key_t, align),
        *_fake_columns(h, (r, f), offs, key_a, align),
        h.new_empty(0 if scores is None else r, dtype=torch.float32),
        *((h.new_empty((r, n)), h.new_empty((r, f))) if keep else (h.new_empty(0), h.new_empty(0))),
    )


def _run_permute(
    x: torch.Tensor, rows: torch.Tensor | None, offs: torch.Tensor, key: str, key_t: str, align: int
) -> tuple[torch.Tensor, ...]:
    check_offs_values(x.shape[0] if rows is None else rows.shape[0], offs)
    outputs = dispatch.run("permute_quantize", x, rows, offs, _format(key), _format(key_t), align)
    return _filled(x, outputs)


library.define(
    "permute_quantize(Tensor x, Tensor? rows, Tensor offs, str format, str transposed_format, int align) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _run_permute,
    _fake_permute,
)
library.define(
    "swiglu_backward_rows(Tensor h, Tensor grad, Tensor? scores, Tensor offs, str format, str transposed_format, "
    "str activation_format, int align, bool keep) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    lambda h, grad, scores, offs, key, key_t, key_a, align, keep: _filled(
        h,
        dispatch.run(
            "swiglu_backward_rows",
            h,
            grad,
            scores,
            offs,
            _format(key),
            _format(key_t),
            _format(key_a),
            align,
            keep,
        ),
    ),
    _fake_backward,
)
library.define(
    "combine_rows(Tensor y, Tensor back, Tensor? scores) -> Tensor",
    lambda *args: dispatch.run("combine_rows", *args),
    lambda y, back, scores: y.new_empty((back.shape[0], y.shape[1])),
)

# ---- kernels ----------------------------------------------------------------------------------------------


def _no_triton(x: torch.Tensor, *_args: object) -> str | None:
    return hardware.why_no_triton(x.device)


def _why_not_groups(x: torch.Tensor, offs: torch.Tensor, columns: Sequence[Format | None]) -> str | None:
    if offs.shape[0] == 0:
        return "there are no experts"
    if any(fmt is not None and fmt.block[1] == 1 for fmt in columns):
        return "columnwise scales of padded groups differ in shape from group to group"
    return hardware.why_no_triton(x.device)


def _why_not_permute(
    x: torch.Tensor,
    rows: torch.Tensor | None,
    offs: torch.Tensor,
    fmt: Format | None,
    transposed_fmt: Format | None,
    align: int,
) -> str | None:
    return _why_not_groups(x, offs, (transposed_fmt,))


def _why_not_backward(
    h: torch.Tensor,
    grad: torch.Tensor,
    scores: torch.Tensor | None,
    offs: torch.Tensor,
    fmt: Format | None,
    transposed_fmt: Format | None,
    activation_fmt: Format | None,
    align: int,
    keep: bool,
) -> str | None:
    return _why_not_groups(h, offs, (transposed_fmt, activation_fmt))


_OPS = {
    "permute_quantize": _why_not_permute,
    "swiglu_backward_rows": _why_not_backward,
    "combine_rows": _no_triton,
}
for _op, _why_not in _OPS.items():
    dispatch.register(
        dispatch.Kernel(_op, "triton", f"octavo.fused.experts_launch:{_op}", _why_not),
        dispatch.Kernel(_op, "reference", f"octavo.fused.experts_reference:{_op}", lambda *_: None),
    )
