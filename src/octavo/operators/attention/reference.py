"""The definition of Octavo's attention in plain PyTorch: any device, every score in memory.

    S = scale * Q K^T,  S[i, j] = -inf where causal and j > i,  P = softmax(S),  O = P V,  LSE = log sum exp S

Causal is aligned to the top left, as ``F.scaled_dot_product_attention`` defines it. Heads of Q share those of K
and V in groups: head h reads head h // (Hq / Hk). A row with nothing to attend to (no keys) is zero, its LSE -inf.
"""

from __future__ import annotations

import math

import torch


def default_scale(query: torch.Tensor, scale: float | None) -> float:
    """``scale`` or 1 / sqrt(D)."""
    return 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale


def _shared(x: torch.Tensor, heads: int, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype).repeat_interleave(heads // max(1, x.shape[1]), 1)


def _scores(
    query: torch.Tensor, key: torch.Tensor, causal: bool, scale: float, dtype: torch.dtype
) -> torch.Tensor:
    scores = query.to(dtype) @ _shared(key, query.shape[1], dtype).mT * scale
    if causal:
        above = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(above, -math.inf)
    return scores


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool = False,
    scale: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, log-sum-exp) computed in ``dtype``.

    Args:
        query: [B, Hq, Lq, D].
        key: [B, Hk, Lk, D]; Hk divides Hq.
        value: [B, Hk, Lk, Dv].
        causal: query i sees keys 0 to i.
        scale: of the scores; 1 / sqrt(D) by default.
        dtype: of the computation and the results.

    Returns:
        output [B, Hq, Lq, Dv] and the natural logarithm of the sum of exp(scores), [B, Hq, Lq].
    """
    scores = _scores(query, key, causal, default_scale(query, scale), dtype)
    if key.shape[-2] == 0:
        empty = scores.new_zeros(*query.shape[:-1], value.shape[-1])
        return empty, scores.new_full(query.shape[:-1], -math.inf)
    out = scores.softmax(-1) @ _shared(value, query.shape[1], dtype)
    return out, scores.logsumexp(-1)


def attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool = False,
    scale: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value for ``grad`` [B, Hq, Lq, Dv], computed in ``dtype``.

    With D = rowsum(dO * O): dV = P^T dO, dS = P * (dO V^T - D), dQ = scale dS K, dK = scale dS^T Q, the gradients
    of shared heads added up (Dao et al., FlashAttention, algorithm 4).
    """
    factor, heads = default_scale(query, scale), query.shape[1]
    scores = _scores(query, key, causal, factor, dtype)
    weights = scores.softmax(-1) if key.shape[-2] else scores
    keys, values, g = _shared(key, heads, dtype), _shared(value, heads, dtype), grad.to(dtype)
    inner = (g * (weights @ values)).sum(-1, keepdim=True)
    ds = weights * (g @ values.mT - inner)
    return factor * ds @ keys, _fold(factor * ds.mT @ query.to(dtype), key), _fold(weights.mT @ g, value)


def _fold(grad: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The gradients [B, Hq, Lk, D] of the heads that share one of ``like`` [B, Hk, Lk, D], added up."""
    return grad.unflatten(1, (like.shape[1], -1)).sum(2) if like.shape[1] else grad
