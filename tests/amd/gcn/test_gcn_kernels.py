"""Kernels compiled from Triton for both targets, executed and compared with NumPy."""

from __future__ import annotations

import math
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gcn_helpers import TARGETS, both_targets

triton = pytest.importorskip("triton", reason="compiling kernels needs Triton")

import gcn_triton_kernels as kernels  # noqa: E402

from octavo.check.compile import compile_kernel  # noqa: E402
from octavo.check.gcn import launch  # noqa: E402

pytestmark = pytest.mark.amd
BF16 = ml_dtypes.bfloat16
# Triton's name, NumPy's dtype and the largest value of the FP8 format each target has in hardware.
FP8 = {
    "gfx942": ("fp8e4b8", ml_dtypes.float8_e4m3fnuz, 240.0),
    "gfx950": ("fp8e4nv", ml_dtypes.float8_e4m3fn, 448.0),
}
BF8 = {
    "gfx942": ("fp8e5b16", ml_dtypes.float8_e5m2fnuz, 57344.0),
    "gfx950": ("fp8e5", ml_dtypes.float8_e5m2, 57344.0),
}


def run(code: Any, grid: tuple[int, ...], *args: Any) -> Any:
    report = launch(code, grid, args)
    report.raise_for_races()
    return report


@both_targets
@pytest.mark.parametrize("aligned", [True, False])
def test_vector_add(target: str, aligned: bool) -> None:
    types = {"x": "*bf16", "y": "*bf16", "out": "*bf16", "n": "i32"}
    code = compile_kernel(
        kernels.add, target, types, {"BLOCK": 512}, divisible=["x", "y", "out"] if aligned else []
    )
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 3001)).astype(BF16)
    out = np.zeros(3001, BF16)
    run(code, (6,), x, y, out, 3001)
    assert (out == (x.astype(np.float32) + y.astype(np.float32)).astype(BF16)).all()


@both_targets
def test_target_info_knows_the_target(target: str) -> None:
    out = np.zeros(1, np.int32)
    run(compile_kernel(kernels.target_name, target, {"out": "*i32"}), (1,), out)
    assert out[0] == 1


@both_targets
@pytest.mark.parametrize("num_warps", [1, 4])
def test_softmax(target: str, num_warps: int) -> None:
    code = compile_kernel(
        kernels.softmax,
        target,
        {"x": "*fp32", "out": "*fp32", "n": "i32"},
        {"BLOCK": 1024},
        num_warps=num_warps,
    )
    x = np.random.default_rng(1).standard_normal((20, 1000)).astype(np.float32)
    out = np.zeros_like(x)
    run(code, (20,), x, out, 1000)
    exact = np.exp(x.astype(np.float64))
    np.testing.assert_allclose(out, exact / exact.sum(1, keepdims=True), rtol=2e-6)


@both_targets
@pytest.mark.parametrize("dtype", [np.uint8, BF16, np.float32])
def test_transpose_through_lds(target: str, dtype: Any) -> None:
    name = {1: "*u8", 2: "*bf16", 4: "*fp32"}[np.dtype(dtype).itemsize]
    code = compile_kernel(
        kernels.transpose,
        target,
        {"x": name, "out": name, "M": "i32", "N": "i32"},
        {"BLOCK": 64},
        divisible=["x", "out"],
    )
    assert code.lds_bytes > 0
    x = np.random.default_rng(2).integers(0, 120, (100, 150)).astype(dtype)
    out = np.zeros((150, 100), dtype)
    run(code, (2, 3), x, out, 100, 150)
    assert (out == x.T).all()


# --- row quantization, bit for bit
def reference_rows(x: np.ndarray, dtype: Any, largest: float) -> tuple[np.ndarray, np.ndarray]:
    wide = x.astype(np.float32)
    amax = np.maximum(np.abs(wide).max(1, keepdims=True), np.float32(1e-12))
    encode = np.float32(largest) / amax
    return np.clip(wide * encode, -largest, largest).astype(dtype), (np.float32(1) / encode)[:, 0]


