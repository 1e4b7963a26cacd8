"""Attention in Triton: forward, and a backward in three launches; one source for gfx942, gfx950 and sm_90.

Scores never reach memory: a program holds BM queries, walks over the keys BN at a time and keeps the running
maximum and sum of its rows (Milakov and Gimelshein 2018; Dao et al. 2022). The maximum is kept in the units of the
scores themselves, not multiplied by the scale: then the largest score of a row minus the maximum is exactly 0, and
exp of a row of huge scores cannot overflow by a difference in rounding.

A head dimension is D0 + D1 columns, two powers of two (D1 may be 0): 96 = 64 + 32 and 192 = 128 + 64 then need no
padding to the next power of two. The same for the value's, V0 + V1. EVEN_D says that D is exactly D0 + D1.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _load(
    base,
    rows,
    stride,
    limit,
    D,
    START: tl.constexpr,
    SIZE: tl.constexpr,
    EVEN: tl.constexpr,
    FULL: tl.constexpr,
):
    """Rows ``rows`` of a [limit, D] matrix, SIZE columns from START; zero outside. FULL: no row is outside."""
    columns = START + tl.arange(0, SIZE)
    at = base + rows[:, None].to(tl.int64) * stride + columns[None, :]
    if FULL:
        if EVEN:
            return tl.load(at)
        return tl.load(at, mask=(columns < D)[None, :], other=0.0)
    if EVEN:
        return tl.load(at, mask=(rows < limit)[:, None], other=0.0)
    return tl.load(at, mask=(rows < limit)[:, None] & (columns < D)[None, :], other=0.0)


@triton.jit
def _describe(base, rows, columns, stride, ROWS: tl.constexpr, SIZE: tl.constexpr, DESC: tl.constexpr):
    """A descriptor of a [rows, columns] matrix for ``_tile``; without DESC, or of no columns, ``base`` itself."""
    if DESC and SIZE > 0:
        described = tl.make_tensor_descriptor(base, [rows, columns], [stride, 1], [ROWS, SIZE])
    else:
        described = base
    return described


@triton.jit
def _tile(
    base, described, start, stride, limit, D,
    START: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr,
    DESC: tl.constexpr,
):  # fmt: skip
    """ROWS rows from ``start`` and SIZE columns from START of a [limit, D] matrix; zero outside.

    With DESC through ``described``, which the copy engine reads: no addresses in registers.
    """
    if DESC:
        return described.load([start, START])
    return _load(base, start + tl.arange(0, ROWS), stride, limit, D, START, SIZE, EVEN, FULL)


@triton.jit
def _store(base, rows, stride, limit, D, x, START: tl.constexpr, SIZE: tl.constexpr):
    columns = START + tl.arange(0, SIZE)
    at = base + rows[:, None].to(tl.int64) * stride + columns[None, :]
    tl.store(at, x.to(base.dtype.element_ty), mask=(rows < limit)[:, None] & (columns < D)[None, :])


@triton.jit
def _scores(q0, q1, k0, k1, D1: tl.constexpr):
    """q k^T in float32."""
    s = tl.dot(q0, tl.trans(k0))
    if D1 > 0:
        s = tl.dot(q1, tl.trans(k1), s)
    return s


@triton.jit
def _forward_span(
    acc0, acc1, top, total, q0, q1, k_base, v_base, kd0, kd1, vd0, vd1,
    stride_kl, stride_vl, rows, low, high, keys, D, DV, to_log2,
    D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, BN: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_V: tl.constexpr, DESC: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The keys from ``low`` to ``high`` added to a program's running output; MASKED where some are not seen."""
    for start in tl.range(low, high, BN, num_stages=STAGES):
        k0 = _tile(k_base, kd0, start, stride_kl, keys, D, 0, BN, D0, EVEN_D or D1 > 0, not MASKED, DESC)
        k1 = k0
        if D1 > 0:
            k1 = _tile(k_base, kd1, start, stride_kl, keys, D, D0, BN, D1, EVEN_D, not MASKED, DESC)
        s = _scores(q0, q1, k0, k1, D1)
        if MASKED:
            columns = start + tl.arange(0, BN)
            seen = (columns < keys)[None, :]
            if CAUSAL:
                seen = seen & (columns[None, :] <= rows[:, None])
            s = tl.where(seen, s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        # A row that has seen no key yet keeps -inf: 0 in its place keeps -inf - -inf out of the sums.
        base = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
        p = tl.exp2((s - base[:, None]) * to_log2)
        shrink = tl.exp2((top - base) * to_log2)
        total = total * shrink + tl.sum(p, 1)
        acc0 = acc0 * shrink[:, None]
        v0 = _tile(v_base, vd0, start, stride_vl, keys, DV, 0, BN, V0, EVEN_V or V1 > 0, not MASKED, DESC)
        p = p.to(v0.dtype)
        acc0 = tl.dot(p, v0, acc0)
        if V1 > 0:
            acc1 = acc1 * shrink[:, None]
            v1 = _tile(v_base, vd1, start, stride_vl, keys, DV, V0, BN, V1, EVEN_V, not MASKED, DESC)
            acc1 = tl.dot(p, v1, acc1)
        top = higher
    return acc0, acc1, top, total


@triton.jit
def attention_forward(
    Q, K, V, O, LSE,
    stride_qb, stride_qh, stride_ql, stride_kb, stride_kh, stride_kl, stride_vb, stride_vh, stride_vl,
    stride_ob, stride_oh, stride_ol, heads, group, queries, keys, D, DV, scale,
    D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, EVEN_D: tl.constexpr,
    EVEN_V: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, DESC: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """O [B, H, Lq, DV] and LSE float32 [B, H, Lq] (natural) of Q [B, H, Lq, D], K, V [B, H / group, Lk, .].

    Grid (blocks of queries, B * H). The last dimension of every operand has stride 1; LSE is contiguous.
    The scale is positive.
    """
    # The last queries of a causal mask see the most keys: they start first.
    block = tl.num_programs(0) - 1 - tl.program_id(0) if CAUSAL else tl.program_id(0)
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    rows = block * BM + tl.arange(0, BM)
    q_base = Q + batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh
    k_base = K + batch.to(tl.int64) * stride_kb + (head // group).to(tl.int64) * stride_kh
    v_base = V + batch.to(tl.int64) * stride_vb + (head // group).to(tl.int64) * stride_vh
    q0 = _load(q_base, rows, stride_ql, queries, D, 0, D0, EVEN_D or D1 > 0, False)
    q1 = q0
    if D1 > 0:
        q1 = _load(q_base, rows, stride_ql, queries, D, D0, D1, EVEN_D, False)

    kd0 = _describe(k_base, keys, D, stride_kl, BN, D0, DESC)
    kd1 = _describe(k_base, keys, D, stride_kl, BN, D1, DESC)
    vd0 = _describe(v_base, keys, DV, stride_vl, BN, V0, DESC)
    vd1 = _describe(v_base, keys, DV, stride_vl, BN, V1, DESC)

    acc0 = tl.zeros([BM, V0], tl.float32)
    acc1 = tl.zeros([BM, V1 if V1 > 0 else 16], tl.float32)
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    to_log2 = scale * LOG2E
    # Blocks whose every key is seen by every query of the program need no mask.
    end = keys
    clear = keys // BN * BN
    if CAUSAL:
        end = tl.minimum(keys, (block + 1) * BM)
        clear = tl.minimum(clear, block * BM // BN * BN)
    acc0, acc1, top, total = _forward_span(
        acc0, acc1, top, total, q0, q1, k_base, v_base, kd0, kd1, vd0, vd1, stride_kl, stride_vl, rows, 0, clear,
        keys, D, DV, to_log2, D0, D1, V0, V1, BN, EVEN_D, EVEN_V, DESC, False, CAUSAL, STAGES,
    )  # fmt: skip
    acc0, acc1, top, total = _forward_span(
        acc0, acc1, top, total, q0, q1, k_base, v_base, kd0, kd1, vd0, vd1, stride_kl, stride_vl, rows, clear, end,
        keys, D, DV, to_log2, D0, D1, V0, V1, BN, EVEN_D, EVEN_V, DESC, True, CAUSAL, STAGES,
    )  # fmt: skip

    share = 1.0 / total
    o_base = O + batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh
    _store(o_base, rows, stride_ol, queries, DV, acc0 * share[:, None], 0, V0)
    if V1 > 0:
        _store(o_base, rows, stride_ol, queries, DV, acc1 * share[:, None], V0, V1)
    lse = top * scale + tl.log2(total) * LN2
    tl.store(LSE + tl.program_id(1).to(tl.int64) * queries + rows, lse, mask=rows < queries)


@triton.jit
def attention_inner_products(
    O, G, INNER, stride_ob, stride_oh, stride_ol, stride_gb, stride_gh, stride_gl, heads, queries, DV,
    C: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """INNER float32 [B, H, Lq] = rowsum(O * dO). Grid (blocks of queries, B * H)."""
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    o_base = O + batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh
    g_base = G + batch.to(tl.int64) * stride_gb + head.to(tl.int64) * stride_gh
    o = _load(o_base, rows, stride_ol, queries, DV, 0, C, False, False).to(tl.float32)
    g = _load(g_base, rows, stride_gl, queries, DV, 0, C, False, False).to(tl.float32)
    tl.store(INNER + tl.program_id(1).to(tl.int64) * queries + rows, tl.sum(o * g, 1), mask=rows < queries)
