"""Products of operands decoded in the kernel, executed as gfx942 and gfx950 code on small tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gcn_helpers import both_targets
from test_gcn_package import normal, on, quantized, sqnr

pytest.importorskip("triton", reason="compiling kernels needs Triton")

from octavo.formats import E4M3FN, MXFP4, MXFP8, Format, ScaledTensor, ScaleLayout
from octavo.matmul import reference as matmul_reference
from octavo.operators.gemm import launch, reference, scaled
from octavo.operators.gemm.plan import Plan

pytestmark = [pytest.mark.amd, pytest.mark.slow]

M, N, K = 20, 80, 160


def _swizzled(x: ScaledTensor) -> ScaledTensor:
    flat = reference.swizzle(x.scale.view(torch.uint8), padding=255).view(torch.float8_e8m0fnu)
    return replace(x, scale=flat, layout=ScaleLayout.SWIZZLED_32_4_4)


@both_targets
@pytest.mark.parametrize("fmt", [MXFP8, MXFP4], ids=["mxfp8", "mxfp4"])
def test_mx_products(fmt: Format, target: str) -> None:
    """Swizzled scales with NaN in their padding; native on gfx950, decoded with exchanged operands on gfx942."""
    a, b = quantized(normal(M, K), fmt), quantized(normal(N, K, seed=1), fmt)
    native = target == "gfx950"
    plan = Plan("native" if native else "tiles", (32, 64, 128), 4, 1, split=2, swap=not native)
    got = on(target, lambda: scaled.scaled_mm(_swizzled(a), _swizzled(b), plan=plan))
    assert sqnr(got, matmul_reference.scaled_mm(a, b, None, torch.bfloat16, False)) > 50


@both_targets
@pytest.mark.parametrize("fmt", [MXFP8, MXFP4, Format(E4M3FN, "128x128")], ids=["mxfp8", "mxfp4", "block"])
def test_rows_by_a_narrow_weight(fmt: Format, target: str) -> None:
    x, w = normal(M, K), quantized(normal(N, K, seed=1), fmt)
    plan = Plan("tiles", (16, 64, 128), 4, 1, swap=True)
    got = on(target, lambda: launch.product(x, w, None, torch.empty(M, N, dtype=x.dtype), plan))
    assert sqnr(got, reference.mixed_mm(x, w, None)) > 50


@both_targets
def test_decoding_to_memory(target: str) -> None:
    for fmt in (MXFP8, MXFP4):
        x = quantized(normal(40, K), fmt)
        got = on(target, lambda x=x: launch.decode(_swizzled(x), torch.bfloat16))
        assert torch.equal(got, reference.decode(x).bfloat16())
