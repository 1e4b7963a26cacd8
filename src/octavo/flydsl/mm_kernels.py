"""Dense BF16 product in FlyDSL for gfx950: a[M, K] @ b[N, K].T by v_mfma_f32_32x32x16_bf16.

A workgroup of four waves makes a tile of 128 x 128, each wave a quarter of 64 x 64. Tiles of 64 along K go through
LDS; the next one is in registers while the present one is multiplied. Operands stand exchanged in the matrix
instruction, so that a lane ends with four neighbours of one row of the result and stores them at once.

FlyDSL reads annotations as objects: no `from __future__ import annotations` here.
"""

from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import rocdl

from octavo.compile_cases import CompileCase
from octavo.flydsl.kernel import FlyKernel
from octavo.flydsl.plan import MM_K, MM_TILE, WAVE

WIDTH = 8
"""Values of one load or LDS read of a lane, 16 bytes."""
PITCH = MM_K + WIDTH
"""LDS row: 16 bytes of padding spread the rows that a wave reads at once over the banks."""
THREADS = 256
PIECES = MM_TILE * MM_K // (THREADS * WIDTH)
"""Loads of a thread for one tile of one operand."""


def flydsl_mm() -> Any:
    """c[m, n] = bf16(sum over k of a[m, k] * b[n, k]), summed in float32; N and K multiples of 8, M any."""
    in_row = MM_K // WIDTH
    rows_at_once = THREADS // in_row

    @flyc.kernel(known_block_size=[THREADS, 1, 1])
    def flydsl_mm(
        a: fx.Pointer, b: fx.Pointer, c: fx.Pointer, M: fx.Int32, N: fx.Int32, K: fx.Int32,
        stride_a: fx.Int64, stride_b: fx.Int64,
    ):  # fmt: skip
        thread = fx.thread_idx.x
        lane, wave = thread % WAVE, thread // WAVE
        first_m, first_n = fx.block_idx.x * MM_TILE, fx.block_idx.y * MM_TILE
        shared = fx.SharedAllocator()
        a_tile = shared.allocate(fx.Array[fx.BFloat16, MM_TILE * PITCH, 16]).peek().ptr
        b_tile = shared.allocate(fx.Array[fx.BFloat16, MM_TILE * PITCH, 16]).peek().ptr
        my_row, my_column = thread // in_row, thread % in_row * WIDTH
        nothing = fx.Vector.filled(WIDTH, 0.0, fx.BFloat16)

        def load(pointer, stride, first, rows, k):
            """Pieces of a tile; rows past the end repeat the last one, columns past it are zero."""
            pieces = []
            column = k + my_column
            inside = column < K
            for piece in fx.range_constexpr(PIECES):
                row = first + my_row + piece * rows_at_once
                row = (row < rows).select(row, rows - 1)
                offset = fx.Int64(row) * stride + fx.Int64(inside.select(column, fx.Int32(0)))
                values = fx.generic_load(pointer + offset, count=WIDTH)
                pieces.append(inside.select(values, nothing))
            return pieces

        def place(tile, pieces):
            for piece in fx.range_constexpr(PIECES):
                row = my_row + piece * rows_at_once
                fx.generic_store(tile + (row * PITCH + my_column), pieces[piece])

        def fragment(tile, first, k):
            """Operand of the matrix instruction: row lane % 32, eight values of K from 8 * (lane // 32)."""
            return fx.generic_load(tile + ((first + lane % 32) * PITCH + k + lane // 32 * WIDTH), count=WIDTH)

        m_of_wave, n_of_wave = wave % 2 * 64, wave // 2 * 64
        zero = fx.Vector.filled(16, 0.0, fx.Float32)
        sums = [zero, zero, zero, zero]
        zero_k = fx.Int32(0)
        start = [
            *sums,
            *load(a, stride_a, first_m, M, zero_k),
            *load(b, stride_b, first_n, N, zero_k),
        ]
        for k, state in range(0, K, MM_K, init=start):
            sums = list(state[:4])
            fx.gpu.barrier()
            place(a_tile, state[4 : 4 + PIECES])
            place(b_tile, state[4 + PIECES :])
            fx.gpu.barrier()
            after = fx.Int32(k) + MM_K
            next_a = load(a, stride_a, first_m, M, after)
            next_b = load(b, stride_b, first_n, N, after)
            for step in fx.range_constexpr(MM_K // 16):
                left = [fragment(a_tile, m_of_wave + 32 * i, step * 16) for i in (0, 1)]
                right = [fragment(b_tile, n_of_wave + 32 * j, step * 16) for j in (0, 1)]
                for i in fx.range_constexpr(2):
                    for j in fx.range_constexpr(2):
                        place_of = 2 * i + j
                        product = rocdl.mfma_f32_32x32x16_bf16(
                            zero.type, [right[j], left[i], sums[place_of], 0, 0, 0]
                        )
                        sums[place_of] = fx.Vector(product, (16,), fx.Float32)
            result = yield [*sums, *next_a, *next_b]
        for i in fx.range_constexpr(2):
            m = first_m + m_of_wave + 32 * i + lane % 32
            for j in fx.range_constexpr(2):
                values = result[2 * i + j].to(fx.BFloat16)
                for four in fx.range_constexpr(4):
                    n = first_n + n_of_wave + 32 * j + 8 * four + 4 * (lane // 32)
                    if (m < M) & (n < N):
                        part = fx.Vector.from_elements([values[4 * four + e] for e in range(4)], fx.BFloat16)
                        fx.generic_store(c + (fx.Int64(m) * fx.Int64(N) + fx.Int64(n)), part)

    @flyc.jit
    def launch(
        a: fx.Pointer, b: fx.Pointer, c: fx.Pointer, M: fx.Int32, N: fx.Int32, K: fx.Int32,
        stride_a: fx.Int64, stride_b: fx.Int64,
        grid_x: fx.Int32, grid_y: fx.Int32, grid_z: fx.Int32, stream: fx.Stream,
    ):  # fmt: skip
        flydsl_mm(a, b, c, M, N, K, stride_a, stride_b).launch(
            grid=(grid_x, grid_y, grid_z), block=(THREADS, 1, 1), stream=stream
        )

    return launch


SIGNATURE = {
    "a": "*bf16", "b": "*bf16", "c": "*bf16", "M": "i32", "N": "i32", "K": "i32", "stride_a": "i64", "stride_b": "i64",
}  # fmt: skip


def mm_case() -> CompileCase:
    """The one configuration: sizes and strides are run-time arguments."""
    return CompileCase(
        kernel="flydsl_mm", configuration="bf16 128x128x64", room="flydsl", kind="product bf16",
        function=FlyKernel(flydsl_mm), signature=SIGNATURE, divisible=("a", "b", "c"), num_warps=THREADS // WAVE,
    )  # fmt: skip


def compile_cases(target: str) -> list[CompileCase]:
    """The product's only configuration, on gfx950."""
    return [mm_case()] if target == "gfx950" else []
