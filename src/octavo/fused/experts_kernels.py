"""Triton kernels of the expert MLP's producers that are no quantization: SwiGLU's backward, and the sum over choices.

Both read rows once and write them once; what they compute in between is float32, rounded where the reference rounds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.quantize.source_kernels import sigmoid


@triton.jit(do_not_specialize=["R"])
def swiglu_backward_rows(
    h, grad, scores, dh, act, d_scores, R, F, hm, gm,
    SCORED: tl.constexpr, DH: tl.constexpr, ACT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Gradient of h = [gate | up] [R, 2 F] and the scaled activation [R, F], and the gradient of the scores [R].

    A program walks along its rows, so that the sum over F needs no second pass and no atomics.
    """
    i = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    live = i < R
    row = i.to(tl.int64)[:, None]
    if SCORED:
        s = tl.load(scores + i, mask=live, other=0.0)[:, None]
        total = tl.zeros((BLOCK_R, BLOCK_F), tl.float32)
    for start in range(0, F, BLOCK_F):
        j = start + tl.arange(0, BLOCK_F)[None, :]
        mask = live[:, None] & (j < F)
        loaded = tl.load(h + row * hm + j, mask=mask, other=0.0)
        gate = loaded.to(tl.float32)
        up = tl.load(h + row * hm + F + j, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(grad + row * gm + j, mask=mask, other=0.0).to(tl.float32)
        s_gate = sigmoid(gate)
        a = gate * s_gate * up
        if SCORED:
            total += g * a
            a = a * s
            g = g * s
        if DH:
            d_gate = g * up * (s_gate * (1.0 + gate * (1.0 - s_gate)))
            d_up = g * (gate * s_gate)
            tl.store(dh + row * (2 * F) + j, d_gate.to(loaded.dtype), mask=mask)
            tl.store(dh + row * (2 * F) + F + j, d_up.to(loaded.dtype), mask=mask)
        if ACT:
            tl.store(act + row * F + j, a.to(loaded.dtype), mask=mask)
    if SCORED:
        tl.store(d_scores + i, tl.sum(total, 1), mask=live)


@triton.jit(do_not_specialize=["T", "choices", "tiles_d"])
def combine_rows(
    y, back, scores, out, T, D, ym, choices, tiles_d,
    SCORED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """``sum over j of scores[t, j] * y[back[t, j]]`` in the order of j, float32, rounded once."""
    pid = tl.program_id(0)
    t = pid // tiles_d * BLOCK_T + tl.arange(0, BLOCK_T)
    j = pid % tiles_d * BLOCK_D + tl.arange(0, BLOCK_D)
    live = t < T
    token = t.to(tl.int64)
    mask = live[:, None] & (j < D)[None, :]
    total = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for choice in range(choices):
        row = tl.load(back + token * choices + choice, mask=live, other=0)
        found = tl.load(y + row[:, None] * ym + j[None, :], mask=mask, other=0.0).to(tl.float32)
        if SCORED:
            found = found * tl.load(scores + token * choices + choice, mask=live, other=0.0)[:, None]
        total += found
    tl.store(out + token[:, None] * D + j[None, :], total.to(out.dtype.element_ty), mask=mask)
