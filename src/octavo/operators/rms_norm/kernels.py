"""RMSNorm kernels: y = x * rstd * w with rstd = 1 / sqrt(mean(x^2) + eps) over the last axis, and its gradient

    dx = rstd * (g w - x rstd^2 mean(g w x)),    dw = sum over rows of g x rstd        (float32 inside)

Three designs by shape. ``*_rows``: whole rows in the registers of a program, several short rows at once, a loop over
rows with the next ones on their way (``STAGES``). ``forward_long``: a row too long for that is read twice by one
program, the second time from the L2 cache. ``*_partial`` with ``*_apply``: few long rows split over programs, which
meet in a small float32 buffer between two launches. Weight gradients go through a buffer [programs, n] that
``sum_partials`` adds in a fixed order, so that they are the same in every run.

A row is cut into ``CHUNKS`` tensors of ``C`` columns, any number of them, so a row of 4097 wastes a fraction of a chunk
instead of rounding up to 8192.
"""

import triton
import triton.language as tl


@triton.jit
def _load(ptr, rows, row_mask, cols, n, stride, EVEN: tl.constexpr, MASK_ROWS: tl.constexpr):
    """[R, C] of rows with stride ``stride`` and unit column stride; zero outside."""
    offsets = rows.to(tl.int64)[:, None] * stride + cols[None, :]
    if EVEN:
        if MASK_ROWS:
            tile = tl.load(ptr + offsets, mask=row_mask[:, None], other=0.0)
        else:
            tile = tl.load(ptr + offsets)
    else:
        tile = tl.load(ptr + offsets, mask=row_mask[:, None] & (cols < n)[None, :], other=0.0)
    return tile


@triton.jit
def _store(ptr, value, rows, row_mask, cols, n, EVEN: tl.constexpr, MASK_ROWS: tl.constexpr):
    offsets = rows.to(tl.int64)[:, None] * n + cols[None, :]
    value = value.to(ptr.dtype.element_ty)
    if EVEN:
        if MASK_ROWS:
            tl.store(ptr + offsets, value, mask=row_mask[:, None])
        else:
            tl.store(ptr + offsets, value)
    else:
        tl.store(ptr + offsets, value, mask=row_mask[:, None] & (cols < n)[None, :])


@triton.jit
def _weight(w_ptr, cols, n, EVEN: tl.constexpr, HAS_WEIGHT: tl.constexpr):
    """float32 [1, C]."""
    if HAS_WEIGHT:
        if EVEN:
            w = tl.load(w_ptr + cols)
        else:
            w = tl.load(w_ptr + cols, mask=cols < n, other=0.0)
    else:
        w = tl.full([cols.shape[0]], 1.0, tl.float32)
    return w.to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["m"])
def forward_rows(
    x_ptr,
    w_ptr,
    y_ptr,
    rstd_ptr,
    m,
    n,
    x_stride,
    eps,
    R: tl.constexpr,
    C: tl.constexpr,
    CHUNKS: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HOLD_WEIGHT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """x [m, n] with row stride -> y [m, n] contiguous, rstd float32 [m]. ``C * CHUNKS >= n``, equal when ``EVEN``.

    Each program takes every ``num_programs``-th group of ``R`` rows. ``HOLD_WEIGHT`` keeps the weight in registers.
    """
    ws = ()
    if HOLD_WEIGHT:
        for j in tl.static_range(CHUNKS):
            ws = ws + (_weight(w_ptr, j * C + tl.arange(0, C), n, EVEN, HAS_WEIGHT),)
    for group in tl.range(tl.program_id(0), tl.cdiv(m, R), tl.num_programs(0), num_stages=STAGES):
        rows = group * R + tl.arange(0, R)
        row_mask = rows < m
        xs = ()
        squares = tl.zeros([R, C], tl.float32)
        for j in tl.static_range(CHUNKS):
            x = _load(x_ptr, rows, row_mask, j * C + tl.arange(0, C), n, x_stride, EVEN, R > 1)
            xs = xs + (x,)
            squares += x.to(tl.float32) * x.to(tl.float32)
        rstd = tl.rsqrt(tl.sum(squares, axis=1) / n + eps)
        tl.store(rstd_ptr + rows, rstd, mask=row_mask)
        for j in tl.static_range(CHUNKS):
            cols = j * C + tl.arange(0, C)
            y = xs[j].to(tl.float32) * rstd[:, None]
            if HOLD_WEIGHT:
                y = y * ws[j]
            elif HAS_WEIGHT:
                y = y * _weight(w_ptr, cols, n, EVEN, HAS_WEIGHT)
            _store(y_ptr, y, rows, row_mask, cols, n, EVEN, R > 1)


@triton.jit
def forward_long(
    x_ptr,
    w_ptr,
    y_ptr,
    rstd_ptr,
    n,
    x_stride,
    eps,
    C: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
):
    """As ``forward_rows``, one program a row of any length; ``EVEN``: n is a multiple of ``C``."""
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros([C], tl.float32)
    for start in range(0, n, C):
        cols = start + tl.arange(0, C)
        if EVEN:
            x = tl.load(x_ptr + row * x_stride + cols, eviction_policy="evict_last")
        else:
            x = tl.load(x_ptr + row * x_stride + cols, mask=cols < n, other=0.0, eviction_policy="evict_last")
        squares += x.to(tl.float32) * x.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / n + eps)
    tl.store(rstd_ptr + row, rstd)
    for start in range(0, n, C):
        cols = start + tl.arange(0, C)
        if EVEN:
            x = tl.load(x_ptr + row * x_stride + cols, eviction_policy="evict_first")
        else:
            x = tl.load(
                x_ptr + row * x_stride + cols, mask=cols < n, other=0.0, eviction_policy="evict_first"
            )
        y = x.to(tl.float32) * rstd
        if HAS_WEIGHT:
            y = y * tl.load(w_ptr + cols, mask=cols < n, other=0.0).to(tl.float32)
        y = y.to(y_ptr.dtype.element_ty)
        if EVEN:
            tl.store(y_ptr + row * n + cols, y)
        else:
            tl.store(y_ptr + row * n + cols, y, mask=cols < n)


