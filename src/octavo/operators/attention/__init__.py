"""``F.scaled_dot_product_attention`` on Octavo's kernels: what they are right for, and the calls themselves.

On AMD PyTorch's GPU attention is ``aten::_scaled_dot_product_flash_attention``; on Hopper the default is
``aten::_scaled_dot_product_cudnn_attention`` and the flash operators serve where a user asks for them. Forward and
backward of both are taken over. Log-sum-exp is the natural one in all of them, [B, H, Lq] for flash and [B, H, Lq, 1]
for cuDNN, so a backward of ours can follow a forward of PyTorch's, and the other way round.
"""

from __future__ import annotations

from typing import Any

import torch

from octavo import hardware
from octavo.operators import wins
from octavo.operators.attention import plan as plans
from octavo.operators.attention.reference import default_scale
from octavo.operators.override import Override, is_copy_on_write

DTYPES = (torch.bfloat16, torch.float16)


def _why_not_tensors(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> str | None:
    tensors = (query, key, value)
    if any(x.dtype not in DTYPES or x.dtype != query.dtype for x in tensors):
        return "dtypes are not all bfloat16 or all float16"
    if any(x.layout is not torch.strided or x.device != query.device or x.ndim != 4 for x in tensors):
        return "the tensors are not strided, 4-D and on one device"
    if not (query.shape[0] == key.shape[0] == value.shape[0] and key.shape[1:3] == value.shape[1:3]):
        return "batch, heads or lengths of query, key and value do not match"
    if query.shape[3] != key.shape[3]:
        return "query and key have different head dimensions"
    if key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        return "the heads of the query are no multiple of the heads of the key"
    for dim in (query.shape[3], value.shape[3]):
        if dim % 8 or not plans.MIN_HEAD_DIM <= dim <= plans.MAX_HEAD_DIM:
            return f"a head dimension is no multiple of 8 from {plans.MIN_HEAD_DIM} to {plans.MAX_HEAD_DIM}"
    if any(x.stride(3) != 1 for x in tensors):
        return "the last dimension of query, key or value is not contiguous"
    if any(is_copy_on_write(x) for x in tensors):
        return "a tensor is copy-on-write"
    return hardware.why_no_triton(query.device)


def _why_not_options(dropout_p: float, mask: object, scale: float | None) -> str | None:
    if dropout_p:
        return "dropout is not served"
    if mask is not None:
        return "a mask or bias is not served"
    if scale is not None and not 0 < scale < float("inf"):
        return "the scale is not a positive number"
    return None


def _why_not_saved(
    grad: torch.Tensor, query: torch.Tensor, value: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> str | None:
    shape = (*query.shape[:3], value.shape[3])
    if any(x.shape != shape or x.dtype != query.dtype or x.device != query.device for x in (grad, out)):
        return "grad_out or out does not match the query"
    if out.stride(3) != 1:
        return "the last dimension of out is not contiguous"
    rows = query.shape[0] * query.shape[1] * query.shape[2]
    if lse.dtype != torch.float32 or lse.numel() != rows or not lse.is_contiguous():
        return "logsumexp is not one contiguous float32 for each query"
    return "a tensor is copy-on-write" if any(map(is_copy_on_write, (grad, out, lse))) else None


def why_not_flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> str | None:
    """Why Octavo's kernels are not right for a call of ``aten::_scaled_dot_product_flash_attention``, or None."""
    if return_debug_mask:
        return "a debug mask is asked for"
    return _why_not_options(dropout_p, None, scale) or _why_not_tensors(query, key, value)


def why_not_flash_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: torch.Tensor | None,
    philox_offset: torch.Tensor | None,
    *,
    scale: float | None = None,
) -> str | None:
    """As ``why_not_flash``, for ``aten::_scaled_dot_product_flash_attention_backward``."""
    if cum_seq_q is not None or cum_seq_k is not None:
        return "sequences of several lengths are not served"
    reason = _why_not_options(dropout_p, None, scale) or _why_not_tensors(query, key, value)
    return reason or _why_not_saved(grad_out, query, value, out, logsumexp)


def why_not_cudnn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> str | None:
    """As ``why_not_flash``, for ``aten::_scaled_dot_product_cudnn_attention``."""
    if return_debug_mask:
        return "a debug mask is asked for"
    return _why_not_options(dropout_p, attn_bias, scale) or _why_not_tensors(query, key, value)


def why_not_cudnn_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    philox_seed: torch.Tensor | None,
    philox_offset: torch.Tensor | None,
    attn_bias: torch.Tensor | None,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> str | None:
    """As ``why_not_flash``, for ``aten::_scaled_dot_product_cudnn_attention_backward``."""
    if cum_seq_q is not None or cum_seq_k is not None:
        return "sequences of several lengths are not served"
    reason = _why_not_options(dropout_p, attn_bias, scale) or _why_not_tensors(query, key, value)
    return reason or _why_not_saved(grad_out, query, value, out, logsumexp)


def measured(
    kind: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool
) -> str | None:
    """Why no measurement says that ``kind`` ("attention" or "attention_backward") wins here, or None if one does."""
    if query.numel() == 0 or key.numel() == 0:
        return None  # nothing to compute, and not every backend of PyTorch accepts it
    return wins.why_not(
        kind,
        query.device,
        dtype=str(query.dtype)[6:],
        causal=str(causal).lower(),
        d=query.shape[3],
        dv=value.shape[3],
        lq=query.shape[2],
        lk=key.shape[2],
        heads=query.shape[0] * query.shape[1],
    )


def _measured_flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **named: Any
) -> str | None:
    causal = named.get("is_causal", rest[1] if len(rest) > 1 else False)
    return measured("attention", query, key, value, causal)


