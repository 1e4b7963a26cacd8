"""Attention's backward in Triton: gradients of keys and values by blocks of keys, of queries by blocks of queries.

Both recompute the scores, so a backward is seven products of the size of the forward's two, with no atomics and the
same result every time. FUSED lets the first launch add its share of the queries' gradient to a float32 buffer as well:
five products, added in an order that changes between runs.

With D_i = rowsum(dO_i * O_i):  P = exp(scale S - LSE),  dV = P^T dO,  dS = P * (dO V^T - D),  dK = scale dS^T Q,
dQ = scale dS K (Dao et al., FlashAttention, algorithm 4). The exponent is held at most 0: a score so large that
float32 cannot tell it from LSE would otherwise overflow. That also makes what lies outside the matrices harmless: a
query past the end has LSE = inf, so P = 0, and a key past the end is 0 and P at most 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.operators.attention.kernels import LOG2E, _describe, _load, _store, _tile


@triton.jit
def _weights(s, lse2, to_log2):
    """exp(scale * s - lse), with lse2 = lse * log2(e) broadcast to s."""
    return tl.exp2(tl.minimum(s * to_log2 - lse2, 0.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def _keys_span(
    dk0, dk1, dv0, dv1, k0, k1, v0, v1, q_base, g_base, qd0, qd1, gd0, gd1,
    lse_base, inner_base, dq_base, stride_ql, stride_gl, stride_dql, columns, low, high, queries, D, DV, to_log2,
    D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, BM: tl.constexpr, EVEN_D: tl.constexpr,
    EVEN_V: tl.constexpr, EVEN_Q: tl.constexpr, DESC: tl.constexpr, DIAGONAL: tl.constexpr, FUSED: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    for start in tl.range(low, high, BM, num_stages=STAGES):
        rows = start + tl.arange(0, BM)
        inside = rows < queries
        q0 = _tile(q_base, qd0, start, stride_ql, queries, D, 0, BM, D0, EVEN_D or D1 > 0, EVEN_Q, DESC)
        s = tl.dot(k0, tl.trans(q0))
        q1 = q0
        if D1 > 0:
            q1 = _tile(q_base, qd1, start, stride_ql, queries, D, D0, BM, D1, EVEN_D, EVEN_Q, DESC)
            s = tl.dot(k1, tl.trans(q1), s)
        lse = tl.load(lse_base + rows, mask=inside, other=float("inf"))
        p = _weights(s, (lse * LOG2E)[None, :], to_log2)
        if DIAGONAL:
            p = tl.where(columns[:, None] <= rows[None, :], p, 0.0)
        g0 = _tile(g_base, gd0, start, stride_gl, queries, DV, 0, BM, V0, EVEN_V or V1 > 0, EVEN_Q, DESC)
        weights = p.to(g0.dtype)
        dv0 = tl.dot(weights, g0, dv0)
        dp = tl.dot(v0, tl.trans(g0))
        if V1 > 0:
            g1 = _tile(g_base, gd1, start, stride_gl, queries, DV, V0, BM, V1, EVEN_V, EVEN_Q, DESC)
            dv1 = tl.dot(weights, g1, dv1)
            dp = tl.dot(v1, tl.trans(g1), dp)
        inner = tl.load(inner_base + rows, mask=inside, other=0.0)
        ds = (p * (dp - inner[None, :])).to(q0.dtype)
        dk0 = tl.dot(ds, q0, dk0)
        if D1 > 0:
            dk1 = tl.dot(ds, q1, dk1)
        if FUSED:
            channels = tl.arange(0, D0)
            dq = tl.dot(tl.trans(ds), k0)
            at = dq_base + rows[:, None].to(tl.int64) * stride_dql + channels[None, :]
            tl.atomic_add(at, dq, mask=inside[:, None] & (channels < D)[None, :], sem="relaxed")
            if D1 > 0:
                channels1 = D0 + tl.arange(0, D1)
                dq = tl.dot(tl.trans(ds), k1)
                at = dq_base + rows[:, None].to(tl.int64) * stride_dql + channels1[None, :]
                tl.atomic_add(at, dq, mask=inside[:, None] & (channels1 < D)[None, :], sem="relaxed")
    return dk0, dk1, dv0, dv1


@triton.jit
def attention_backward_keys(
    Q, K, V, G, LSE, INNER, DK, DV_OUT, DQ,
    stride_qb, stride_qh, stride_ql, stride_kb, stride_kh, stride_kl, stride_vb, stride_vh, stride_vl,
    stride_gb, stride_gh, stride_gl, stride_dkb, stride_dkh, stride_dkl, stride_dvb, stride_dvh, stride_dvl,
    stride_dqb, stride_dqh, stride_dql, heads, group, queries, keys, D, DV, scale,
    D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, EVEN_D: tl.constexpr,
    EVEN_V: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, EVEN_Q: tl.constexpr, CAUSAL: tl.constexpr,
    FUSED: tl.constexpr, DESC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """DK [B, Hk, Lk, D] and DV_OUT [B, Hk, Lk, DV]; FUSED: DQ float32 [B, H, Lq, D] += dS K, unscaled.

    Grid (blocks of keys, B * Hk). ``heads`` are those of the queries, ``group`` of which share one of the keys.
    """
    kv_heads = heads // group
    block = tl.program_id(0)
    batch, kv_head = tl.program_id(1) // kv_heads, tl.program_id(1) % kv_heads
    columns = block * BN + tl.arange(0, BN)
    k_base = K + batch.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh
    v_base = V + batch.to(tl.int64) * stride_vb + kv_head.to(tl.int64) * stride_vh
    k0 = _load(k_base, columns, stride_kl, keys, D, 0, D0, EVEN_D or D1 > 0, False)
    v0 = _load(v_base, columns, stride_vl, keys, DV, 0, V0, EVEN_V or V1 > 0, False)
    k1, v1 = k0, v0
    if D1 > 0:
        k1 = _load(k_base, columns, stride_kl, keys, D, D0, D1, EVEN_D, False)
    if V1 > 0:
        v1 = _load(v_base, columns, stride_vl, keys, DV, V0, V1, EVEN_V, False)
    dk0 = tl.zeros([BN, D0], tl.float32)
    dk1 = tl.zeros([BN, D1 if D1 > 0 else 16], tl.float32)
    dv0 = tl.zeros([BN, V0], tl.float32)
    dv1 = tl.zeros([BN, V1 if V1 > 0 else 16], tl.float32)
    to_log2 = scale * LOG2E
    first = 0
    clear = 0
    if CAUSAL:
        first = block * BN // BM * BM
        clear = tl.minimum(((block + 1) * BN + BM - 1) // BM * BM, (queries + BM - 1) // BM * BM)
    for member in range(group):
        head = kv_head * group + member
        q_base = Q + batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh
        g_base = G + batch.to(tl.int64) * stride_gb + head.to(tl.int64) * stride_gh
        row = (batch.to(tl.int64) * heads + head) * queries
        qd0 = _describe(q_base, queries, D, stride_ql, BM, D0, DESC)
        qd1 = _describe(q_base, queries, D, stride_ql, BM, D1, DESC)
        gd0 = _describe(g_base, queries, DV, stride_gl, BM, V0, DESC)
        gd1 = _describe(g_base, queries, DV, stride_gl, BM, V1, DESC)
        dq_base = DQ + batch.to(tl.int64) * stride_dqb + head.to(tl.int64) * stride_dqh
        if CAUSAL:
            dk0, dk1, dv0, dv1 = _keys_span(
                dk0, dk1, dv0, dv1, k0, k1, v0, v1, q_base, g_base, qd0, qd1, gd0, gd1, LSE + row, INNER + row, dq_base,
                stride_ql, stride_gl, stride_dql, columns, first, clear, queries, D, DV, to_log2,
                D0, D1, V0, V1, BM, EVEN_D, EVEN_V, EVEN_Q, DESC, True, FUSED, STAGES,
            )  # fmt: skip
        dk0, dk1, dv0, dv1 = _keys_span(
            dk0, dk1, dv0, dv1, k0, k1, v0, v1, q_base, g_base, qd0, qd1, gd0, gd1, LSE + row, INNER + row, dq_base,
            stride_ql, stride_gl, stride_dql, columns, clear, queries, queries, D, DV, to_log2,
            D0, D1, V0, V1, BM, EVEN_D, EVEN_V, EVEN_Q, DESC, False, FUSED, STAGES,
        )  # fmt: skip

    dk_base = DK + batch.to(tl.int64) * stride_dkb + kv_head.to(tl.int64) * stride_dkh
    dv_base = DV_OUT + batch.to(tl.int64) * stride_dvb + kv_head.to(tl.int64) * stride_dvh
    _store(dk_base, columns, stride_dkl, keys, D, dk0 * scale, 0, D0)
    _store(dv_base, columns, stride_dvl, keys, DV, dv0, 0, V0)
    if D1 > 0:
        _store(dk_base, columns, stride_dkl, keys, D, dk1 * scale, D0, D1)
    if V1 > 0:
        _store(dv_base, columns, stride_dvl, keys, DV, dv1, V0, V1)


@triton.jit
def _queries_span(
    dq0, dq1, q0, q1, g0, g1, k_base, v_base, kd0, kd1, vd0, vd1, lse2, inner,
    stride_kl, stride_vl, rows, low, high, keys, D, DV, to_log2,
    D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, BN: tl.constexpr, EVEN_D: tl.constexpr,
    EVEN_V: tl.constexpr, EVEN_K: tl.constexpr, DESC: tl.constexpr, DIAGONAL: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    for start in tl.range(low, high, BN, num_stages=STAGES):
        columns = start + tl.arange(0, BN)
        k0 = _tile(k_base, kd0, start, stride_kl, keys, D, 0, BN, D0, EVEN_D or D1 > 0, EVEN_K, DESC)
        v0 = _tile(v_base, vd0, start, stride_vl, keys, DV, 0, BN, V0, EVEN_V or V1 > 0, EVEN_K, DESC)
        s = tl.dot(q0, tl.trans(k0))
        k1 = k0
        if D1 > 0:
            k1 = _tile(k_base, kd1, start, stride_kl, keys, D, D0, BN, D1, EVEN_D, EVEN_K, DESC)
            s = tl.dot(q1, tl.trans(k1), s)
        p = _weights(s, lse2[:, None], to_log2)
        if DIAGONAL:
            p = tl.where(columns[None, :] <= rows[:, None], p, 0.0)
        dp = tl.dot(g0, tl.trans(v0))
        if V1 > 0:
            v1 = _tile(v_base, vd1, start, stride_vl, keys, DV, V0, BN, V1, EVEN_V, EVEN_K, DESC)
            dp = tl.dot(g1, tl.trans(v1), dp)
        ds = (p * (dp - inner[:, None])).to(k0.dtype)
        dq0 = tl.dot(ds, k0, dq0)
        if D1 > 0:
            dq1 = tl.dot(ds, k1, dq1)
    return dq0, dq1


@triton.jit
def attention_backward_queries(
    Q, K, V, G, LSE, INNER, DQ,
    stride_qb, stride_qh, stride_ql, stride_kb, stride_kh, stride_kl, stride_vb, stride_vh, stride_vl,
    stride_gb, stride_gh, stride_gl, stride_dqb, stride_dqh, stride_dql, heads, group, queries, keys, D, DV, scale,
    D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, EVEN_D: tl.constexpr,
    EVEN_V: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, EVEN_K: tl.constexpr, CAUSAL: tl.constexpr,
    DESC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """DQ [B, H, Lq, D]. Grid (blocks of queries, B * H)."""
    block = tl.num_programs(0) - 1 - tl.program_id(0) if CAUSAL else tl.program_id(0)
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    rows = block * BM + tl.arange(0, BM)
    inside = rows < queries
    q_base = Q + batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh
    g_base = G + batch.to(tl.int64) * stride_gb + head.to(tl.int64) * stride_gh
    k_base = K + batch.to(tl.int64) * stride_kb + (head // group).to(tl.int64) * stride_kh
    v_base = V + batch.to(tl.int64) * stride_vb + (head // group).to(tl.int64) * stride_vh
    q0 = _load(q_base, rows, stride_ql, queries, D, 0, D0, EVEN_D or D1 > 0, False)
    g0 = _load(g_base, rows, stride_gl, queries, DV, 0, V0, EVEN_V or V1 > 0, False)
    q1, g1 = q0, g0
    if D1 > 0:
        q1 = _load(q_base, rows, stride_ql, queries, D, D0, D1, EVEN_D, False)
    if V1 > 0:
        g1 = _load(g_base, rows, stride_gl, queries, DV, V0, V1, EVEN_V, False)
    row = tl.program_id(1).to(tl.int64) * queries
    lse2 = tl.load(LSE + row + rows, mask=inside, other=float("inf")) * LOG2E
    inner = tl.load(INNER + row + rows, mask=inside, other=0.0)
    kd0 = _describe(k_base, keys, D, stride_kl, BN, D0, DESC)
    kd1 = _describe(k_base, keys, D, stride_kl, BN, D1, DESC)
    vd0 = _describe(v_base, keys, DV, stride_vl, BN, V0, DESC)
    vd1 = _describe(v_base, keys, DV, stride_vl, BN, V1, DESC)
    dq0 = tl.zeros([BM, D0], tl.float32)
    dq1 = tl.zeros([BM, D1 if D1 > 0 else 16], tl.float32)
    to_log2 = scale * LOG2E
    clear = keys
    if CAUSAL:
        clear = tl.minimum(keys, block * BM // BN * BN)
    dq0, dq1 = _queries_span(
        dq0, dq1, q0, q1, g0, g1, k_base, v_base, kd0, kd1, vd0, vd1, lse2, inner,
        stride_kl, stride_vl, rows, 0, clear, keys, D, DV, to_log2,
        D0, D1, V0, V1, BN, EVEN_D, EVEN_V, EVEN_K, DESC, False, STAGES,
    )  # fmt: skip
    if CAUSAL:
        end = tl.minimum(keys, (block + 1) * BM)
        dq0, dq1 = _queries_span(
            dq0, dq1, q0, q1, g0, g1, k_base, v_base, kd0, kd1, vd0, vd1, lse2, inner,
            stride_kl, stride_vl, rows, clear, end, keys, D, DV, to_log2,
            D0, D1, V0, V1, BN, EVEN_D, EVEN_V, EVEN_K, DESC, True, STAGES,
        )  # fmt: skip
    dq_base = DQ + batch.to(tl.int64) * stride_dqb + head.to(tl.int64) * stride_dqh
    _store(dq_base, rows, stride_dql, queries, D, dq0 * scale, 0, D0)
    if D1 > 0:
        _store(dq_base, rows, stride_dql, queries, D, dq1 * scale, D0, D1)


@triton.jit
def attention_scale_sums(SUMS, DQ, count, scale, C: tl.constexpr):
    """DQ = scale * SUMS, ``count`` float32 numbers, in DQ's dtype."""
    at = tl.program_id(0).to(tl.int64) * C + tl.arange(0, C)
    x = tl.load(SUMS + at, mask=at < count, other=0.0)
    tl.store(DQ + at, (x * scale).to(DQ.dtype.element_ty), mask=at < count)