@triton.jit
def forward_partial(x_ptr, partial_ptr, n, span, x_stride, SPLITS: tl.constexpr, C: tl.constexpr):
    """partial float32 [m, SPLITS]: sums of squares over ``span`` columns (a multiple of ``C``); grid (m, SPLITS)."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    squares = tl.zeros([C], tl.float32)
    for start in range(split * span, tl.minimum(split * span + span, n), C):
        cols = start + tl.arange(0, C)
        x = tl.load(x_ptr + row * x_stride + cols, mask=cols < n, other=0.0).to(tl.float32)
        squares += x * x
    tl.store(partial_ptr + row * SPLITS + split, tl.sum(squares, axis=0))


@triton.jit
def forward_apply(
    x_ptr,
    w_ptr,
    y_ptr,
    rstd_ptr,
    partial_ptr,
    n,
    span,
    x_stride,
    eps,
    SPLITS: tl.constexpr,
    C: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
):
    """The second launch of a split forward; grid and ``span`` as in ``forward_partial``."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    total = tl.sum(tl.load(partial_ptr + row * SPLITS + tl.arange(0, SPLITS)), axis=0)
    rstd = tl.rsqrt(total / n + eps)
    if split == 0:
        tl.store(rstd_ptr + row, rstd)
    for start in range(split * span, tl.minimum(split * span + span, n), C):
        cols = start + tl.arange(0, C)
        y = tl.load(x_ptr + row * x_stride + cols, mask=cols < n, other=0.0).to(tl.float32) * rstd
        if HAS_WEIGHT:
            y = y * tl.load(w_ptr + cols, mask=cols < n, other=0.0).to(tl.float32)
        tl.store(y_ptr + row * n + cols, y.to(y_ptr.dtype.element_ty), mask=cols < n)


@triton.jit(do_not_specialize=["m"])
def backward_rows(
    g_ptr,
    x_ptr,
    w_ptr,
    rstd_ptr,
    dx_ptr,
    partial_ptr,
    m,
    n,
    g_stride,
    x_stride,
    R: tl.constexpr,
    C: tl.constexpr,
    CHUNKS: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    NEED_DX: tl.constexpr,
    NEED_DW: tl.constexpr,
    STAGES: tl.constexpr,
):
    """g, x [m, n] with row strides, rstd [m] -> dx [m, n] contiguous, partial float32 [num_programs, n]."""
    ws = ()
    sums = ()
    for j in tl.static_range(CHUNKS):
        ws = ws + (_weight(w_ptr, j * C + tl.arange(0, C), n, EVEN, HAS_WEIGHT),)
        if NEED_DW:
            sums = sums + (tl.zeros([R, C], tl.float32),)
    for group in tl.range(tl.program_id(0), tl.cdiv(m, R), tl.num_programs(0), num_stages=STAGES):
        rows = group * R + tl.arange(0, R)
        row_mask = rows < m
        rstd = tl.load(rstd_ptr + rows, mask=row_mask, other=0.0)[:, None]
        xs = ()
        gs = ()
        dot = tl.zeros([R, C], tl.float32)
        for j in tl.static_range(CHUNKS):
            cols = j * C + tl.arange(0, C)
            x = _load(x_ptr, rows, row_mask, cols, n, x_stride, EVEN, R > 1)
            g = _load(g_ptr, rows, row_mask, cols, n, g_stride, EVEN, R > 1)
            xs = xs + (x,)
            gs = gs + (g,)
            dot += g.to(tl.float32) * ws[j] * x.to(tl.float32)
        factor = tl.sum(dot, axis=1)[:, None] * (rstd * rstd) / n
        more = ()
        for j in tl.static_range(CHUNKS):
            cols = j * C + tl.arange(0, C)
            x = xs[j].to(tl.float32)
            g = gs[j].to(tl.float32)
            if NEED_DX:
                dx = rstd * (g * ws[j] - x * factor)
                _store(dx_ptr, dx, rows, row_mask, cols, n, EVEN, R > 1)
            if NEED_DW:
                more = more + (sums[j] + g * (x * rstd),)
        sums = more
    if NEED_DW:
        for j in tl.static_range(CHUNKS):
            cols = j * C + tl.arange(0, C)
            total = tl.sum(sums[j], axis=0)
            where = partial_ptr + tl.program_id(0).to(tl.int64) * n + cols
            if EVEN:
                tl.store(where, total)
            else:
                tl.store(where, total, mask=cols < n)


