"""``F.rms_norm`` on Octavo's kernels: what they are right for, and the calls themselves.

``F.rms_norm`` on a GPU reaches ``aten::_fused_rms_norm`` and, in backward, ``aten::_fused_rms_norm_backward`` when
input and weight have one dtype; with different dtypes PyTorch computes it from elementary operators, which no override
sees. Called directly, these overloads take a weight of another dtype; its gradient then has the weight's dtype.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from octavo import dispatch, hardware
from octavo.flydsl import gates as flydsl_gates
from octavo.launch import Cache, Prepared
from octavo.operators import wins
from octavo.operators.override import Filter, Override, is_copy_on_write
from octavo.operators.rms_norm import plan as plans
from octavo.operators.rms_norm.reference import default_eps

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

OTHER_DTYPE = "dtype is not float32, bfloat16 or float16"
TOO_LONG = f"rows are longer than {plans.MAX_COLUMNS}"


def _why_not_arguments(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None
) -> str | None:
    if input.dtype not in DTYPES:
        return OTHER_DTYPE
    if input.layout is not torch.strided:
        return "the tensor is not strided"
    dims = len(normalized_shape)
    if dims == 0 or input.ndim < dims or list(input.shape[-dims:]) != list(normalized_shape):
        return "normalized_shape does not match the input"
    if weight is not None:
        if weight.dtype not in DTYPES:
            return "the weight's dtype is not float32, bfloat16 or float16"
        if weight.device != input.device or list(weight.shape) != list(normalized_shape):
            return "the weight has another device or shape"
        if is_copy_on_write(weight):
            return "a tensor is copy-on-write"
    if input.numel() == 0:
        return "the tensor is empty"
    if math.prod(normalized_shape) > plans.MAX_COLUMNS:
        return TOO_LONG
    if is_copy_on_write(input):
        return "a tensor is copy-on-write"
    return None


def why_not_forward(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None, eps: float | None
) -> str | None:
    """Why the kernel is not right for these arguments of ``aten::_fused_rms_norm``, or None if it is.

    The kernel is Triton's, or the one that ``octavo.use_kernels(rms_norm=...)`` names.
    """
    kernel = dispatch.forced("rms_norm")
    if kernel is not None and kernel.name != "triton":
        return kernel.why_not(input, normalized_shape, weight, eps)
    return _why_not_arguments(input, normalized_shape, weight) or hardware.why_no_triton(input.device)


def why_not_backward(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    output_mask: Sequence[bool],
) -> str | None:
    """As ``why_not_forward``, for ``aten::_fused_rms_norm_backward``."""
    reason = _why_not_arguments(input, normalized_shape, weight)
    if reason is not None:
        return reason
    if grad_out.shape != input.shape or grad_out.dtype not in DTYPES or grad_out.device != input.device:
        return "grad_out does not match the input"
    rows = input.numel() // math.prod(normalized_shape)
    if rstd.dtype != torch.float32 or rstd.numel() != rows or rstd.device != input.device:
        return "rstd is not one float32 a row"
    if is_copy_on_write(grad_out) or is_copy_on_write(rstd):
        return "a tensor is copy-on-write"
    return hardware.why_no_triton(input.device)


def _measured(kind: str, input: torch.Tensor, normalized_shape: Sequence[int]) -> str | None:
    n = math.prod(normalized_shape)
    dtype = str(input.dtype)[6:]
    return wins.why_not(kind, input.device, dtype=dtype, m=input.numel() // n, n=n)


def measured_forward(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None, eps: float | None
) -> str | None:
    """Why no measurement says that the forward wins, or None if one does."""
    return _measured("rms_norm", input, normalized_shape)


def measured_backward(
    grad_out: torch.Tensor, input: torch.Tensor, normalized_shape: Sequence[int], *_: object
) -> str | None:
    """Why no measurement says that the backward wins, or None if one does."""
    return _measured("rms_norm_backward", input, normalized_shape)


def _rows(x: torch.Tensor, n: int) -> torch.Tensor:
    """x as [m, n] with unit column stride; a copy only if it has no such view."""
    if x.ndim != 2 or x.shape[1] != n:
        x = x.reshape(-1, n)
    return x if x.stride(1) == 1 or n == 1 else x.contiguous()


@functools.cache
def _programs(index: int) -> int:
    return 2 * torch.cuda.get_device_properties(index).multi_processor_count


def _device_programs(x: torch.Tensor) -> int:
    return 264 if x.device.type != "cuda" else _programs(x.device.index)


def _lanes(x: torch.Tensor) -> int:
    return 64 if hardware.architecture(x.device).startswith("gfx") else 32


_prepared = Cache()


def fused_rms_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    eps: float | None,
    *,
    plan: plans.Plan | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, rstd) for arguments that ``why_not_forward`` accepts; ``plan`` overrides the choice of kernel."""
    kernel = dispatch.forced("rms_norm")
    if kernel is not None and kernel.name != "triton":
        return kernel.function(input, normalized_shape, weight, eps)
    dims = len(normalized_shape)
    weight_dtype = None if weight is None else weight.dtype
    key = (input.shape, input.stride(), input.dtype, input.device, weight_dtype, dims, eps, plan)
    found = _prepared.get(key)
    if found is None:
        found = _prepared[key] = _prepare_forward(input, dims, weight is not None, eps, plan)
    run, n, plain, rstd_shape = found
    x = input if plain else _rows(input, n)
    y = torch.empty_like(x) if plain else torch.empty(input.shape, dtype=input.dtype, device=input.device)
    rstd = x.new_empty(rstd_shape, dtype=torch.float32)
    run(x, x if weight is None else weight.contiguous(), y, rstd)
    return y, rstd


