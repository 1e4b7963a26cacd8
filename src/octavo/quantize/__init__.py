"""Quantization: signatures, checks, and the table of kernels. The numerics are in :mod:`.reference`."""

from __future__ import annotations

import torch

from octavo import dispatch, hardware, library
from octavo.formats import ALL, Format, ScaledTensor
from octavo.quantize import grouped as _grouped

__all__ = ["alignment", "dequantize", "quantize", "quantize_both", "quantize_grouped"]

INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def quantize(
    x: torch.Tensor, fmt: Format, *, transpose: bool = False, after: torch.Tensor | None = None
) -> ScaledTensor:
    """Quantize ``x`` along its last two dimensions.

    Args:
        x: [..., M, K] float32, bfloat16 or float16, any strides; not modified. Leading dimensions (the
            experts of a weight) keep scales of their own.
        fmt: any format on any device; :func:`octavo.hardware.native_format` gives the device's own.
        transpose: quantize ``x.mT`` instead: data [..., K, M], contiguous, so that a product which contracts
            over M finds it last.
        after: a tensor that must exist before; not read. Backward passes its gradient here when it quantizes a
            weight, since torch.compile's partitioner would otherwise move that into the forward and keep an
            8-bit copy of every weight until backward.

    Returns:
        A :class:`~octavo.ScaledTensor` with plain scale layout. Blocks at the edge may be partial.

    Raises:
        TypeError: for another dtype.
        ValueError: for fewer than two dimensions, or MXFP4 with an odd last dimension.
    """
    _check(x, fmt, transpose)
    data, scale = torch.ops.octavo.quantize(_constant(x), fmt.key, transpose, after)
    return ScaledTensor(data, scale, fmt)


def quantize_both(
    x: torch.Tensor, fmt: Format, transposed_fmt: Format | None = None
) -> tuple[ScaledTensor, ScaledTensor]:
    """``quantize(x, fmt)`` and ``quantize(x, transposed_fmt, transpose=True)`` in as few reads as possible.

    Args and errors as :func:`quantize`; ``transposed_fmt`` defaults to ``fmt``.
    """
    transposed_fmt = transposed_fmt or fmt
    _check(x, fmt, False)
    _check(x, transposed_fmt, True)
    data, scale, data_t, scale_t = torch.ops.octavo.quantize_both(_constant(x), fmt.key, transposed_fmt.key)
    return ScaledTensor(data, scale, fmt), ScaledTensor(data_t, scale_t, transposed_fmt)


def alignment(*formats: Format) -> int:
    """Rows that a group is padded to in the padded group layout: the largest block, and at least 16."""
    return max(16, *(fmt.block[1] for fmt in formats))


def quantize_grouped(
    x: torch.Tensor, offs: torch.Tensor, fmt: Format, *, transpose: bool = False, align: int | None = None
) -> ScaledTensor:
    """Quantize rows that belong to groups, so that no scale is shared by two groups.

    Args:
        x: [M, K] float32, bfloat16 or float16, any strides.
        offs: int32 [G], cumulative group ends, on the device of ``x``; rows past the last end are ignored.
        fmt: as in :func:`quantize`. Tensorwise means one scale a group.
        transpose: give the transpose in the padded group layout: data [K, capacity] with each group padded
            by zeros to a multiple of ``align``; ``group_ends`` holds the padded ends.
        align: multiple of 16 and of the block of ``fmt`` along M; by default :func:`alignment`.

    Returns:
        Without ``transpose`` as :func:`quantize` (tensorwise: scale [M, 1], format rowwise). With it, scale
        [G, K, 1] for rowwise, [G, 1, 1] for tensorwise, else [K, capacity / block].

    Raises:
        ValueError: if ``x`` is no matrix, ``offs`` no int32 vector on its device,
            ``align`` does not fit the block, or blocks of ``fmt`` span rows and ``transpose`` is not asked for.
    """
    check_offs(x, offs)
    # Transposed, groups are padded to a multiple of the block, so an odd number of rows is no obstacle.
    _check(x, fmt, transpose, packs=not transpose)
    x = _constant(x)
    if not transpose:
        if fmt.granularity != "tensorwise":
            if fmt.block[0] != 1:
                raise ValueError(
                    f"{fmt.granularity} blocks span rows, and so groups: quantize rows by tensorwise, rowwise, "
                    "1x128 or 1x32, or take transpose=True"
                )
            check_offs_values(x.shape[0], offs)
            return quantize(x, fmt)
        data, scale = torch.ops.octavo.quantize_groups(x, offs, fmt.key, False, 16)
        return ScaledTensor(data, scale, Format(fmt.element, "rowwise", fmt.rounding))
    align = alignment(fmt) if align is None else align
    block = 1 if fmt.block[1] == ALL else fmt.block[1]
    if align < 16 or align % 16 or align % block:
        raise ValueError(
            f"align={align} must be a positive multiple of 16 and of the {block}-wide blocks of {fmt}"
        )
    data, scale = torch.ops.octavo.quantize_groups(x, offs, fmt.key, True, align)
    return ScaledTensor(data, scale, fmt, group_ends=_grouped.padded_ends(offs, align))