def _measured_cudnn(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **named: Any
) -> str | None:
    causal = named.get("is_causal", rest[3] if len(rest) > 3 else False)
    return measured("attention", query, key, value, causal)


def _measured_flash_backward(
    grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **_: Any
) -> str | None:
    return measured("attention_backward", query, key, value, rest[7])


def _measured_cudnn_backward(
    grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **_: Any
) -> str | None:
    return measured("attention_backward", query, key, value, rest[10])


def choose(query: torch.Tensor, value: torch.Tensor, causal: bool) -> plans.Plan:
    """The plan for these operands; gradients are added without atomics in deterministic mode."""
    plan = plans.choose(hardware.architecture(query.device), query.shape[3], value.shape[3], causal)
    return plan.deterministic() if torch.are_deterministic_algorithms_enabled() else plan


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool = False,
    scale: float | None = None,
    *,
    plan: plans.Plan | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, log-sum-exp) for tensors that the gate accepts.

    Args:
        query: [B, Hq, Lq, D], bfloat16 or float16.
        key: [B, Hk, Lk, D] of the same dtype; Hk divides Hq.
        value: [B, Hk, Lk, Dv].
        causal: query i sees keys 0 to i (top left).
        scale: of the scores, above 0; 1 / sqrt(D) by default.
        plan: tiles, in place of the table's.

    Returns:
        output [B, Hq, Lq, Dv] laid out as the query is, and float32 [B, Hq, Lq]; zeros and -inf without keys.
    """
    from octavo.operators.attention import launch

    if key.shape[2] == 0:
        out = launch.like_query(query, value.shape[3]).zero_()
        return out, query.new_full(query.shape[:3], float("-inf"), dtype=torch.float32)
    plan = plan or choose(query, value, causal)
    return launch.forward(query, key, value, causal, default_scale(query, scale), plan)


def attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool = False,
    scale: float | None = None,
    *,
    plan: plans.Plan | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value, each laid out as its tensor, from what ``attention`` returned."""
    from octavo.operators.attention import launch

    if query.numel() == 0 or key.shape[2] == 0:
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    plan = plan or choose(query, value, causal)
    grad = grad if grad.stride(3) == 1 else grad.contiguous()
    return launch.backward(
        grad, query, key, value, out, lse.view(query.shape[:3]), causal, default_scale(query, scale), plan
    )


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    out, lse = attention(query, key, value, is_causal, scale)
    if torch.version.hip:
        seed, offset = (torch.empty((), dtype=torch.int64, device=query.device) for _ in range(2))
    else:
        seed = torch.empty(2, dtype=torch.uint64, device=query.device)
        offset = torch.empty((), dtype=torch.uint64, device=query.device)
    return out, lse, None, None, query.shape[2], key.shape[2], seed, offset, query.new_empty(0)


def _cudnn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    out, lse = attention(query, key, value, is_causal, scale)
    seed, offset = (torch.empty((), dtype=torch.int64, device=query.device) for _ in range(2))
    return out, lse.unsqueeze(-1), None, None, query.shape[2], key.shape[2], seed, offset, None


def _flash_backward(
    grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
    logsumexp: torch.Tensor, *rest: Any, scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    return attention_backward(grad_out, query, key, value, out, logsumexp, rest[5], scale)


def _cudnn_backward(
    grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
    logsumexp: torch.Tensor, *rest: Any, scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    return attention_backward(grad_out, query, key, value, out, logsumexp, rest[8], scale)


OVERRIDES = (
    Override("aten::_scaled_dot_product_flash_attention", why_not_flash, _measured_flash, _flash),
    Override(
        "aten::_scaled_dot_product_flash_attention_backward",
        why_not_flash_backward,
        _measured_flash_backward,
        _flash_backward,
    ),
    Override("aten::_scaled_dot_product_cudnn_attention", why_not_cudnn, _measured_cudnn, _cudnn),
    Override(
        "aten::_scaled_dot_product_cudnn_attention_backward",
        why_not_cudnn_backward,
        _measured_cudnn_backward,
        _cudnn_backward,
    ),
)
