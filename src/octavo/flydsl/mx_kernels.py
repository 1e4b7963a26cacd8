"""MXFP8 product in FlyDSL for gfx950: scaled a[M, K] @ b[N, K].T by v_mfma_scale_f32_32x32x64_f8f6f4.

Tiles and waves are those of the dense product (`mm_kernels`), with 128 bytes of K in LDS at a time. A lane of the
matrix instruction holds two runs of 16 bytes of K of one row, 32 bytes apart; the scale of the K block of 32 with
number lane // 32 comes from that lane, from a byte of a register that op_sel chooses (AMD CDNA4 ISA, "Matrix
arithmetic with block scaling"). One word of four scales serves both instructions of a tile.

FlyDSL reads annotations as objects: no `from __future__ import annotations` here.
"""

from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import rocdl

from octavo.compile_cases import CompileCase
from octavo.flydsl.kernel import FlyKernel
from octavo.flydsl.plan import MM_TILE, MX_BLOCK, MX_ELEMENTS, MX_K, WAVE

WORDS = MX_K // 4
"""32-bit words of a row of a tile."""
PITCH = WORDS + 4
"""LDS row in words: 16 bytes of padding spread the rows that a wave reads at once over the banks."""
THREADS = 256
PIECES = MM_TILE * WORDS // (THREADS * 4)
"""Loads of a thread, 16 bytes each, for one tile of one operand."""
ONE = 127
"""The e8m0 code of 1.0; 255 would make NaN of the zeros behind the end of K."""