def dequantize(x: ScaledTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """``data * scale`` in float32, rounded once to ``dtype``; [..., M, K].

    Raises:
        ValueError: for a swizzled scale layout or padded groups, which decode block by block elsewhere.
    """
    from octavo.quantize import reference

    if x.group_ends is not None or x.layout.value == "swizzled_32_4_4":
        raise ValueError(f"{x!r} has {x.layout.value} scales or padded groups: dequantize its plain form")
    return reference.dequantize(x.data, x.scale, x.format, dtype)


def _constant(x: torch.Tensor) -> torch.Tensor:
    # Quantized operands have no gradient; inside an autograd Function nothing would record one anyway.
    return x.detach() if torch.is_grad_enabled() and x.requires_grad else x


def _check(x: torch.Tensor, fmt: Format, transpose: bool, packs: bool = True) -> None:
    if x.dtype not in INPUT_DTYPES:
        raise TypeError(f"quantize takes float32, bfloat16 or float16 and got {x.dtype}: cast it first")
    if x.ndim < 2:
        raise ValueError(
            f"quantize takes [..., M, K] and got shape {tuple(x.shape)}: add a dimension, e.g. x.unsqueeze(0)"
        )
    last = x.shape[-2] if transpose else x.shape[-1]
    if packs and last % fmt.element.packed:
        raise ValueError(
            f"{fmt.element.name} packs two elements to a byte and the last dimension is {last}, which is odd: "
            "pad it with zeros"
        )


def check_offs(x: torch.Tensor, offs: torch.Tensor) -> None:
    """ValueError unless ``x`` is a matrix and ``offs`` int32 group ends on its device."""
    if x.ndim != 2:
        raise ValueError(f"grouped rows are a matrix [M, K]; got shape {tuple(x.shape)}")
    if offs.ndim != 1 or offs.dtype != torch.int32 or offs.device != x.device:
        raise ValueError(
            f"offs must be cumulative group ends, int32 [G] on {x.device}; got {offs.dtype} "
            f"{tuple(offs.shape)} on {offs.device}: use sizes.cumsum(0).to(torch.int32)"
        )


def check_offs_values(rows: int, offs: torch.Tensor) -> None:
    """ValueError if group ends decrease or pass ``rows``; on the CPU alone, a GPU would have to synchronise."""
    if offs.device.type == "cpu" and not torch.compiler.is_compiling() and type(offs) is torch.Tensor:
        ends = offs.tolist()
        if any(a > b for a, b in zip([0, *ends], [*ends, rows], strict=True)):
            raise ValueError(f"offs must not decrease nor pass the {rows} rows; got {ends}")


# ---- ops ------------------------------------------------------------------------------------------------


def _fake(x: torch.Tensor, fmt: Format, transpose: bool) -> tuple[torch.Tensor, torch.Tensor]:
    shape = x.mT.shape if transpose else x.shape
    return (
        x.new_empty(fmt.data_shape(shape), dtype=fmt.element.dtype),
        x.new_empty(fmt.scale_shape(shape), dtype=fmt.scale_dtype),
    )


def _fake_groups(
    x: torch.Tensor, offs: torch.Tensor, key: str, transpose: bool, align: int
) -> tuple[torch.Tensor, torch.Tensor]:
    fmt, (rows, cols) = Format.from_key(key), x.shape
    if not transpose:
        return x.new_empty((rows, cols), dtype=fmt.element.dtype), x.new_empty((rows, 1), dtype=torch.float32)
    columns = _grouped.capacity(rows, offs.shape[0], align)
    data = x.new_empty(fmt.data_shape((cols, columns)), dtype=fmt.element.dtype)
    shape = fmt.scale_shape((cols, columns))
    if fmt.block[1] == ALL:
        shape = (offs.shape[0], *shape)
    return data, x.new_empty(shape, dtype=fmt.scale_dtype)


library.define(
    "quantize(Tensor x, str format, bool transpose, Tensor? after=None) -> (Tensor, Tensor)",
    lambda x, key, transpose, after=None: dispatch.run("quantize", x, Format.from_key(key), transpose),
    lambda x, key, transpose, after=None: _fake(x, Format.from_key(key), transpose),
)
library.define(
    "quantize_both(Tensor x, str format, str transposed_format) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda x, key, key_t: dispatch.run("quantize_both", x, Format.from_key(key), Format.from_key(key_t)),
    lambda x, key, key_t: (*_fake(x, Format.from_key(key), False), *_fake(x, Format.from_key(key_t), True)),
)


def _run_groups(
    x: torch.Tensor, offs: torch.Tensor, key: str, transpose: bool, align: int
) -> tuple[torch.Tensor, torch.Tensor]:
    check_offs_values(x.shape[0], offs)
    return dispatch.run("quantize_grouped", x, offs, Format.from_key(key), transpose, align)


library.define(
    "quantize_groups(Tensor x, Tensor offs, str format, bool transpose, int align) -> (Tensor, Tensor)",
    _run_groups,
    _fake_groups,
)

# ---- kernels ----------------------------------------------------------------------------------------------


def _always(*_args: object) -> None:
    return None


def _no_triton(x: torch.Tensor, *_args: object) -> str | None:
    return hardware.why_no_triton(x.device)


def _no_triton_groups(
    x: torch.Tensor, offs: torch.Tensor, fmt: Format, transpose: bool, align: int
) -> str | None:
    if transpose and fmt.block[1] == 1:
        return f"{fmt.granularity} scales of padded groups differ in shape from group to group"
    if offs.shape[0] == 0:
        return "there are no groups"
    return hardware.why_no_triton(x.device)


dispatch.register(
    dispatch.Kernel("quantize", "triton", "octavo.quantize.triton_launch:quantize", _no_triton),
    dispatch.Kernel("quantize_both", "triton", "octavo.quantize.triton_launch:quantize_both", _no_triton),
    dispatch.Kernel(
        "quantize_grouped", "triton", "octavo.quantize.triton_launch:quantize_groups", _no_triton_groups
    ),
    dispatch.Kernel("quantize", "reference", "octavo.quantize.reference:quantize", _always),
    dispatch.Kernel("quantize_both", "reference", "octavo.quantize.reference:quantize_both", _always),
    dispatch.Kernel("quantize_grouped", "reference", "octavo.quantize.grouped:quantize_groups", _always),
)