def compile_quantize(target: str, source: str, name: str, largest: float, **options: Any) -> Any:
    types = {"x": f"*{source}", "q": f"*{name}", "scale": "*fp32", "n": "i32"}
    constants = {"MAX": largest, "BLOCK": 1024}
    return compile_kernel(
        kernels.quantize_rows, target, types, constants, divisible=["x", "q", "n"], **options
    )


def rows_with_ties(
    dtype: Any, largest: float, rng: np.random.Generator, rows: int, source: Any
) -> np.ndarray:
    """Rows of 1024: random ones over many magnitudes, and ones with amax == largest (so encode is 1) that hold every
    value of the format, every midpoint and its neighbours."""
    values = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float64)
    values = np.unique(values[np.isfinite(values)])
    ties = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    hard = np.concatenate(
        (values.astype(np.float32), ties, *(np.nextafter(ties, np.float32(s)) for s in (-9e9, 9e9)))
    )
    x = (rng.standard_normal((rows, 1024)) * np.exp(rng.uniform(-60, 60, (rows, 1)))).astype(np.float32)
    for row in range(4):
        x[row] = rng.permutation(np.resize(hard, 1024))
        x[row, row] = largest
    x[4] = 0
    x[5] = 1e-40
    x[6, 7:] = -0.0
    with np.errstate(over="ignore"):
        x = x.astype(source)
    return np.where(np.isfinite(x.astype(np.float32)), x, source(0))


@both_targets
@pytest.mark.parametrize("family", ["e4m3", "e5m2"])
@pytest.mark.parametrize("source", ["fp32", "bf16"])
def test_row_quantization_is_bit_exact(target: str, family: str, source: str) -> None:
    name, dtype, largest = (FP8 if family == "e4m3" else BF8)[target]
    code = compile_quantize(target, source, name, largest)
    rows = 64
    x = rows_with_ties(
        dtype, largest, np.random.default_rng(3), rows, np.float32 if source == "fp32" else BF16
    )
    q, scale = np.zeros((rows, 1024), dtype), np.zeros(rows, np.float32)
    run(code, (rows,), x, q, scale, 1024)
    want, want_scale = reference_rows(x, dtype, largest)
    assert (q.view(np.uint8) == want.view(np.uint8)).all()
    assert (scale == want_scale).all()


@both_targets
def test_a_million_values(target: str) -> None:
    name, dtype, largest = FP8[target]
    code = compile_quantize(target, "fp32", name, largest)
    x = rows_with_ties(dtype, largest, np.random.default_rng(4), 1000, np.float32)
    q, scale = np.zeros((1000, 1024), dtype), np.zeros(1000, np.float32)
    run(code, (1000,), x, q, scale, 1024)
    want, want_scale = reference_rows(x, dtype, largest)
    assert (q.view(np.uint8) == want.view(np.uint8)).all()
    assert (scale == want_scale).all()


# --- products
PRODUCTS = [("bf16", BF16), ("fp16", np.float16), ("fp8", None), ("bf8", None), ("fp32", np.float32)]


# What the products must run on; gfx950 uses the old FP8 instructions where a tile has too little K for f8f6f4.
INSTRUCTIONS = {
    "bf16": "_bf16",
    "fp16": "_f16",
    "fp8": "fp8_fp8|f8f6f4",
    "bf8": "bf8_bf8|f8f6f4",
    "fp32": "xf32|_f32|bf16",
}