def _prepare_forward(
    input: torch.Tensor, dims: int, has_weight: bool, eps: float | None, plan: plans.Plan | None
) -> tuple[Prepared, int, bool, tuple[int, ...]]:
    """The launches, the row length, whether input is [m, n] and contiguous already, and the shape of rstd."""
    from octavo.operators.rms_norm.launch import prepare_forward

    n = math.prod(input.shape[-dims:])
    x = _rows(input, n)
    plan = plan or plans.choose_forward(x.shape[0], n, x.element_size(), _device_programs(x), _lanes(x))
    run = prepare_forward(x, has_weight, default_eps() if eps is None else eps, plan)
    return run, n, x is input and x.is_contiguous(), (*input.shape[:-dims], *([1] * dims))


def fused_rms_norm_backward(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    output_mask: Sequence[bool],
    *,
    plan: plans.Plan | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(dx, dw) for arguments that ``why_not_backward`` accepts; ``plan`` overrides the choice of kernel."""
    need_dx, need_dw = output_mask[0], output_mask[1] and weight is not None
    if not (need_dx or need_dw):
        return None, None
    weight_dtype = None if weight is None else weight.dtype
    dims = len(normalized_shape)
    of_input = (input.shape, input.stride(), input.dtype, input.device, weight_dtype, dims)
    # dw has the weight's dtype, so the key has it too.
    key = (*of_input, grad_out.stride(), grad_out.dtype, need_dx, need_dw, plan)
    found = _prepared.get(key)
    if found is None:
        n = math.prod(input.shape[-dims:])
        has_weight = weight is not None
        found = _prepared[key] = _prepare_backward(grad_out, input, n, has_weight, need_dx, need_dw, plan), n
    run, n = found
    g, x = _rows(grad_out, n), _rows(input, n)
    dx = torch.empty(input.shape, dtype=input.dtype, device=input.device) if need_dx else None
    dw = (
        torch.empty(weight.shape, dtype=weight_dtype, device=x.device)
        if need_dw and weight is not None
        else None
    )
    run(g, x, x if weight is None else weight.contiguous(), rstd.contiguous(), dx, dw)
    return dx, dw


def _prepare_backward(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    n: int,
    has_weight: bool,
    need_dx: bool,
    need_dw: bool,
    plan: plans.Plan | None,
) -> Prepared:
    from octavo.operators.rms_norm.launch import prepare_backward

    g, x = _rows(grad_out, n), _rows(input, n)
    plan = plan or plans.choose_backward(x.shape[0], n, x.element_size(), _device_programs(x), _lanes(x))
    return prepare_backward(g, x, has_weight, need_dx, need_dw, plan)


def _filter(operator: str, tensor: int, columns: int) -> Filter:
    return Filter(operator, tensor, columns, DTYPES, plans.MAX_COLUMNS, OTHER_DTYPE, TOO_LONG)


OVERRIDES = (
    Override(
        "aten::_fused_rms_norm",
        why_not_forward,
        measured_forward,
        fused_rms_norm,
        _filter("rms_norm", tensor=0, columns=1),
    ),
    Override(
        "aten::_fused_rms_norm_backward",
        why_not_backward,
        measured_backward,
        fused_rms_norm_backward,
        _filter("rms_norm_backward", tensor=1, columns=2),
    ),
)

# FlyDSL's kernel was timed nowhere: it stands behind Triton's, and serves where it is named (octavo.use_kernels).
dispatch.register(
    dispatch.Kernel("rms_norm", "triton", f"{__name__}:fused_rms_norm", why_not_forward),
    dispatch.Kernel(
        "rms_norm", "flydsl", "octavo.flydsl.launch:fused_rms_norm", flydsl_gates.why_not_rms_norm
    ),
    dispatch.Kernel("rms_norm", "reference", f"{__name__}.reference:fused_rms_norm", lambda *_: None),
)
