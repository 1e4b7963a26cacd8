"""Checks of the products of decoded operands on any device: a GPU, or the CPU with Triton's interpreter.

TRITON_INTERPRET=1 python tests/operators/gemm_checks.py mx|mixed|dense|fp8|values|first|calls   (prints how many)
"""

from __future__ import annotations

import itertools
import os
import sys
from dataclasses import replace

import torch

from octavo import hardware, quantize
from octavo.formats import E4M3FN, MXFP4, MXFP8, MXFP8_E5M2, Format, ScaledTensor, ScaleLayout
from octavo.matmul import reference as matmul_reference
from octavo.operators import gemm
from octavo.operators.gemm import launch, reference, scaled
from octavo.operators.gemm.plan import Plan
from octavo.testing import outlier_matrix, poisoned_allocations, worst_row_sqnr

DEVICE = "cuda" if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1" else "cpu"
BLOCK = Format(E4M3FN, "128x128")
FLOOR = {torch.bfloat16: 50.0, torch.float16: 60.0, torch.float32: 90.0}
TILE = (32, 32, 128)
SHAPES = [(1, 1, 32), (5, 33, 160), (34, 130, 288), (16, 16, 672)]


def inputs(rows: int, k: int, seed: int) -> torch.Tensor:
    """Outlier inputs whose products float16 holds."""
    return outlier_matrix((rows, k), seed=seed, device=DEVICE) / 512


def operand(rows: int, k: int, fmt: Format, seed: int, swizzled: bool = False) -> ScaledTensor:
    """Such inputs quantized; swizzled scales are padded with NaN codes."""
    made = quantize(inputs(rows, k, seed), fmt)
    return swizzle(made) if swizzled else made


def swizzle(x: ScaledTensor) -> ScaledTensor:
    flat = reference.swizzle(x.scale.view(torch.uint8), padding=255)
    return replace(x, scale=flat.view(torch.float8_e8m0fnu), layout=ScaleLayout.SWIZZLED_32_4_4)


def compare(got: torch.Tensor, want: torch.Tensor, floor: float, words: str) -> None:
    got, want = got.float(), want.float()
    assert got.shape == want.shape, words
    assert torch.equal(got.isnan(), want.isnan()), f"{words}: NaN in other places"
    live = ~want.isnan().any(1)
    if live.any() and want[live].abs().max() > 0:
        found = worst_row_sqnr(got[live], want[live])
        assert found >= floor, f"{words}: {found:.1f} dB"


def mx() -> int:
    """Both operands MX: layouts, outputs, biases, splits and exchanged operands on odd sizes."""
    pairs = [(MXFP8, MXFP8), (MXFP8_E5M2, MXFP8), (MXFP8, MXFP8_E5M2), (MXFP4, MXFP4)]
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    variants = itertools.cycle(
        (swizzled, swap, split, dtypes[(i + swap) % 3])
        for i, (swizzled, split, swap) in enumerate(itertools.product((False, True), (1, 4), (False, True)))
    )
    count = 0
    for (left, right), (m, n, k) in itertools.product(pairs, SHAPES):
        swizzled, swap, split, dtype = next(variants)
        a, b = operand(m, k, left, 1), operand(n, k, right, 2)
        bias = torch.randn(n, device=DEVICE).to(dtype) if count % 2 else None
        want = matmul_reference.scaled_mm(a, b, bias, dtype, False)
        plan = Plan("tiles", TILE, 4, 2, split=split, swap=swap)
        if swizzled:
            a, b = swizzle(a), swizzle(b)
        with poisoned_allocations():
            got = scaled.scaled_mm(a, b, bias, dtype, plan=plan)
        assert got.dtype == dtype
        floor = FLOOR[dtype] if bias is None else 45.0
        compare(got, want, floor, f"{left} {right} {m}x{n}x{k} {plan} {swizzled}")
        count += 1
    return count


def mixed() -> int:
    """16-bit rows by a narrow weight."""
    count = 0
    variants = itertools.cycle(itertools.product((False, True), (1, 4), (torch.bfloat16, torch.float16)))
    for weight, (m, n, k) in itertools.product((MXFP8, MXFP4, BLOCK), [*SHAPES, (3, 200, 130)]):
        if weight.is_mx and k % 32:
            k = 160
        swap, split, dtype = next(variants)
        x = inputs(m, k, 3).to(dtype)
        w = operand(n, k, weight, 4)
        bias = torch.randn(n, device=DEVICE).to(dtype) if count % 2 else None
        plan = Plan("tiles", TILE, 4, 2, split=split, swap=swap)
        with poisoned_allocations():
            got = launch.product(x, w, bias, torch.empty(m, n, dtype=dtype, device=DEVICE), plan)
        compare(got, reference.mixed_mm(x, w, bias), 45.0, f"{dtype} {weight} {m}x{n}x{k} {plan}")
        count += 1
    return count