def flydsl_mx_mm(A_FORMAT: int, B_FORMAT: int, WHOLE: bool) -> Any:
    """c[m, n] = bf16(sum over k of a[m, k] * sa[m, k / 32] * b[n, k] * sb[n, k / 32]), summed in float32.

    Args:
        A_FORMAT, B_FORMAT: the instruction's code of the elements: 0 for e4m3fn, 1 for e5m2.
        WHOLE: K is a multiple of 128, so that four scales are one aligned word; else of 32, and scales are bytes.
    """
    in_row = WORDS // 4
    rows_at_once = THREADS // in_row

    @flyc.kernel(known_block_size=[THREADS, 1, 1])
    def flydsl_mx_mm(
        a: fx.Pointer, b: fx.Pointer, scale_a: fx.Pointer, scale_b: fx.Pointer, c: fx.Pointer,
        M: fx.Int32, N: fx.Int32, K: fx.Int32,
    ):  # fmt: skip
        thread = fx.thread_idx.x
        lane, wave = thread % WAVE, thread // WAVE
        group = lane // 32
        first_m, first_n = fx.block_idx.x * MM_TILE, fx.block_idx.y * MM_TILE
        m_of_wave, n_of_wave = wave % 2 * 64, wave // 2 * 64
        shared = fx.SharedAllocator()
        a_tile = shared.allocate(fx.Array[fx.Int32, MM_TILE * PITCH, 16]).peek().ptr
        b_tile = shared.allocate(fx.Array[fx.Int32, MM_TILE * PITCH, 16]).peek().ptr
        my_row, my_word = thread // in_row, thread % in_row * 4
        nothing = fx.Vector.filled(4, 0, fx.Int32)

        def load(pointer, first, rows, k):
            """Pieces of a tile; rows past the end repeat the last one, words past it are zero."""
            pieces = []
            inside = k + my_word * 4 < K
            word = inside.select(k // 4 + my_word, fx.Int32(0))
            for piece in fx.range_constexpr(PIECES):
                row = first + my_row + piece * rows_at_once
                row = (row < rows).select(row, rows - 1)
                offset = fx.Int64(row) * fx.Int64(K // 4) + fx.Int64(word)
                pieces.append(inside.select(fx.generic_load(pointer + offset, count=4), nothing))
            return pieces

        def load_scales(pointer, first, rows, k):
            """A word for each half of the wave's rows: byte 0 is the first instruction's scale, byte 2 the second's."""
            words = []
            for half in fx.range_constexpr(2):
                row = first + 32 * half + lane % 32
                row = (row < rows).select(row, rows - 1)
                if fx.const_expr(WHOLE):
                    column = (k < K).select(k // MX_K, fx.Int32(0))
                    offset = fx.Int64(row) * fx.Int64(K // MX_K) + fx.Int64(column)
                    words.append(fx.shrui(fx.generic_load(pointer + offset), group * 8))
                else:
                    word = fx.Int32(0)
                    for step in fx.range_constexpr(2):
                        column = k // MX_BLOCK + 2 * step + group
                        inside = column < K // MX_BLOCK
                        place = inside.select(column, fx.Int32(0))
                        offset = fx.Int64(row) * fx.Int64(K // MX_BLOCK) + fx.Int64(place)
                        code = inside.select(fx.Int32(fx.generic_load(pointer + offset)), fx.Int32(ONE))
                        word = word | (code << (16 * step))
                    words.append(word)
            return words

        def load_all(k):
            return [
                *load(a, first_m, M, k),
                *load(b, first_n, N, k),
                *load_scales(scale_a, first_m + m_of_wave, M, k),
                *load_scales(scale_b, first_n + n_of_wave, N, k),
            ]

        def place(tile, pieces):
            for piece in fx.range_constexpr(PIECES):
                row = my_row + piece * rows_at_once
                fx.generic_store(tile + (row * PITCH + my_word), pieces[piece])

        def fragment(tile, first, step):
            """Row lane % 32: bytes 16 * group and 32 + 16 * group of the 64 of K that an instruction takes."""
            start = tile + ((first + lane % 32) * PITCH + step * 16 + group * 4)
            low, high = fx.generic_load(start, count=4), fx.generic_load(start + 8, count=4)
            return fx.Vector.from_elements([v[i] for v in (low, high) for i in range(4)], fx.Int32)

        zero = fx.Vector.filled(16, 0.0, fx.Float32)
        begin = [zero, zero, zero, zero, *load_all(fx.Int32(0))]
        for k, state in range(0, K, MX_K, init=begin):
            sums = list(state[:4])
            scales_a, scales_b = state[-4:-2], state[-2:]
            fx.gpu.barrier()
            place(a_tile, state[4 : 4 + PIECES])
            place(b_tile, state[4 + PIECES : 4 + 2 * PIECES])
            fx.gpu.barrier()
            following = load_all(fx.Int32(k) + MX_K)
            for step in fx.range_constexpr(2):
                left = [fragment(a_tile, m_of_wave + 32 * i, step) for i in (0, 1)]
                right = [fragment(b_tile, n_of_wave + 32 * j, step) for j in (0, 1)]
                for i in fx.range_constexpr(2):
                    for j in fx.range_constexpr(2):
                        # Operands stand exchanged, so that a lane ends with neighbours of one row of the result.
                        operands = [right[j], left[i], sums[2 * i + j], B_FORMAT, A_FORMAT]
                        operands += [2 * step, scales_b[j], 2 * step, scales_a[i]]
                        product = rocdl.mfma_scale_f32_32x32x64_f8f6f4(zero.type, operands)
                        sums[2 * i + j] = fx.Vector(product, (16,), fx.Float32)
            result = yield [*sums, *following]
        for i in fx.range_constexpr(2):
            m = first_m + m_of_wave + 32 * i + lane % 32
            for j in fx.range_constexpr(2):
                values = result[2 * i + j].to(fx.BFloat16)
                for four in fx.range_constexpr(4):
                    n = first_n + n_of_wave + 32 * j + 8 * four + 4 * group
                    if (m < M) & (n < N):
                        part = fx.Vector.from_elements([values[4 * four + e] for e in range(4)], fx.BFloat16)
                        fx.generic_store(c + (fx.Int64(m) * fx.Int64(N) + fx.Int64(n)), part)

    @flyc.jit
    def launch(
        a: fx.Pointer, b: fx.Pointer, scale_a: fx.Pointer, scale_b: fx.Pointer, c: fx.Pointer,
        M: fx.Int32, N: fx.Int32, K: fx.Int32,
        grid_x: fx.Int32, grid_y: fx.Int32, grid_z: fx.Int32, stream: fx.Stream,
    ):  # fmt: skip
        flydsl_mx_mm(a, b, scale_a, scale_b, c, M, N, K).launch(
            grid=(grid_x, grid_y, grid_z), block=(THREADS, 1, 1), stream=stream
        )

    return launch


def mx_case(a: str, b: str, whole: bool) -> CompileCase:
    """The product of elements `a` by `b`; `whole` says that K is a multiple of 128."""
    scale = "*i32" if whole else "*u8"
    return CompileCase(
        kernel="flydsl_mx_mm", configuration=f"{a} by {b}, K by {MX_K if whole else MX_BLOCK}", room="flydsl",
        kind="product mxfp8", function=FlyKernel(flydsl_mx_mm),
        signature={
            "a": "*i32", "b": "*i32", "scale_a": scale, "scale_b": scale, "c": "*bf16",
            "M": "i32", "N": "i32", "K": "i32",
        },
        constexprs={"A_FORMAT": MX_ELEMENTS[a], "B_FORMAT": MX_ELEMENTS[b], "WHOLE": whole},
        divisible=("a", "b", "c"), num_warps=THREADS // WAVE,
    )  # fmt: skip


def compile_cases(target: str) -> list[CompileCase]:
    """Each pair of elements, with scales read as words and as bytes, on gfx950."""
    if target != "gfx950":
        return []
    return [mx_case(a, b, whole) for a in MX_ELEMENTS for b in MX_ELEMENTS for whole in (True, False)]
