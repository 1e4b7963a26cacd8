"""RMSNorm forward in FlyDSL: a workgroup a row, the row in registers, read once.

FlyDSL reads annotations as objects: no `from __future__ import annotations` here.
"""

from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from octavo.compile_cases import CompileCase
from octavo.flydsl.kernel import FlyKernel
from octavo.flydsl.plan import WAVE, rms_norm_threads, vector_width


def flydsl_rms_norm(COLUMNS: int, HAS_WEIGHT: bool) -> Any:
    """y[m, n] = bf16((x * rstd) * weight), rstd[m] = 1 / sqrt(mean(x^2) + eps), sums and products in float32.

    Args:
        COLUMNS: row length n, at most 8192.
        HAS_WEIGHT: without it, `weight` is not read.
    """
    threads = rms_norm_threads(COLUMNS)
    width = vector_width(COLUMNS)
    step = threads * width
    chunks, waves = -(-COLUMNS // step), threads // WAVE

    @flyc.kernel(known_block_size=[threads, 1, 1])
    def flydsl_rms_norm(
        x: fx.Pointer, weight: fx.Pointer, y: fx.Pointer, rstd: fx.Pointer, stride: fx.Int64, eps: fx.Float32
    ):
        lane = fx.thread_idx.x
        row = fx.block_idx.x
        source = x + fx.Int64(row) * stride
        target = y + fx.Int64(row) * fx.Int64(COLUMNS)
        held = []
        total = fx.Float32(0.0)
        for chunk in fx.range_constexpr(chunks):
            column = lane * width + chunk * step
            inside = column < COLUMNS
            # Lanes past the end read the row's start, which is always there, and count nothing.
            values = fx.generic_load(source + inside.select(column, fx.Int32(0)), count=width).to(fx.Float32)
            held.append(values)
            squares = values * values
            if fx.const_expr(width > 1):
                squares = squares.reduce(fx.ReductionOp.ADD)
            total = total + inside.select(squares, fx.Float32(0.0))
        for halving in fx.range_constexpr(6):
            total = total + fx.gpu.shuffle_xor(total, WAVE // 2 >> halving, WAVE)
        if fx.const_expr(waves > 1):
            shared = fx.SharedAllocator().allocate(fx.Array[fx.Float32, waves, 16]).peek()
            sums = shared.view(fx.make_layout(waves, 1))
            if lane % WAVE == 0:
                sums[lane // WAVE] = total
            fx.gpu.barrier()
            total = sums[0]
            for wave in fx.range_constexpr(1, waves):
                total = total + sums[wave]
        scale = fx.math.rsqrt(total * fx.Float32(1.0 / COLUMNS) + eps, fastmath="fast")
        if lane == 0:
            rstd[row] = scale
        for chunk in fx.range_constexpr(chunks):
            column = lane * width + chunk * step
            if column < COLUMNS:
                result = held[chunk] * scale
                if fx.const_expr(HAS_WEIGHT):
                    result = result * fx.generic_load(weight + column, count=width).to(fx.Float32)
                fx.generic_store(target + column, result.to(fx.BFloat16))

    @flyc.jit
    def launch(
        x: fx.Pointer, weight: fx.Pointer, y: fx.Pointer, rstd: fx.Pointer, stride: fx.Int64, eps: fx.Float32,
        grid_x: fx.Int32, grid_y: fx.Int32, grid_z: fx.Int32, stream: fx.Stream,
    ):  # fmt: skip
        flydsl_rms_norm(x, weight, y, rstd, stride, eps).launch(
            grid=(grid_x, grid_y, grid_z), block=(threads, 1, 1), stream=stream
        )

    return launch


RMS_NORM = FlyKernel(flydsl_rms_norm)
SIGNATURE = {"x": "*bf16", "weight": "*bf16", "y": "*bf16", "rstd": "*fp32", "stride": "i64", "eps": "fp32"}


def rms_norm_case(columns: int, has_weight: bool) -> CompileCase:
    """The kernel for rows of `columns`, as it is compiled and launched."""
    words = f"bf16 n={columns}{'' if has_weight else ' no weight'}"
    return CompileCase(
        kernel="flydsl_rms_norm", configuration=words, room="flydsl", kind="general", function=RMS_NORM,
        signature=SIGNATURE, constexprs={"COLUMNS": columns, "HAS_WEIGHT": has_weight},
        divisible=("x", "weight", "y") if columns % 8 == 0 else (),
        num_warps=rms_norm_threads(columns) // WAVE,
    )  # fmt: skip


def compile_cases(target: str) -> list[CompileCase]:
    """Each number of threads, the longest rows, rows that fill no chunk, rows of odd length, and no weight."""
    if target != "gfx950":
        return []
    sizes = ((256, True), (1024, True), (4096, True), (8192, True), (5000, True), (1001, True), (4096, False))
    return [rms_norm_case(columns, has_weight) for columns, has_weight in sizes]