def dense() -> int:
    """Two plain operands: exchanged, split, with biases; by descriptors where the card has them."""
    count = 0
    plans = [Plan("tiles", (32, 32, 64), 4, 2, split=split, swap=swap) for split in (1, 4) for swap in (0, 1)]
    plans += [Plan("boxes", (64, 64, 64), 4, 3, split=split) for split in (1, 4)]
    for plan, (m, n, k) in zip(
        itertools.cycle(plans), [*SHAPES, (70, 48, 1096), (7, 40, 904), (3, 200, 136)]
    ):
        dtype = (torch.bfloat16, torch.float16)[count % 2]
        x, w = inputs(m, k, 3).to(dtype), inputs(n, k, 4).to(dtype)
        bias = torch.randn(n, device=DEVICE).to(dtype) if count % 2 else None
        with poisoned_allocations():
            got = gemm.dense.product(x, w, bias, plan)
        want = x.double() @ w.double().t() + (0 if bias is None else bias.double())
        compare(got, want.to(dtype), 45.0, f"{dtype} {m}x{n}x{k} {plan}")
        count += 1
    return count


def fp8() -> int:
    """``torch._scaled_mm`` and its successor with float32 scales: layouts as PyTorch's kernels read them."""
    count = 0
    formats = {
        kind: hardware.native_format(Format(E4M3FN, kind), DEVICE) for kind in ("rowwise", "1x128", "128x128")
    }
    recipes = {kind: number for number, kind in gemm.fp8.RECIPES.items()}
    for (left, right), (m, n, k) in itertools.product(gemm.fp8.KINDS, [(36, 48, 512), (132, 144, 1024)]):
        a, b = operand(m, k, formats[left], 1), operand(n, k, formats[right], 2)
        sa, sb = a.scale, b.scale.t()
        if left == "1x128":
            sa, sb = (
                sa.t().contiguous().t(),
                (b.scale.t() if right == "128x128" else b.scale.t().contiguous()),
            )
        bias = torch.randn(n, device=DEVICE).bfloat16() if count % 2 else None
        want = matmul_reference.scaled_mm(a, b, bias, torch.bfloat16, False)
        old = (a.data, b.data.t(), sa, sb, bias, None, torch.bfloat16)
        new = (
            a.data,
            b.data.t(),
            [sa],
            [recipes[left]],
            [0],
            [sb],
            [recipes[right]],
            [0],
            bias,
            torch.bfloat16,
        )
        for why_not, run, args in (
            (scaled.why_not_v1, scaled.run_v1, old),
            (scaled.why_not_v2, scaled.run_v2, new),
        ):
            assert why_not(*args) is None, (left, right, m, why_not(*args))
            with poisoned_allocations():
                compare(run(*args), want, 45.0, f"{left} {right} {m}x{n}x{k}")
            count += 1
    return count


