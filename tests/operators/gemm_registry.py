"""Checks of the overrides of the gemm operator on the CPU, registered under the CPU key for this process alone.

TRITON_INTERPRET=1 python tests/operators/gemm_registry.py scaled|grouped|fp8_grouped|compiled|inductor|refusals|empty
"""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F
from gemm_checks import compare, operand, swizzle

from octavo import operators, quantize, quantize_grouped
from octavo.formats import E4M3FN, MXFP4, MXFP8, Format
from octavo.matmul import reference as matmul_reference
from octavo.operators import gemm, registry

BF16 = torch.bfloat16
SCALED_GROUPED_MM = torch._scaled_grouped_mm  # pyright: ignore[reportPrivateImportUsage]
SCALED_MM = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]


def register() -> None:
    """Route every overload at the CPU key; the kernels run in Triton's interpreter."""
    from octavo.check.interpreter import install

    install()
    registry.register_for_test("gemm", gemm.OVERRIDES, "CPU")


def counts() -> dict[str, tuple[int, dict[str, int]]]:
    """Calls taken, and refused by reason, of each overload that was called."""
    found = {s.overload.removeprefix("aten::"): (s.taken, s.refused) for s in operators.status()}
    return {name: (taken, refused) for name, (taken, refused) in found.items() if taken or refused}


def scaled() -> None:
    """``F.scaled_mm`` and ``torch._scaled_mm`` with MX operands: taken, right, and back to PyTorch when off."""
    register()
    recipe, none, blocked = (
        F.ScalingType.BlockWise1x32,
        F.SwizzleType.NO_SWIZZLE,
        F.SwizzleType.SWIZZLE_32_4_4,
    )
    for fmt in (MXFP8, MXFP4):
        a, b = operand(37, 160, fmt, 1), operand(48, 160, fmt, 2)
        sa, sb = swizzle(a).scale, swizzle(b).scale
        bias = torch.randn(48).bfloat16()
        want = matmul_reference.scaled_mm(a, b, bias, BF16, False)
        with operators.enabled("gemm", force=True):
            plain = F.scaled_mm(a.data, b.data.t(), a.scale, recipe, b.scale, recipe, none, none, bias)
            got = F.scaled_mm(a.data, b.data.t(), sa, recipe, sb, recipe, blocked, blocked, bias)
            old = SCALED_MM(a.data, b.data.t(), sa, sb, bias, out_dtype=BF16)
            out = torch.empty_like(got)
            SCALED_MM(a.data, b.data.t(), sa, sb, bias, out_dtype=BF16, out=out)
        compare(got, want, 45.0, str(fmt))
        assert torch.equal(got, plain)
        assert torch.equal(got, old)
        assert torch.equal(got, out)
    assert counts() == {"_scaled_mm_v2": (4, {}), "_scaled_mm": (2, {}), "_scaled_mm.out": (2, {})}
    with pytest.raises((RuntimeError, ValueError, NotImplementedError)):
        F.scaled_mm(a.data, b.data.t(), sa, recipe, sb, recipe, blocked, blocked, bias)


def _grouped_inputs(m: int = 40, k: int = 64, n: int = 48, groups: int = 4):
    """Rows, weights whose contraction is contiguous, and ends with an empty group and rows past the last."""
    torch.manual_seed(0)
    x, w = torch.randn(m, k).bfloat16(), torch.randn(groups, n, k).bfloat16()
    return x, w, torch.tensor([16, 16, 33, 37], dtype=torch.int32)[:groups]


def grouped() -> None:
    """``F.grouped_mm`` in both forms, with empty groups, a tail, a bias and gradients; other forms are PyTorch's."""
    register()
    x, w, offs = _grouped_inputs()
    bias = torch.randn(4, 48).bfloat16()
    want = matmul_reference.grouped_mm(x, w, offs, None)
    over = matmul_reference.grouped_mm(x.t(), (y := torch.randn(40, 24).bfloat16()).t(), offs, None)
    batched = torch.randn(4, 8, 64).bfloat16()
    stock = F.grouped_mm(batched, w.mT)
    with operators.enabled("gemm", force=True):
        got = F.grouped_mm(x, w.mT, offs=offs)
        turned = F.grouped_mm(x, w.mT.contiguous(), offs=offs)
        biased = torch.ops.aten._grouped_mm(x, w.mT, offs, bias)
        columns = F.grouped_mm(x.t(), y, offs=offs)
        assert torch.equal(F.grouped_mm(batched, w.mT), stock)
        leaf = w.clone().requires_grad_()
        F.grouped_mm(x, leaf.mT, offs=offs)[:37].float().square().sum().backward()
    compare(got[:37], want[:37], 50.0, "rows")
    compare(turned[:37], want[:37], 50.0, "rows of a contiguous weight")
    compare(biased[:37], matmul_reference.grouped_mm(x, w, offs, bias)[:37], 45.0, "rows with bias")
    compare(columns.flatten(0, 1), over.flatten(0, 1), 50.0, "over groups")
    assert not columns[1].any()
    assert leaf.grad is not None
    assert not leaf.grad[1].any()
    assert leaf.grad[0].any()
    taken, refused = counts()["_grouped_mm"]
    assert taken >= 5, (taken, refused)
    assert "only a 2-D first operand is served, by a 3-D or 2-D one" in refused