def product_error(out: np.ndarray, a: np.ndarray, b: np.ndarray) -> float:
    """Largest error relative to the sum of magnitudes, the scale that float32 rounding acts on."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float((np.abs(out - a @ b.T) / (np.abs(a) @ np.abs(b).T + 1e-30)).max())


@both_targets
@pytest.mark.parametrize(("kind", "dtype"), PRODUCTS, ids=[k for k, _ in PRODUCTS])
@pytest.mark.parametrize(("a_rows", "b_rows"), [(True, True), (False, False)])
@pytest.mark.parametrize("size", [16, 32])
def test_product(target: str, kind: str, dtype: Any, a_rows: bool, b_rows: bool, size: int) -> None:
    name = kind
    if dtype is None:
        name, dtype, _ = (FP8 if kind == "fp8" else BF8)[target]
    constants: dict[str, Any] = {"BM": 64, "BN": 64, "BK": 64}
    types = {"a": f"*{name}", "b": f"*{name}", "c": "*fp32"}
    types |= dict.fromkeys(("M", "N", "K", "stride_an", "stride_ak", "stride_bn", "stride_bk"), "i32")
    constants |= {"stride_ak" if a_rows else "stride_an": 1, "stride_bk" if b_rows else "stride_bn": 1}
    types = {k: v for k, v in types.items() if k not in constants}
    code = compile_kernel(
        kernels.matmul,
        target,
        types,
        constants,
        divisible=[s for s in types if s not in ("M", "N")],
        num_stages=2,
        options={"matrix_instr_nonkdim": size},
    )
    M, N, K = 80, 72, 144
    rng = np.random.default_rng(5)
    a, b = rng.standard_normal((M, K)).astype(dtype), rng.standard_normal((N, K)).astype(dtype)
    out = np.zeros((M, N), np.float32)
    left, right = (x if rows else np.ascontiguousarray(x.T) for x, rows in ((a, a_rows), (b, b_rows)))
    strides = [K if a_rows else M, K if b_rows else N]
    run(code, (2, 2), left, right, out, M, N, K, *strides)
    # gfx942 multiplies float32 as xf32 (10 mantissa bits) when tl.dot may use TF32, its default.
    limit = 2.0**-10 if kind == "fp32" else 2.0**-22
    assert product_error(out, a, b) < limit
    names = " ".join(line.split()[0] for line in code.asm.splitlines() if "v_mfma" in line)
    assert re.search(INSTRUCTIONS[kind], names), names


@both_targets
def test_product_of_two_fp8_formats(target: str) -> None:
    """e5m2 by e4m3. Triton 3.6 gets this wrong on gfx942 (triton-lang/triton#9567, right since 3.7): it exchanges the
    operands of the instruction but not their formats, which the executor must show."""
    (a_name, a_type, _), (b_name, b_type, _) = BF8[target], FP8[target]
    types = {"a": f"*{a_name}", "b": f"*{b_name}", "c": "*fp32"}
    types |= dict.fromkeys(("M", "N", "K", "stride_an", "stride_bn"), "i32")
    constants = {"BM": 64, "BN": 64, "BK": 64, "stride_ak": 1, "stride_bk": 1}
    code = compile_kernel(kernels.matmul, target, types, constants, divisible=list(types))
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((64, 128)).astype(a_type), rng.standard_normal((64, 128)).astype(b_type)
    out = np.zeros((64, 64), np.float32)
    run(code, (1, 1), a, b, out, 64, 64, 128, 128, 128)
    if target == "gfx942" and triton.__version__.startswith("3.6."):
        assert product_error(out, a, b) > 0.01
        a, b = a.view(np.uint8).view(b_type), b.view(np.uint8).view(a_type)
    assert product_error(out, a, b) < 2.0**-22


def pack_codes(x: np.ndarray, pack: int) -> np.ndarray:
    codes = x.view(np.uint8)
    return codes.copy() if pack == 1 else np.ascontiguousarray(codes[:, ::2] & 15 | codes[:, 1::2] << 4)


MX = {
    "e4m3": (1, ml_dtypes.float8_e4m3fn),
    "e5m2": (1, ml_dtypes.float8_e5m2),
    "e2m1": (2, ml_dtypes.float4_e2m1fn),
}


class ScaledProduct:
    """An MX product on gfx950: compiled kernel, operands and the check that any sabotage must fail."""

    def __init__(self, fmt: str, size: int = 32) -> None:
        self.pack, dtype = MX[fmt]
        types = dict.fromkeys(("a", "b", "sa", "sb"), "*u8") | {
            "c": "*fp32",
            "M": "i32",
            "N": "i32",
            "K": "i32",
        }
        self.code = compile_kernel(
            kernels.scaled_matmul,
            "gfx950",
            types,
            {"FORMAT": fmt, "PACK": self.pack, "BM": 64, "BN": 64, "BK": 128},
            divisible=list(types),
            options={"matrix_instr_nonkdim": size},
        )
        rng = np.random.default_rng(6)
        self.M, self.N, self.K = 128, 64, 512
        self.a = rng.standard_normal((self.M, self.K)).astype(dtype)
        self.b = rng.standard_normal((self.N, self.K)).astype(dtype)
        self.sa = rng.integers(120, 134, (self.M, self.K // 32)).astype(np.uint8)
        self.sb = rng.integers(120, 134, (self.N, self.K // 32)).astype(np.uint8)

    def error(self, code: Any = None) -> float:
        out = np.zeros((self.M, self.N), np.float32)
        operands = (pack_codes(self.a, self.pack), pack_codes(self.b, self.pack), self.sa, self.sb)
        run(code or self.code, (2, 1), *operands, out, self.M, self.N, self.K)
        scaled = [
            x.astype(np.float64) * np.repeat(2.0 ** (s.astype(np.float64) - 127), 32, 1)
            for x, s in ((self.a, self.sa), (self.b, self.sb))
        ]
        return product_error(out, *scaled)


@pytest.mark.parametrize("fmt", MX)
@pytest.mark.parametrize("size", [16, 32])
def test_scaled_product(fmt: str, size: int) -> None:
    product = ScaledProduct(fmt, size)
    assert "v_mfma_scale_f32_" in product.code.asm
    assert product.error() < 2.0**-22


@both_targets
@pytest.mark.slow
def test_attention(target: str) -> None:
    types = dict.fromkeys("qkv", "*bf16") | {"out": "*fp32", "L": "i32", "scale": "fp32"}
    code = compile_kernel(
        kernels.attention, target, types, {"BM": 64, "BN": 32, "D": 64}, divisible=[*"qkv", "out"]
    )
    L, heads, D = 100, 2, 64
    q, k, v = np.random.default_rng(7).standard_normal((3, heads, L, D)).astype(BF16)
    out = np.zeros((heads, L, D), np.float32)
    run(code, (2, heads), q, k, v, out, L, math.log2(math.e) / math.sqrt(D))
    s = np.einsum("hmd,hnd->hmn", q.astype(np.float64), k.astype(np.float64)) / math.sqrt(D)
    s[:, ~np.tril(np.ones((L, L), bool))] = -np.inf
    p = np.exp(s - s.max(2, keepdims=True))
    p /= p.sum(2, keepdims=True)
    np.testing.assert_allclose(
        out, p @ v.astype(np.float64), atol=0.01
    )  # p is rounded to bf16 between the products


@both_targets
@pytest.mark.parametrize("num_warps", [1, 4])
def test_sort(target: str, num_warps: int) -> None:
    code = compile_kernel(
        kernels.sort_rows, target, {"x": "*fp32", "out": "*fp32"}, {"BLOCK": 256}, num_warps=num_warps
    )
    x = np.random.default_rng(8).standard_normal((8, 256)).astype(np.float32)
    out = np.zeros_like(x)
    run(code, (8,), x, out)
    assert (out == -np.sort(-x, axis=1)).all()


@both_targets
def test_scan_reduce_atomic(target: str) -> None:
    types = {"x": "*i32", "prefix": "*i32", "largest": "*i32", "where": "*i32", "total": "*i32"}
    code = compile_kernel(kernels.scan_and_reduce, target, types, {"BLOCK": 1024})
    x = np.random.default_rng(9).permutation(8 * 1024).astype(np.int32).reshape(8, 1024)
    prefix, largest, where, total = (
        np.zeros_like(x),
        np.zeros(8, np.int32),
        np.zeros(8, np.int32),
        np.zeros(1, np.int32),
    )
    run(code, (8,), x, prefix, largest, where, total)
    assert (prefix == np.cumsum(x, 1)).all()
    assert (largest == x.max(1)).all()
    assert (where == x.argmax(1)).all()
    assert total[0] == x.sum()


@both_targets
def test_integer_division(target: str) -> None:
    code = compile_kernel(
        kernels.integers, target, {"x": "*i32", "y": "*i32", "out": "*i32", "n": "i32"}, {"BLOCK": 1024}
    )
    rng = np.random.default_rng(10)
    x = rng.integers(-(2**31), 2**31, 3000).astype(np.int32)
    y = np.where(
        rng.random(3000) < 0.5, rng.integers(1, 1000, 3000), rng.integers(-(2**31), -1, 3000)
    ).astype(np.int32)
    out = np.zeros_like(x)
    run(code, (3,), x, y, out, 3000)
    want = []
    for a, b in zip(x.tolist(), y.tolist(), strict=True):
        quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
        want.append(quotient + (a - quotient * b) + (a * b >> 7) + (a << (b & 7)) + abs(a))
    assert (out == np.array([w & 0xFFFFFFFF for w in want], np.uint32).view(np.int32)).all()


@both_targets
def test_functions(target: str) -> None:
    code = compile_kernel(
        kernels.functions, target, {"x": "*fp32", "out": "*fp32", "n": "i32"}, {"BLOCK": 1024}
    )
    x = np.random.default_rng(11).uniform(0.05, 9, 2000).astype(np.float32)
    out = np.zeros_like(x)
    run(code, (2,), x, out, 2000)
    v = x.astype(np.float64)
    want = (
        np.sqrt(v)
        + 1 / np.sqrt(v)
        + np.log(v)
        + np.sin(v)
        + np.cos(v)
        + np.floor(v)
        + 1 / (1 + np.exp(-v))
        + v / 3
    )
    np.testing.assert_allclose(out, want + np.array([math.erf(x) for x in v]), rtol=2e-6)


@pytest.mark.parametrize("target", TARGETS)
def test_fusion_is_explicit(target: str) -> None:
    """fp_fusion=False keeps a multiply and an add apart."""
    types = {"x": "*fp32", "out": "*fp32", "n": "i32"}
    fused = compile_kernel(kernels.functions, target, types, {"BLOCK": 256})
    apart = compile_kernel(kernels.functions, target, types, {"BLOCK": 256}, fp_fusion=False)
    count = [code.asm.count("v_fma") + code.asm.count("v_pk_fma") for code in (fused, apart)]
    assert count[0] > count[1]


def test_compile_refuses_bad_requests() -> None:
    with pytest.raises(ValueError, match="gfx90a"):
        compile_kernel(kernels.add, "gfx90a", {})
    with pytest.raises(ValueError, match="without a type or value"):
        compile_kernel(kernels.add, "gfx942", {"x": "*fp32"})
    with pytest.raises(ValueError, match="does not have"):
        compile_kernel(kernels.target_name, "gfx942", {"out": "*i32", "extra": "i32"})


def test_sm_90_compiles_but_does_not_execute() -> None:
    types = {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32"}
    code = compile_kernel(kernels.add, "sm_90", types, {"BLOCK": 256})
    assert ".target sm_90" in code.asm
    assert code.binary[:4] == b"\x7fELF"
    x = np.zeros(4, np.float32)
    with pytest.raises(ValueError, match="not sm_90"):
        launch(code, (1,), [x, x, x, 4])