@triton.jit
def backward_partial(
    g_ptr,
    x_ptr,
    w_ptr,
    partial_ptr,
    n,
    span,
    g_stride,
    x_stride,
    SPLITS: tl.constexpr,
    C: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
):
    """partial float32 [m, SPLITS]: sums of g w x over ``span`` columns (a multiple of ``C``); grid (m, SPLITS)."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    dot = tl.zeros([C], tl.float32)
    for start in range(split * span, tl.minimum(split * span + span, n), C):
        cols = start + tl.arange(0, C)
        x = tl.load(x_ptr + row * x_stride + cols, mask=cols < n, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + row * g_stride + cols, mask=cols < n, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            g = g * tl.load(w_ptr + cols, mask=cols < n, other=0.0).to(tl.float32)
        dot += g * x
    tl.store(partial_ptr + row * SPLITS + split, tl.sum(dot, axis=0))


@triton.jit(do_not_specialize=["m"])
def backward_apply(
    g_ptr,
    x_ptr,
    w_ptr,
    rstd_ptr,
    dot_ptr,
    dx_ptr,
    partial_ptr,
    m,
    n,
    g_stride,
    x_stride,
    SPLITS: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    NEED_DX: tl.constexpr,
    NEED_DW: tl.constexpr,
):
    """The second launch of a split backward: ``C`` columns of every ``num_programs(1)``-th group of ``R`` rows.

    dot float32 [m, SPLITS] of ``backward_partial``; partial float32 [num_programs(1), n].
    """
    cols = tl.program_id(0) * C + tl.arange(0, C)
    in_row = cols < n
    w = _weight(w_ptr, cols, n, False, HAS_WEIGHT)
    sums = tl.zeros([R, C], tl.float32)
    for group in range(tl.program_id(1), tl.cdiv(m, R), tl.num_programs(1)):
        rows = group * R + tl.arange(0, R)
        row_mask = rows < m
        rstd = tl.load(rstd_ptr + rows, mask=row_mask, other=0.0)[:, None]
        dots = dot_ptr + rows.to(tl.int64)[:, None] * SPLITS + tl.arange(0, SPLITS)[None, :]
        dot = tl.sum(tl.load(dots, mask=row_mask[:, None], other=0.0), axis=1)[:, None]
        factor = dot * (rstd * rstd) / n
        x = _load(x_ptr, rows, row_mask, cols, n, x_stride, False, True).to(tl.float32)
        g = _load(g_ptr, rows, row_mask, cols, n, g_stride, False, True).to(tl.float32)
        if NEED_DX:
            _store(dx_ptr, rstd * (g * w - x * factor), rows, row_mask, cols, n, False, True)
        if NEED_DW:
            sums += g * (x * rstd)
    if NEED_DW:
        where = partial_ptr + tl.program_id(1).to(tl.int64) * n + cols
        tl.store(where, tl.sum(sums, axis=0), mask=in_row)


@triton.jit(do_not_specialize=["count"])
def sum_partials(partial_ptr, dw_ptr, count, n, P: tl.constexpr, C: tl.constexpr):
    """dw [n] = the sum of partial float32 [count, n] over its rows, always in the same order."""
    cols = tl.program_id(0) * C + tl.arange(0, C)
    sums = tl.zeros([P, C], tl.float32)
    for start in range(0, count, P):
        rows = start + tl.arange(0, P)
        mask = (rows < count)[:, None] & (cols < n)[None, :]
        sums += tl.load(partial_ptr + rows.to(tl.int64)[:, None] * n + cols[None, :], mask=mask, other=0.0)
    tl.store(dw_ptr + cols, tl.sum(sums, axis=0).to(dw_ptr.dtype.element_ty), mask=cols < n)