def values() -> int:
    """NaN scales and elements, every code, zeros, and sums that only float32 holds."""
    count = 0
    plan = Plan("tiles", TILE, 4, 2)
    for fmt, swizzled in itertools.product((MXFP8, MXFP4), (False, True)):
        a, b = operand(6, 160, fmt, 5), operand(9, 160, fmt, 6)
        a.scale.view(torch.uint8)[2, 1] = 255
        b.scale.view(torch.uint8)[4, 4] = 255
        want = matmul_reference.scaled_mm(a, b, None, torch.float32, False)
        assert want[2].isnan().all()
        assert want[:, 4].isnan().all()
        assert not want[0, :4].isnan().any()
        if swizzled:
            a, b = swizzle(a), swizzle(b)
        compare(scaled.scaled_mm(a, b, None, torch.float32, plan=plan), want, 90.0, f"NaN scales {fmt}")
        count += 1
    # Every code of both element types and the scales of a trained model, against one one-hot row each: exact.
    for fmt in (MXFP8, MXFP8_E5M2, MXFP4):
        pack = fmt.element.packed
        data = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(-1, 32 // pack)
        rows = data.shape[0]
        scale = torch.arange(110, 110 + rows, dtype=torch.uint8, device=DEVICE)[:, None]
        b = ScaledTensor(data.view(fmt.element.dtype), scale.view(torch.float8_e8m0fnu), fmt)
        eye = quantize(torch.eye(32, device=DEVICE), MXFP8 if pack == 1 else MXFP4)
        finite = reference.decode(b).isfinite()
        # A row that holds a NaN or inf multiplies zeros to NaN everywhere, in the reference as here.
        want = matmul_reference.scaled_mm(eye, b, None, torch.float32, False)
        got = scaled.scaled_mm(eye, b, None, torch.float32, plan=plan)
        assert torch.equal(got.nan_to_num(7e30), want.nan_to_num(7e30)), fmt
        assert finite.all(1).sum() > 0
        count += 1
    zero = operand(4, 64, MXFP8, 7)
    zero.data.view(torch.uint8).zero_()
    got = scaled.scaled_mm(
        zero, operand(5, 64, MXFP8, 8), torch.ones(5, device=DEVICE), torch.float32, plan=plan
    )
    assert torch.equal(got, torch.ones(4, 5, device=DEVICE))
    return count + 1


def first() -> int:
    """Operands decoded to memory: the values themselves, and the product through them."""
    count = 0
    for fmt, (rows, k) in itertools.product((MXFP8, MXFP8_E5M2, MXFP4, BLOCK), [(5, 32), (130, 288)]):
        x = operand(rows, k, fmt, 9)
        dtypes = (torch.bfloat16, torch.float16)
        for dtype, one in zip(dtypes, (x, swizzle(x)) if fmt.is_mx else (x, x)):
            with poisoned_allocations():
                got = launch.decode(one, dtype)
            assert torch.equal(got, reference.decode(x).to(dtype)), f"{fmt} {rows}x{k} {dtype}"
            count += 1
    plan = Plan("decode_first")
    for dtype in (torch.bfloat16, torch.float32):
        a, b = operand(40, 160, MXFP8, 1, True), operand(48, 160, MXFP8, 2)
        bias = torch.randn(48, device=DEVICE).to(dtype)
        want = matmul_reference.scaled_mm(operand(40, 160, MXFP8, 1), b, bias, dtype, False)
        compare(scaled.scaled_mm(a, b, bias, dtype, plan=plan), want, 45.0, f"decode first {dtype}")
        count += 1
    return count


def calls() -> int:
    """PyTorch's own arguments, both operators, with and without out, through gate and kernel."""
    count = 0
    for dtype, fmt in ((torch.float8_e4m3fn, MXFP8), (torch.float4_e2m1fn_x2, MXFP4)):
        m, n, k = 37, 48, 160
        a, b = operand(m, k, fmt, 1), operand(n, k, fmt, 2)
        want = matmul_reference.scaled_mm(a, b, None, torch.bfloat16, False)
        for swizzled in (0, 1):
            sa, sb = (swizzle(x).scale if swizzled else x.scale for x in (a, b))
            args = (a.data, b.data.t(), [sa], [3], [swizzled], [sb], [3], [swizzled], None, torch.bfloat16)
            assert a.data.dtype == dtype
            assert scaled.why_not_v2(*args) is None, scaled.why_not_v2(*args)
            compare(scaled.run_v2(*args), want, 50.0, f"v2 {fmt} {swizzled}")
            out = torch.full((m, n), float("nan"), dtype=torch.bfloat16, device=DEVICE)
            assert scaled.why_not_v2_out(*args, out=out) is None
            assert scaled.run_v2(*args, out=out).data_ptr() == out.data_ptr()
            compare(out, want, 50.0, f"v2 out {fmt} {swizzled}")
            count += 2
        sa, sb = (x.scale if torch.version.hip else swizzle(x).scale for x in (a, b))
        args = (a.data, b.data.t(), sa, sb, None, None, torch.bfloat16)
        assert scaled.why_not_v1(*args) is None
        compare(scaled.run_v1(*args), want, 50.0, f"v1 {fmt}")
        count += 1
    assert hardware.architecture(DEVICE)
    return count


if __name__ == "__main__":
    if DEVICE == "cpu":
        from octavo.check.interpreter import install

        install()
    print(sys.argv[1], globals()[sys.argv[1]]())
