"""Small kernels that the tests of `octavo check` compile: right ones, and one wrong in each way it must catch."""

import triton
import triton.language as tl

from octavo.compile_cases import CompileCase


@triton.jit
def quantize(x, data, scale, K, LIMIT: tl.constexpr, ELEMENT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    j = tl.arange(0, BLOCK)
    amax = tl.zeros((BLOCK,), tl.float32)
    for k in range(0, K, BLOCK):
        amax = tl.maximum(amax, tl.abs(tl.load(x + row * K + k + j).to(tl.float32)))
    encode = LIMIT / tl.maximum(tl.max(amax, 0), 1e-12)
    tl.store(scale + row, 1 / encode)
    for k in range(0, K, BLOCK):
        value = tl.load(x + row * K + k + j).to(tl.float32) * encode
        value = tl.minimum(tl.maximum(value, -LIMIT), LIMIT)
        tl.store(data + row * K + k + j, value.to(ELEMENT))


@triton.jit
def product(
    a, b, c, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DECODE: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    a += i[:, None] * K + k[None, :]
    b += j[None, :] * K + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in range(0, K, BLOCK_K):
        left, right = tl.load(a), tl.load(b)
        if DECODE:
            left, right = left.to(tl.float16), right.to(tl.float16)
        total = tl.dot(left, right, total)
        a += BLOCK_K
        b += BLOCK_K
    tl.store(c + i[:, None] * N + j[None, :], total.to(tl.bfloat16))


@triton.jit
def product_mx(
    a, b, c, scale_a, scale_b, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ELEMENT: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K // PACKED)
    s = tl.arange(0, BLOCK_K // 32)
    a += i[:, None] * (K // PACKED) + k[None, :]
    b += j[None, :] * (K // PACKED) + k[:, None]
    scale_a += i[:, None] * (K // 32) + s[None, :]
    scale_b += j[:, None] * (K // 32) + s[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in range(0, K, BLOCK_K):
        total = tl.dot_scaled(
            tl.load(a), tl.load(scale_a), ELEMENT, tl.load(b), tl.load(scale_b), ELEMENT, acc=total
        )
        a += BLOCK_K // PACKED
        b += BLOCK_K // PACKED
        scale_a += BLOCK_K // 32
        scale_b += BLOCK_K // 32
    tl.store(c + i[:, None] * N + j[None, :], total.to(tl.bfloat16))


@triton.jit
def scan_wide(x, y, K, BLOCK: tl.constexpr):
    """Holds more than the 512 registers a lane can have: spills with one wave and a long block."""
    j = tl.arange(0, BLOCK)
    first = tl.load(x + j)
    second = tl.load(x + K + j)
    for step in range(K):
        first += tl.load(y + step) * second
        second = tl.sqrt(second) + first
    tl.store(x + j, first * second)


ELEMENT = {"gfx942": tl.float8e4b8, "gfx950": tl.float8e4nv, "sm_90": tl.float8e4nv}
LIMIT = {"gfx942": 240.0, "gfx950": 448.0, "sm_90": 448.0}


def quantize_case(target, element=None, limit=None, kind="quantize fp8"):
    element = element or ELEMENT[target]
    return CompileCase(
        kernel="quantize", configuration=f"{element} bf16", room="tests", kind=kind, function=quantize,
        signature={"x": "*bf16", "data": f"*{element.name}", "scale": "*fp32", "K": "i32"},
        constexprs={"LIMIT": limit or LIMIT[target], "ELEMENT": element, "BLOCK": 1024},
        divisible=("x", "data", "scale", "K"),
    )  # fmt: skip


def product_case(target, kind="product fp8", element=None, decode=False, tile=(128, 128, 128)):
    element = element or (tl.bfloat16 if kind == "product bf16" else ELEMENT[target])
    return CompileCase(
        kernel="product", configuration=f"{element} {'x'.join(map(str, tile))}", room="tests", kind=kind,
        function=product,
        signature={"a": f"*{element.name}", "b": f"*{element.name}", "c": "*bf16", "M": "i32", "N": "i32", "K": "i32"},
        constexprs={"BLOCK_M": tile[0], "BLOCK_N": tile[1], "BLOCK_K": tile[2], "DECODE": decode},
        divisible=("a", "b", "c", "M", "N", "K"), num_warps=4, num_stages=2,
    )  # fmt: skip


def mx_case(target, element="e4m3", kind="product mxfp8"):
    packed = 2 if element == "e2m1" else 1
    data = "*u8" if packed == 2 else "*fp8e4nv"
    return CompileCase(
        kernel="product_mx", configuration=element, room="tests", kind=kind, function=product_mx,
        signature={
            "a": data, "b": data, "c": "*bf16", "scale_a": "*u8", "scale_b": "*u8", "M": "i32", "N": "i32", "K": "i32",
        },
        constexprs={"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 128, "ELEMENT": element, "PACKED": packed},
        divisible=("a", "b", "c", "scale_a", "scale_b", "M", "N", "K"), num_warps=4, num_stages=2,
    )  # fmt: skip


def spilling_case(target):
    return CompileCase(
        kernel="scan_wide", configuration="spills", room="tests", kind="general", function=scan_wide,
        signature={"x": "*fp32", "y": "*fp32", "K": "i32"}, constexprs={"BLOCK": 4096},
        divisible=("x", "y", "K"), num_warps=1, options={"waves_per_eu": 8},
    )  # fmt: skip


def compile_cases(target):
    small = (64, 32, 64)
    cases = [
        quantize_case(target),
        product_case(target, tile=small),
        product_case(target, "product bf16", tile=small),
    ]
    if target == "gfx950":
        cases += [mx_case(target), mx_case(target, "e2m1", "product mxfp4")]
    return cases