def fp8_grouped() -> None:
    """``_scaled_grouped_mm`` with a scale a row, both forms, and its successor with recipes."""
    register()
    x, w, offs = _grouped_inputs()
    fmt = Format(E4M3FN, "rowwise")
    a, b = quantize(x, fmt), quantize(w, fmt)
    want = matmul_reference.scaled_grouped_mm(a, b, offs, None, BF16, False)
    with operators.enabled("gemm", force=True):
        got = SCALED_GROUPED_MM(
            a.data, b.data.mT, a.scale.view(-1), b.scale.view(4, -1), offs, out_dtype=BF16
        )
        compare(got[:37], want[:37], 50.0, "rows")
        over = quantize_grouped(x, offs, fmt, transpose=True, align=16)
        left = quantize_grouped(x[:, :48].contiguous(), offs, fmt, transpose=True, align=16)
        ends, flat = over.group_ends, (left.scale.reshape(-1), over.scale.reshape(-1))
        assert ends is not None
        got = SCALED_GROUPED_MM(left.data, over.data.t(), *flat, ends, out_dtype=BF16)
        want = matmul_reference.scaled_grouped_mm(left, over, ends, None, BF16, False)
        compare(got.flatten(0, 1), want.flatten(0, 1), 50.0, "over groups")
    assert counts()["_scaled_grouped_mm"] == (2, {})


def compiled() -> None:
    """One graph with dynamic rows; the calls reach the kernels at run time."""
    register()
    x, w, offs = _grouped_inputs()

    def step(x: torch.Tensor) -> torch.Tensor:
        return F.grouped_mm(x * 2, w.mT, offs=offs).relu()

    expected = [step(x), step(x[:38].clone())]
    run = torch.compile(step, backend="aot_eager", fullgraph=True)
    with operators.enabled("gemm", force=True):
        for rows, want in zip((40, 38), expected):
            compare(run(x[:rows].clone())[:37], want[:37], 48.0, "compiled")
    assert counts()["_grouped_mm"][0] == 2


def inductor() -> None:
    """Compiled MX products by ``F.scaled_mm``: one graph through Inductor, served at run time."""
    register()
    gemm.prepare()
    gemm.prepare()
    a, b = operand(40, 256, MXFP8, 1), operand(48, 256, MXFP8, 2)
    sa, sb = swizzle(a).scale, swizzle(b).scale
    recipe, blocked = F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4

    def step(x: torch.Tensor) -> torch.Tensor:
        return F.scaled_mm(x, b.data.t(), sa, recipe, sb, recipe, blocked, blocked).relu()

    want = matmul_reference.scaled_mm(a, b, None, BF16, False).relu()
    with operators.enabled("gemm", force=True):
        compare(torch.compile(step, fullgraph=True)(a.data), want, 45.0, "compiled")
    assert counts() == {"_scaled_mm_v2": (1, {})}


def _stock(call) -> tuple[type, str]:
    with pytest.raises(Exception) as found:
        call()
    return found.type, str(found.value)


def refusals() -> None:
    """What is refused behaves as without Octavo: the same results, the same errors."""
    a, b = operand(32, 64, MXFP8, 1), operand(48, 64, MXFP8, 2)
    one = torch.ones(())
    sa, sb = swizzle(a).scale, swizzle(b).scale
    wrong = {
        "there are not as many scales": lambda: SCALED_MM(a.data, b.data.t(), sa[:-1], sb, out_dtype=BF16),
        "not bfloat16, float16 or float32": lambda: SCALED_MM(a.data, b.data.t(), sa, sb),
        "that can be multiplied": lambda: SCALED_MM(a.data, b.data, sa, sb, out_dtype=BF16),
        "multiples of 16": lambda: SCALED_MM(a.data, b.data[:7].t(), sa, sb, out_dtype=BF16),
    }
    tensorwise = lambda: SCALED_MM(a.data, b.data.t(), one, one, out_dtype=BF16)  # noqa: E731
    before, errors = tensorwise(), {reason: _stock(call) for reason, call in wrong.items()}
    register()
    with operators.enabled("gemm", force=True):
        assert torch.equal(tensorwise(), before)
        for reason, call in wrong.items():
            assert _stock(call) == errors[reason], reason
    taken, refused = counts()["_scaled_mm"]
    assert taken == 0
    for words in ("not BlockWise1x32", *wrong):
        assert sum(n for reason, n in refused.items() if words in reason) == 1, (words, refused)


def empty() -> None:
    """Without rows, columns or a contraction PyTorch answers, with Octavo on as without it."""
    register()
    for m, n, k in ((0, 16, 32), (16, 0, 32), (16, 16, 0)):
        a, b = torch.empty(m, k, dtype=torch.float8_e4m3fn), torch.empty(n, k, dtype=torch.float8_e4m3fn)
        scale = torch.empty(0, dtype=torch.float8_e8m0fnu)
        assert gemm.scaled.why_not_v1(a, b.t(), scale, scale, out_dtype=BF16) == "an extent is zero"
        calls = [lambda a=a, b=b: SCALED_MM(a, b.t(), torch.ones(()), torch.ones(()), out_dtype=BF16)]
        with operators.enabled("gemm", force=True):
            on = [call() for call in calls]
        assert all(torch.equal(x, call()) for x, call in zip(on, calls))


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    print(sys.argv[1], "passed")
