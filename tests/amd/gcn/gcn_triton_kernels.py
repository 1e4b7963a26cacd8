"""Small Triton kernels that the executor's tests compile for both targets."""

import triton
import triton.language as tl


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    tl.store(out + i, tl.load(x + i, mask=mask) + tl.load(y + i, mask=mask), mask=mask)


@triton.jit
def softmax(x, out, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    v = tl.load(x + row * n + i, mask=i < n, other=-float("inf"))
    v = tl.exp(v - tl.max(v, 0))
    tl.store(out + row * n + i, v / tl.sum(v, 0), mask=i < n)


@triton.jit
def transpose(x, out, M, N, BLOCK: tl.constexpr):
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (m[:, None] < M) & (n[None, :] < N)
    v = tl.load(x + m[:, None] * N + n[None, :], mask=inside)
    tl.store(out + n[:, None] * M + m[None, :], tl.trans(v), mask=tl.trans(inside))


@triton.jit
def quantize_rows(x, q, scale, n, MAX: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    v = tl.load(x + row * n + i, mask=i < n, other=0.0).to(tl.float32)
    encode = tl.div_rn(MAX, tl.maximum(tl.max(tl.abs(v), 0), 1e-12))
    tl.store(q + row * n + i, tl.clamp(v * encode, -MAX, MAX).to(q.dtype.element_ty), mask=i < n)
    tl.store(scale + row, tl.div_rn(1.0, encode))


@triton.jit
def matmul(
    a,
    b,
    c,
    M,
    N,
    K,
    stride_an,
    stride_ak,
    stride_bn,
    stride_bk,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """c[M, N] = a[M, K] @ b[N, K].T with any strides; edges are masked."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        inside = start + k < K
        x = tl.load(
            a + m[:, None] * stride_an + (start + k)[None, :] * stride_ak,
            mask=(m[:, None] < M) & inside[None, :],
            other=0.0,
        )
        y = tl.load(
            b + n[None, :] * stride_bn + (start + k)[:, None] * stride_bk,
            mask=(n[None, :] < N) & inside[:, None],
            other=0.0,
        )
        acc = tl.dot(x, y, acc)
    tl.store(c + m[:, None] * N + n[None, :], acc, mask=(m[:, None] < M) & (n[None, :] < N))


@triton.jit
def scaled_matmul(
    a,
    b,
    sa,
    sb,
    c,
    M,
    N,
    K,
    FORMAT: tl.constexpr,
    PACK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """c[M, N] = (a * sa)[M, K] @ (b * sb)[N, K].T with one E8M0 scale for 32 elements along K."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK // PACK)
    ks = tl.arange(0, BK // 32)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        x = tl.load(a + m[:, None] * (K // PACK) + (start // PACK + k)[None, :])
        y = tl.load(b + n[None, :] * (K // PACK) + (start // PACK + k)[:, None])
        s = tl.load(sa + m[:, None] * (K // 32) + (start // 32 + ks)[None, :])
        t = tl.load(sb + n[:, None] * (K // 32) + (start // 32 + ks)[None, :])
        acc = tl.dot_scaled(x, s, FORMAT, y, t, FORMAT, acc)
    tl.store(c + m[:, None] * N + n[None, :], acc)


@triton.jit
def attention(q, k, v, out, L, scale, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr):
    """Causal attention of one head; `scale` includes log2(e)."""
    block, head = tl.program_id(0), tl.program_id(1)
    m, n, d = block * BM + tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, D)
    base = head * L * D
    queries = tl.load(q + base + m[:, None] * D + d[None, :], mask=m[:, None] < L, other=0.0)
    top, total, acc = (
        tl.full((BM,), -float("inf"), tl.float32),
        tl.zeros((BM,), tl.float32),
        tl.zeros((BM, D), tl.float32),
    )
    for start in range(0, (block + 1) * BM, BN):
        j = start + n
        keys = tl.load(k + base + j[None, :] * D + d[:, None], mask=j[None, :] < L, other=0.0)
        s = tl.dot(queries, keys) * scale
        s = tl.where((m[:, None] >= j[None, :]) & (j[None, :] < L), s, -float("inf"))
        new = tl.maximum(top, tl.max(s, 1))
        p, shrink = tl.exp2(s - new[:, None]), tl.exp2(top - new)
        total, acc, top = total * shrink + tl.sum(p, 1), acc * shrink[:, None], new
        values = tl.load(v + base + j[:, None] * D + d[None, :], mask=j[:, None] < L, other=0.0)
        acc = tl.dot(p.to(values.dtype), values, acc)
    tl.store(out + base + m[:, None] * D + d[None, :], acc / total[:, None], mask=m[:, None] < L)


@triton.jit
def sort_rows(x, out, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.sort(tl.load(x + i), descending=True))


@triton.jit
def scan_and_reduce(x, prefix, largest, where, total, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    v = tl.load(x + row * BLOCK + tl.arange(0, BLOCK))
    tl.store(prefix + row * BLOCK + tl.arange(0, BLOCK), tl.cumsum(v, 0))
    top, index = tl.max(v, 0, return_indices=True)
    tl.store(largest + row, top)
    tl.store(where + row, index)
    tl.atomic_add(total, tl.sum(v, 0))


@triton.jit
def integers(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.load(x + i, mask=i < n, other=1), tl.load(y + i, mask=i < n, other=1)
    wide = (a.to(tl.int64) * b.to(tl.int64) >> 7).to(tl.int32)
    tl.store(out + i, a // b + a % b + wide + (a << (b & 7)) + tl.abs(a), mask=i < n)


@triton.jit
def functions(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n, other=1.0)
    r = (
        tl.sqrt_rn(v)
        + tl.rsqrt(v)
        + tl.log(v)
        + tl.sin(v)
        + tl.cos(v)
        + tl.erf(v)
        + tl.floor(v)
        + tl.sigmoid(v)
        + v / 3.0
    )
    tl.store(out + i, r, mask=i < n)


@triton.jit
def target_name(out):
    """Writes 1 on HIP: only with an active driver does Triton know at compile time."""
    if tl.target_info.is_hip():
        tl.store(out, 1)
    else:
        tl.store(out, 2)
