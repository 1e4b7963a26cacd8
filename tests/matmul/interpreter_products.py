"""Runs the Triton products in Triton's interpreter on the CPU and compares them with the reference.

Started as a program by test_triton_products.py, because TRITON_INTERPRET is read when kernels are defined. The
interpreter's own conversions of narrow types round wrongly and its products of bfloat16 multiply bit patterns, so
both are replaced by ml_dtypes' conversions and float32 products.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

os.environ["TRITON_INTERPRET"] = "1"

import ml_dtypes
import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from octavo import dispatch, quantize, quantize_grouped, scaled_grouped_mm, scaled_mm, use_kernels
from octavo.formats import E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, MXFP4, MXFP8, MXFP8_E5M2, Format, ScaledTensor
from octavo.matmul import grouped_mm, launch_tables
from octavo.matmul.launch_tables import Config
from octavo.quantize import alignment
from octavo.testing import outlier_matrix, poisoned_allocations, worst_row_sqnr

_NUMPY = {
    tl.float32: np.float32, tl.float16: np.float16, tl.bfloat16: ml_dtypes.bfloat16,
    tl.float8e4nv: ml_dtypes.float8_e4m3fn, tl.float8e4b8: ml_dtypes.float8_e4m3fnuz,
    tl.float8e5: ml_dtypes.float8_e5m2, tl.float8e5b16: ml_dtypes.float8_e5m2fnuz,
}  # fmt: skip


def _convert(data: np.ndarray, source: tl.dtype, target: tl.dtype, _rounding: object) -> np.ndarray:
    values = np.ascontiguousarray(data).view(_NUMPY[source]).astype(np.float32).astype(_NUMPY[target])
    return values.view(f"uint{target.primitive_bitwidth}")


def _dot(self: object, a: object, b: object, d: object, precision: object, imprecise: object) -> object:
    left, right = (np.ascontiguousarray(x.data).view(_NUMPY[x.dtype]).astype(np.float32) for x in (a, b))
    return interpreter.TensorHandle(left @ right + d.data, d.dtype.scalar)


interpreter._convert_float = _convert
interpreter.InterpreterBuilder.create_dot = _dot

# ---- what is compared ---------------------------------------------------------------------------------------

ROW, ONE = Format(E4M3FN, "rowwise", "power_of_two"), Format(E4M3FN, "tensorwise")
BLOCK, SQUARE = Format(E4M3FN, "1x128"), Format(E4M3FN, "128x128")
WIDE_ROW, WIDE_ONE = Format(E5M2, "rowwise"), Format(E5M2, "tensorwise")
FNUZ_ROW, FNUZ_WIDE = Format(E4M3FNUZ, "rowwise"), Format(E5M2FNUZ, "tensorwise")

PAIRS = [
    (ROW, ROW), (ONE, ONE), (WIDE_ONE, ONE), (ROW, ONE), (WIDE_ONE, WIDE_ROW),
    (FNUZ_ROW, FNUZ_ROW), (FNUZ_WIDE, FNUZ_ROW),
    (BLOCK, SQUARE), (BLOCK, BLOCK), (SQUARE, BLOCK), (SQUARE, SQUARE), (BLOCK, ROW), (ONE, SQUARE),
    (MXFP8, MXFP8), (MXFP8_E5M2, MXFP8), (MXFP4, MXFP4), (MXFP8, MXFP4), (MXFP4, MXFP8_E5M2),
]  # fmt: skip
SHAPES = [
    (1, 1, 2),
    (17, 33, 130),
    (64, 16, 128),
    (40, 70, 402),
    (3, 5, 0),
    (0, 4, 32),
    (4, 0, 32),
    (16, 130, 256),
]
SIZES = [[44, 20, 0, 64, 1], [5, 0, 9, 0], [0, 0, 0, 0], [17], [0, 33], [70, 3]]
FLOOR = {torch.bfloat16: 50.0, torch.float16: 60.0, torch.float32: 100.0}


def _tables(
    tile: tuple[int, int], mx_by_blocks: bool = False, split: int = 1, tma: bool = False
) -> dict[str, tuple[Config, ...]]:
    """Small tiles for every product, so that small shapes have several."""

    def config(kind: str, block_k: int, split: int = split) -> tuple[Config]:
        return (Config(kind, (*tile, block_k), split=split, tma=tma),)

    kinds = {
        "epilogue": config("epilogue", 64), "block": config("block", 128), "blockrows": config("block", 128),
        "mxfp8": config("block", 32) if mx_by_blocks else config("dequantize", 64),
        "mxfp4": config("dequantize", 64), "mxmixed": config("dequantize", 64),
        "plain": config("plain", 32, 1), "wide": config("plain", 32, 1),
    }  # fmt: skip
    return {f"{form} {work}": c for form in ("dense", "rows", "columns") for work, c in kinds.items()}


failures: list[str] = []
count = 0


def _compare(
    what: str, op: str, function: Callable[[], torch.Tensor], dtype: torch.dtype,
    exact: Callable[[], torch.Tensor] | None = None,
) -> None:  # fmt: skip
    """``function`` by the Triton kernels against ``exact``, or itself, by the reference."""
    global count
    count += 1
    with use_kernels(**{op: "reference"}):
        expected = (exact or function)().to(dtype)
    with use_kernels(**{op: "triton"}), poisoned_allocations():
        found = function()
    same = found.shape == expected.shape and found.dtype == expected.dtype
    quality = worst_row_sqnr(found, expected) if same and found.numel() else float("inf")
    if not same or not quality >= FLOOR[dtype]:
        failures.append(f"{what}: {tuple(found.shape)} {found.dtype}, worst row {quality:.1f} dB")


def dense(
    shapes: list[tuple[int, int, int]], pairs: list[tuple[Format, Format]], dtype: torch.dtype, bias: bool
) -> None:
    for m, n, k in shapes:
        for a, b in pairs:
            # Within float16: the largest outliers of both sides multiply to 9e6.
            left = quantize(outlier_matrix((m, k)) / 64 if m and k else torch.zeros(m, k), a)
            right = quantize(outlier_matrix((n, k), seed=1) / 64 if n and k else torch.zeros(n, k), b)
            added = torch.randn(n).to(dtype) if bias else None
            _compare(
                f"dense {m}x{n}x{k} {a} {b}", "scaled_mm",
                lambda x=left, y=right, z=added: scaled_mm(x, y, bias=z, out_dtype=dtype), dtype,
            )  # fmt: skip


def _offs(sizes: list[int]) -> torch.Tensor:
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


def rows(
    sizes: list[int],
    pairs: list[tuple[Format, Format]],
    dtype: torch.dtype,
    bias: bool,
    n: int = 37,
    k: int = 130,
) -> None:
    offs = _offs(sizes)
    x, w = outlier_matrix((sum(sizes) + 19, k)) / 64, outlier_matrix((len(sizes), n, k), seed=1) / 64
    x[sum(sizes) :] = float("nan")
    added = torch.randn(len(sizes), n).to(dtype) if bias else None
    for a, b in pairs:
        if a.granularity == "128x128":
            continue  # its blocks span rows, and so groups
        left, right = quantize_grouped(x, offs, a), quantize(w, b)
        _compare(
            f"rows {sizes} {a} {b}", "scaled_grouped_mm",
            lambda p=left, q=right: scaled_grouped_mm(p, q, offs, bias=added, out_dtype=dtype), dtype,
        )  # fmt: skip


def columns(sizes: list[int], pairs: list[tuple[Format, Format]], dtype: torch.dtype) -> None:
    offs = _offs(sizes)
    rows = sum(sizes) + 20 + sum(sizes) % 2
    g, x = outlier_matrix((rows, 37)) / 64, outlier_matrix((rows, 66), seed=1) / 64
    for a, b in pairs:
        align = alignment(a, b)
        left, right = (quantize_grouped(t, offs, f, transpose=True, align=align) for t, f in ((g, a), (x, b)))
        _compare(
            f"columns {sizes} {a} {b}", "scaled_grouped_mm",
            lambda p=left, q=right: scaled_grouped_mm(p, q, out_dtype=dtype), dtype,
        )  # fmt: skip


def plain(sizes: list[int], dtype: torch.dtype) -> None:
    offs = _offs(sizes)
    x, g = (outlier_matrix((sum(sizes) + 3, k), dtype=dtype, seed=k) / 64 for k in (50, 37))
    w = outlier_matrix((len(sizes), 37, 50), dtype=dtype, seed=2) / 64
    bias = torch.randn(len(sizes), 37).to(dtype)
    for what, a, b, c in (
        ("rows", x, w, bias), ("rows, weights transposed", g, w.mT, None), ("columns", g.T, x.T, None),
    ):  # fmt: skip
        _compare(
            f"plain {what} {sizes} {dtype}", "grouped_mm",
            lambda a=a, b=b, c=c: grouped_mm(a, b, offs, bias=c), dtype,
            # The reference rounds between the product and the bias in 16 bits; the kernels round once.
            lambda a=a, b=b, c=c: grouped_mm(a.float(), b.float(), offs, bias=None if c is None else c.float()),
        )  # fmt: skip


def special_values() -> None:
    """Blocks with NaN or inf, and every e8m0 code that both operands' products can hold."""
    x, w = outlier_matrix((20, 256)), outlier_matrix((18, 256), seed=1)
    x[3, 5], x[4, 200], w[2, 9] = float("nan"), float("inf"), float("nan")
    for a, b in PAIRS:
        left, right = quantize(x, a), quantize(w, b)
        with use_kernels(scaled_mm="reference"):
            expected = scaled_mm(left, right)
        with use_kernels(scaled_mm="triton"):
            found = scaled_mm(left, right)
        if not torch.equal(found.isnan(), expected.isnan()):
            failures.append(f"NaN places {a} {b}")
    codes = torch.arange(256, dtype=torch.uint8)[:, None]
    data = torch.full((256, 32), 1.5).to(torch.float8_e4m3fn)
    left = ScaledTensor(data, codes.view(torch.float8_e8m0fnu), MXFP8)
    one = torch.full((1, 1), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    right = ScaledTensor(torch.ones(1, 32).to(torch.float8_e4m3fn), one, MXFP8)
    with use_kernels(scaled_mm="triton"):
        found = scaled_mm(left, right, out_dtype=torch.float32)
    expected = 48 * torch.pow(2.0, codes.double() - 127)
    expected[255] = float("nan")
    if not torch.equal(found.nan_to_num(7.0), expected.float().nan_to_num(7.0)):
        failures.append("e8m0 codes")


def quick() -> None:
    """One pass over kinds, forms and edges."""
    some = [
        (ROW, ROW),
        (WIDE_ONE, ONE),
        (BLOCK, SQUARE),
        (BLOCK, BLOCK),
        (MXFP8, MXFP8),
        (MXFP4, MXFP4),
        (MXFP8, MXFP4),
    ]
    with launch_tables.override(_tables((16, 32))):
        dense([(17, 33, 130), (3, 5, 0)], some, torch.bfloat16, True)
        rows([44, 0, 20, 1], some, torch.bfloat16, True)
        columns([5, 0, 19, 1], some, torch.bfloat16)
        plain([20, 0, 9], torch.bfloat16)
        special_values()
    with launch_tables.override(_tables((32, 16), tma=True)):
        dense([(33, 20, 160)], some[:4], torch.float32, True)
        rows([44, 0, 20, 1], some[:4], torch.float32, False, k=160)
        columns([5, 0, 19, 1], some[:4], torch.float32)
    with launch_tables.override(_tables((16, 32), split=3)):
        dense([(17, 33, 1538)], some, torch.float32, True)


def full() -> None:
    """Every pair, shape, output type and grouping."""
    for dtype in FLOOR:
        with launch_tables.override(_tables((16, 32))):
            dense(SHAPES, PAIRS, dtype, dtype == torch.bfloat16)
            for sizes in SIZES:
                rows(sizes, PAIRS, dtype, dtype != torch.bfloat16)
                columns(sizes, PAIRS, dtype)
                plain(sizes, dtype)
    with launch_tables.override(_tables((32, 16), mx_by_blocks=True, split=2)):
        dense(SHAPES, PAIRS, torch.bfloat16, True)
        rows([44, 0, 20, 1], PAIRS, torch.bfloat16, True)
        columns([5, 0, 19, 1], PAIRS, torch.bfloat16)
    # Committed tiles, as they are launched.
    dense([(130, 140, 402)], PAIRS, torch.float32, True)
    rows([44, 20, 0, 64, 1], PAIRS, torch.float32, True, n=140)
    columns([44, 20, 0, 64, 1], PAIRS, torch.float32)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with use_kernels(quantize="reference", quantize_grouped="reference"):
        {"quick": quick, "full": full}[sys.argv[1]]()
    assert dispatch.kernels("scaled_mm")[1].name == "triton"
    print(f"{count} products compared, {len(failures)} wrong")
    print("\n".join(failures))
    sys.exit(bool(failures) or not count)
