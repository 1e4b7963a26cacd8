"""Matrix products: one canonical form, ``a[M, K] @ b[N, K].T``, contraction last on both sides.

Forward, grad_input and grad_weight are this same call, because FP8 matrix instructions want both operands
contraction last. Signatures and checks are here, the meaning in :mod:`.reference`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from octavo import dispatch, library
from octavo.formats import Format, ScaledTensor, ScaleLayout
from octavo.quantize import alignment, check_offs, check_offs_values

__all__ = ["grouped_mm", "register_flop_formulas", "scaled_grouped_mm", "scaled_mm"]

OUTPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def scaled_mm(
    a: ScaledTensor,
    b: ScaledTensor,
    *,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = False,
) -> torch.Tensor:
    """``a[M, K] @ b[N, K].T + bias[N]`` of quantized operands.

    Args:
        a, b: any two formats on one device; K may be anything, zero included (the product is then the bias).
        bias: [N], in ``out_dtype``.
        out_dtype: bfloat16, float16 or float32.
        fast_accum: allow the accumulator of Hopper's FP8 instructions (about 14 bits). A permission: kernels
            that always accumulate in float32 ignore it.

    Returns:
        [M, N] in ``out_dtype``, within 50 dB SQNR of :func:`octavo.matmul.reference.scaled_mm`.

    Raises:
        ValueError: if shapes, devices, ``bias`` or ``out_dtype`` do not fit.
    """
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(
            f"scaled_mm multiplies a[M, K] by b[N, K] transposed; got a {tuple(a.shape)} and b {tuple(b.shape)}: "
            "both must be matrices with the contraction last"
        )
    for operand in (a, b):
        _check_plain(operand)
    _check_common(a, b, bias, (b.shape[0],), out_dtype)
    return torch.ops.octavo.scaled_mm(
        a.data, a.scale, a.format.key, b.data, b.scale, b.format.key, bias, out_dtype, fast_accum
    )


def scaled_grouped_mm(
    a: ScaledTensor,
    b: ScaledTensor,
    offs: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = False,
) -> torch.Tensor:
    """Grouped product of quantized operands, in one of two forms.

    * rows by expert: ``a[M, K]``, ``b[G, N, K]``, ``offs`` int32 [G] -> [M, N]; rows past ``offs[-1]`` are
      zero, ``bias`` is [G, N];
    * over groups: ``a[N, C]`` and ``b[K, C]`` from ``quantize_grouped(..., transpose=True)`` with the same
      ``align`` -> [G, N, K], exactly zero for empty groups; their ``group_ends`` are used, and ``offs`` if given
      must be those.

    Raises:
        ValueError: if shapes, devices, ``offs``, ``bias`` or ``out_dtype`` do not fit.
    """
    offs = _over_groups(a, b, offs, bias) if b.ndim == 2 else _by_expert(a, b, offs)
    check_offs(a.data, offs)
    _check_common(a, b, bias, (b.shape[0], b.shape[-2]), out_dtype)
    return torch.ops.octavo.scaled_grouped_mm(
        a.data, a.scale, a.format.key, b.data, b.scale, b.format.key, offs, bias, out_dtype, fast_accum
    )


def _over_groups(
    a: ScaledTensor, b: ScaledTensor, offs: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    ends = a.group_ends
    if ends is None or b.group_ends is None or bias is not None or a.shape[-1] != b.shape[-1] or a.ndim != 2:
        raise ValueError(
            "a grouped product of two matrices contracts over groups: both operands must come from "
            "quantize_grouped(..., transpose=True) with the same align, and it takes no bias; got "
            f"{a!r} and {b!r}"
        )
    if (
        offs is not None
        and offs is not ends
        and not (_readable(offs) and _readable(ends) and torch.equal(offs, ends))
    ):
        raise ValueError(
            "over groups the padded ends of the operands are used: leave offs out, or pass a.group_ends"
        )
    return ends


def _by_expert(a: ScaledTensor, b: ScaledTensor, offs: torch.Tensor | None) -> torch.Tensor:
    fits = a.ndim == 2 and b.ndim == 3 and a.shape[-1] == b.shape[-1]
    if offs is None or not fits or a.group_ends is not None or b.shape[0] != offs.shape[0]:
        raise ValueError(
            "scaled_grouped_mm takes a[M, K], b[G, N, K] and offs[G], the cumulative group ends; got "
            f"a {tuple(a.shape)}{' in padded groups' if a.group_ends is not None else ''}, b {tuple(b.shape)}, offs "
            f"{None if offs is None else tuple(offs.shape)}"
        )
    for operand in (a, b):
        _check_plain(operand)
    if _readable(offs):
        check_offs_values(a.shape[0], offs)
    return offs


def _readable(x: torch.Tensor) -> bool:
    """Whether values can be read without a synchronisation or a guard."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and type(x) is torch.Tensor


