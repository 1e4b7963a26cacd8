"""Triton kernels of the fused producers whose values feed more than one output.

The gradient of h = [gate | up] and the activation come from one read of h and of the incoming gradient; each is
rounded to the dtype of h and then quantized by the tiles of :mod:`octavo.quantize.triton_kernels`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.quantize.numerics_kernels import code_bits, magnitude_bits
from octavo.quantize.source_kernels import sigmoid
from octavo.quantize.triton_kernels import folds, tile_of, tile_rows, write_tile


@triton.jit
def _backward_values(h, grad, i, j, M, F, hm, gm):
    # (d gate, d up, activation) [R, Q, BLOCK_K], 0 past the edges.
    mask = (i < M)[:, :, None] & (j < F)[None, None, :]
    row = i.to(tl.int64)[:, :, None]
    loaded = tl.load(h + row * hm + j[None, None, :], mask=mask, other=0.0)
    gate = loaded.to(tl.float32)
    up = tl.load(h + row * hm + F + j[None, None, :], mask=mask, other=0.0).to(tl.float32)
    g = tl.load(grad + row * gm + j[None, None, :], mask=mask, other=0.0).to(tl.float32)
    s = sigmoid(gate)
    d_gate = g * up * (s * (1.0 + gate * (1.0 - s)))
    d_up = g * (gate * s)
    dtype: tl.constexpr = loaded.dtype
    return d_gate.to(dtype), d_up.to(dtype), (gate * s * up).to(dtype)


@triton.jit(do_not_specialize=["tiles_k", "steps"])
def swiglu_backward_amax(
    h, grad, one, row, column, a_one, a_column, M, F, hm, gm, tiles_k, steps,
    ONE: tl.constexpr, ROW: tl.constexpr, COLUMN: tl.constexpr, A_ONE: tl.constexpr, A_COLUMN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Amax bits of the gradient of h (whole [1], rows [M], columns [2 F]) and of the activation; start at zero."""
    pid = tl.program_id(0)
    tile_m, tile_k = pid // tiles_k, pid % tiles_k
    j = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    gates = tl.zeros((BLOCK_M // R, BLOCK_K), tl.int32)
    ups = tl.zeros((BLOCK_M // R, BLOCK_K), tl.int32)
    acts = tl.zeros((BLOCK_M // R, BLOCK_K), tl.int32)
    for step in range(steps):
        i = tile_rows(tile_m * steps + step, BLOCK_M, R)
        d_gate, d_up, act = _backward_values(h, grad, i, j, M, F, hm, gm)
        gate_bits, up_bits = magnitude_bits(d_gate), magnitude_bits(d_up)
        if ROW:
            both = tl.max(tl.maximum(gate_bits, up_bits), 2)
            tl.atomic_max(row + i, both, mask=i < M, sem="relaxed")
        if COLUMN or ONE:
            gates = tl.maximum(gates, tl.max(gate_bits, 0))
            ups = tl.maximum(ups, tl.max(up_bits, 0))
        if A_COLUMN or A_ONE:
            acts = tl.maximum(acts, tl.max(magnitude_bits(act), 0))
    if COLUMN:
        tl.atomic_max(column + j, tl.max(gates, 0), mask=j < F, sem="relaxed")
        tl.atomic_max(column + F + j, tl.max(ups, 0), mask=j < F, sem="relaxed")
    if ONE:
        tl.atomic_max(one, tl.max(tl.max(tl.maximum(gates, ups), 0), 0), sem="relaxed")
    if A_COLUMN:
        tl.atomic_max(a_column + j, tl.max(acts, 0), mask=j < F, sem="relaxed")
    if A_ONE:
        tl.atomic_max(a_one, tl.max(tl.max(acts, 0), 0), sem="relaxed")


@triton.jit
def _second_half(
    data, scale, F, pitch, scale_pitch,
    ELEMENT: tl.constexpr, CB: tl.constexpr, R: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    # Where the second half of [gate | up] lies in an output of the gradient: a matrix [M, F] of its own.
    blocks = 0 if CB == 0 else tl.cdiv(F, CB)
    if TURNED:
        word: tl.constexpr = code_bits(ELEMENT) * 2 ** folds(ELEMENT, R) // 8
        data += tl.cast(F, tl.int64) * pitch * word
        scale += tl.cast(blocks, tl.int64) * scale_pitch
    else:
        data += F * code_bits(ELEMENT) // 8
        scale += blocks
    return data, scale


@triton.jit(do_not_specialize=["tiles_m", "tiles_k"])
def swiglu_backward_tiles(
    h, grad, direct, direct_scale, direct_amax, turned, turned_scale, turned_amax, act, act_scale, act_amax,
    kept_grad, kept_act, M, F, hm, gm, tiles_m, tiles_k,
    direct_pitch, direct_scale_pitch, turned_pitch, turned_scale_pitch, act_pitch, act_scale_pitch,
    D_ELEMENT: tl.constexpr, D_ROUNDING: tl.constexpr, D_CAST: tl.constexpr,
    D_RB: tl.constexpr, D_CB: tl.constexpr,
    T_ELEMENT: tl.constexpr, T_ROUNDING: tl.constexpr, T_CAST: tl.constexpr,
    T_RB: tl.constexpr, T_CB: tl.constexpr,
    A_ELEMENT: tl.constexpr, A_ROUNDING: tl.constexpr, A_CAST: tl.constexpr,
    A_RB: tl.constexpr, A_CB: tl.constexpr,
    KEEP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, R: tl.constexpr, GROUP: tl.constexpr,
    AGAIN: tl.constexpr,
):  # fmt: skip
    """Write the gradient of h as it lies and transposed, and the activation transposed.

    Column blocks divide F, so that none straddles gate and up. AGAIN loads and computes the values a second time
    for what is written transposed (see ``quantize.triton_kernels.write_tile``).
    """
    tile_m, tile_k = tile_of(tl.program_id(0), tiles_m, tiles_k, GROUP)
    i = tile_rows(tile_m, BLOCK_M, R)
    j = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    d_gate, d_up, a = _backward_values(h, grad, i, j, M, F, hm, gm)
    if KEEP:
        mask = (i < M)[:, :, None] & (j < F)[None, None, :]
        row = i.to(tl.int64)[:, :, None]
        tl.store(kept_grad + row * (2 * F) + j[None, None, :], d_gate, mask=mask)
        tl.store(kept_grad + row * (2 * F) + F + j[None, None, :], d_up, mask=mask)
        tl.store(kept_act + row * F + j[None, None, :], a, mask=mask)
    batch = tl.program_id(1).to(tl.int64)
    for turn in tl.static_range(2 if AGAIN else 1):
        if turn == 1:
            d_gate, d_up, a = _backward_values(h, grad, i, j, M, F, hm, gm)
        for half in tl.static_range(2):
            # A function of Triton 3.6 cannot return None, so absent outputs and amax are seen to here.
            d, d_scale, d_amax = direct, direct_scale, direct_amax
            t, t_scale, t_amax = turned, turned_scale, turned_amax
            if half == 1:
                if D_ELEMENT != "":
                    d, d_scale = _second_half(
                        direct, direct_scale, F, direct_pitch, direct_scale_pitch, D_ELEMENT, D_CB, R, False
                    )
                    if D_RB == 0 and D_CB != 0:
                        d_amax = direct_amax + F
                if T_ELEMENT != "":
                    t, t_scale = _second_half(
                        turned, turned_scale, F, turned_pitch, turned_scale_pitch, T_ELEMENT, T_CB, R, True
                    )
                    if T_RB == 0 and T_CB != 0:
                        t_amax = turned_amax + F
            write_tile(
                d_gate if half == 0 else d_up, d, d_scale, d_amax, t, t_scale, t_amax,
                batch, tile_m, tile_k, M, F,
                direct_pitch, direct_scale_pitch, turned_pitch, turned_scale_pitch, 1,
                D_ELEMENT if turn == 0 else "", D_ROUNDING, D_CAST, D_RB, D_CB,
                T_ELEMENT if turn == 1 or not AGAIN else "", T_ROUNDING, T_CAST, T_RB, T_CB,
                BLOCK_M, BLOCK_K, R, 1, "",
            )  # fmt: skip
    write_tile(
        a, None, None, None, act, act_scale, act_amax, batch, tile_m, tile_k,
        M, F, 0, 0, act_pitch, act_scale_pitch, 1,
        "", "", "", 1, 1, A_ELEMENT, A_ROUNDING, A_CAST, A_RB, A_CB, BLOCK_M, BLOCK_K, R, 1, "",
    )  # fmt: skip