def _check_plain(x: ScaledTensor) -> None:
    needed = x.format.scale_shape(x.shape)
    if x.group_ends is not None or x.layout is ScaleLayout.SWIZZLED_32_4_4 or tuple(x.scale.shape) != needed:
        raise ValueError(
            f"an operand of shape {tuple(x.shape)} in {x.format} needs plain scales {needed}; got {x!r} with scales "
            f"{tuple(x.scale.shape)}{' in padded groups' if x.group_ends is not None else ''}"
        )


def grouped_mm(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, *, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """High-precision grouped product: ``a[M, K]``, ``b[G, N, K]`` -> [M, N], or ``a[N, M]``, ``b[K, M]`` -> [G, N, K].

    Args:
        offs: int32 [G] cumulative group ends along M; rows past the last are zero in the output.
        bias: [G, N] in the first form.

    Raises:
        ValueError: if shapes, dtypes or ``offs`` do not fit.
    """
    check_offs(a, offs)
    fits = a.shape[-1] == b.shape[-1] and (b.ndim == 2 or (b.ndim == 3 and b.shape[0] == offs.shape[0]))
    if not fits or a.dtype != b.dtype:
        raise ValueError(
            f"grouped_mm takes a[M, K], b[G, N, K] or a[N, M], b[K, M] of one dtype with offs[G]; got "
            f"a {tuple(a.shape)} {a.dtype}, b {tuple(b.shape)} {b.dtype}, offs {tuple(offs.shape)}"
        )
    if b.ndim == 2 and bias is not None:
        raise ValueError(
            "grouped_mm over groups, a[N, M] and b[K, M], takes no bias: add it to the rows' product"
        )
    _check_bias(bias, (b.shape[0], b.shape[-2]), a.dtype, a.device)
    if _readable(offs):
        check_offs_values(a.shape[-1] if b.ndim == 2 else a.shape[0], offs)
    return torch.ops.octavo.grouped_mm(a, b, offs, bias)


def _check_common(
    a: ScaledTensor,
    b: ScaledTensor,
    bias: torch.Tensor | None,
    bias_shape: tuple[int, ...],
    out_dtype: torch.dtype,
) -> None:
    if a.device != b.device:
        raise ValueError(f"operands lie on {a.device} and {b.device}: move one of them")
    if out_dtype not in OUTPUT_DTYPES:
        raise ValueError(f"out_dtype must be bfloat16, float16 or float32; got {out_dtype}")
    _check_bias(bias, bias_shape, out_dtype, a.device)


def _check_bias(
    bias: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    if bias is not None and (tuple(bias.shape) != shape or bias.dtype != dtype or bias.device != device):
        raise ValueError(
            f"bias must be {shape} in {dtype} on {device}; got {tuple(bias.shape)} in {bias.dtype} on {bias.device}: "
            "cast, move or reshape it"
        )


# ---- ops ------------------------------------------------------------------------------------------------


def _run(
    op: str,
    a: torch.Tensor,
    a_scale: torch.Tensor,
    a_key: str,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    b_key: str,
    *rest: object,
) -> torch.Tensor:
    left = ScaledTensor(a, a_scale, Format.from_key(a_key))
    right = ScaledTensor(b, b_scale, Format.from_key(b_key))
    return dispatch.run(op, left, right, *rest)


def _fake_grouped(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if b.ndim == 2:
        return a.new_empty((offs.shape[0], a.shape[0], b.shape[0]), dtype=dtype)
    return a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)


_OPERANDS = "Tensor a, Tensor a_scale, str a_format, Tensor b, Tensor b_scale, str b_format"

library.define(
    f"scaled_mm({_OPERANDS}, Tensor? bias, ScalarType out_dtype, bool fast_accum) -> Tensor",
    lambda *args: _run("scaled_mm", *args),
    lambda a, sa, fa, b, sb, fb, bias, out_dtype, fast: a.new_empty(
        (a.shape[0], b.shape[0]), dtype=out_dtype
    ),
)
library.define(
    f"scaled_grouped_mm({_OPERANDS}, Tensor offs, Tensor? bias, ScalarType out_dtype, bool fast_accum) -> Tensor",
    lambda *args: _run("scaled_grouped_mm", *args),
    lambda a, sa, fa, b, sb, fb, offs, bias, out_dtype, fast: _fake_grouped(a, b, offs, out_dtype),
)
library.define(
    "grouped_mm(Tensor a, Tensor b, Tensor offs, Tensor? bias) -> Tensor",
    lambda *args: dispatch.run("grouped_mm", *args),
    lambda a, b, offs, bias: _fake_grouped(a, b, offs, a.dtype),
)

# ---- kernels ----------------------------------------------------------------------------------------------


def _register() -> None:
    from octavo.flydsl import gates as flydsl_gates
    from octavo.matmul import torch_kernels, triton_gates

    flydsl = (
        dispatch.Kernel(
            "scaled_mm", "flydsl", "octavo.flydsl.launch:scaled_mm", flydsl_gates.why_not_scaled_mm
        ),
    )
    for op in ("scaled_mm", "scaled_grouped_mm", "grouped_mm"):
        dispatch.register(
            dispatch.Kernel(
                op, "torch", f"octavo.matmul.torch_kernels:{op}", getattr(torch_kernels, f"why_not_{op}")
            ),
            dispatch.Kernel(
                op, "triton", f"octavo.matmul.triton_launch:{op}", getattr(triton_gates, f"why_not_{op}")
            ),
            *(flydsl if op == "scaled_mm" else ()),
            dispatch.Kernel(op, "reference", f"octavo.matmul.reference:{op}", lambda *_: None),
        )
    # a[M, K] @ b[N, K].T in 16 bits: PyTorch's own, unless another kernel is named.
    dispatch.register(
        dispatch.Kernel("mm", "torch", "octavo.matmul.torch_kernels:mm", lambda *_: None),
        dispatch.Kernel("mm", "flydsl", "octavo.flydsl.launch:mm", flydsl_gates.why_not_mm),
    )


_register()


def register_flop_formulas() -> None:
    """Teach ``torch.utils.flop_counter`` the ops of this package, once; 2 M N K a product.

    Products over groups count the rows before padding, within one ``align``: the padded capacity, which alone
    needs no look at the sizes, less what the groups may be padded by. A layout of a larger ``align`` than its
    formats need counts too many.
    """
    from torch.utils import flop_counter

    def scaled(a: list[int], a_scale: object, a_format: str, b: list[int], *_: object, **__: object) -> int:
        return 2 * a[0] * b[-2] * a[-1] * Format.from_key(a_format).element.packed

    def grouped(
        a: list[int], a_scale: object, a_format: str, b: list[int], b_scale: object, b_format: str,
        offs: list[int], *_: object, **__: object,
    ) -> int:  # fmt: skip
        contraction = a[-1] * Format.from_key(a_format).element.packed
        if len(b) == 2:
            align = alignment(Format.from_key(a_format), Format.from_key(b_format))
            contraction -= offs[0] * (align - 1)
        return 2 * a[0] * b[-2] * contraction

    def plain(a: list[int], b: list[int], *_: object, **__: object) -> int:
        return 2 * a[0] * b[-2] * a[-1]

    formulas: dict[str, Callable[..., int]] = {
        "scaled_mm": scaled,
        "scaled_grouped_mm": grouped,
        "grouped_mm": plain,
    }
    for name, formula in formulas.items():
        op = getattr(torch.ops.octavo, name)
        if op not in flop_counter.flop_registry:
            flop_counter.register_flop_formula(op)(formula)
