"""MX products by ``F.scaled_mm``, and 16-bit rows by narrow weights, beside decoding the operands first.

Hopper and MI300 have no MX product, so ``aten`` there is what a user writes instead: decode to bfloat16, then multiply;
``compile`` is the same under torch.compile. These get the same quantized operands, and the result is checked against
the reference on them; ``bf16`` is the plain product of operands that were never quantized, and ``decode_first`` our own
decoding before PyTorch's product. FLOPs are those of the product; bytes are the quantized operands, their scales and
the output, each once.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
import torch.nn.functional as F

from octavo import operators, quantize
from octavo.bench import published
from octavo.bench.agreement import TOLERANCE, relative_error
from octavo.bench.cases import Case
from octavo.bench.timing import Contender, Inputs
from octavo.formats import E4M3FN, MXFP4, MXFP8, Format, ScaledTensor
from octavo.matmul import reference as matmul_reference
from octavo.operators import gemm
from octavo.operators.gemm import mixed, reference
from octavo.operators.gemm.plan import Plan

FORMATS = {"mxfp8": MXFP8, "mxfp4": MXFP4, "block": Format(E4M3FN, "128x128")}
LAYERS = ((4096, 4096), (28672, 4096), (4096, 14336), (8192, 8192))
MIXED = tuple((m, n, k) for n, k in LAYERS for m in (1, 16, 64, 256, 2048))
"""Rows of a decoding step and of a prompt, by layers of an 8B and a 70B Llama."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@functools.cache
def _e2m1(device: torch.device) -> torch.Tensor:
    # Made once: nothing may be copied from the host while a graph is captured.
    return torch.tensor([*_E2M1, *(-x for x in _E2M1)], device=device)


def decode(data: torch.Tensor, scale: torch.Tensor, fmt: Format) -> torch.Tensor:
    """bfloat16 values in plain PyTorch, as torch.compile can fuse them."""
    if not fmt.is_mx:
        wide = scale.repeat_interleave(128, 0)[: data.shape[0]].repeat_interleave(128, 1)[:, : data.shape[1]]
        return (data.float() * wide).bfloat16()
    if fmt.element.packed == 2:
        table = _e2m1(data.device)
        codes = data.view(torch.uint8)
        values = torch.stack((table[(codes & 15).int()], table[(codes >> 4).int()]), -1).flatten(1)
    else:
        values = data.float()
    power = torch.exp2(scale.view(torch.uint8).float() - 127)
    return (values.view(values.shape[0], -1, 32) * power[..., None]).flatten(1).bfloat16()


def _check(got: torch.Tensor, want: torch.Tensor) -> None:
    error = relative_error(got, want)
    assert error <= TOLERANCE, f"the result differs from the reference's by {error:.2e}"


def _size(rows: int, k: int, fmt: Format) -> int:
    scales = rows * k // 32 if fmt.is_mx else -(-rows // 128) * -(-k // 128) * 4
    return rows * k // fmt.element.packed + scales


def _mx_case(name: str, m: int, n: int, k: int, force: bool) -> Case:
    fmt = FORMATS[name]
    recipe, swizzle = F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4

    def make() -> Inputs:
        sides = [quantize(torch.randn(rows, k, device="cuda", dtype=torch.bfloat16), fmt) for rows in (m, n)]
        blocked = [reference.swizzle(x.scale.view(torch.uint8)).view(torch.float8_e8m0fnu) for x in sides]
        wide = [torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for rows in (m, n)]
        return (sides[0].data, sides[1].data, *blocked, sides[0].scale, sides[1].scale, *wide)

    def call(a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor, *_: Any) -> torch.Tensor:
        return F.scaled_mm(a, b.t(), sa, recipe, sb, recipe, swizzle, swizzle)

    def first(a: Any, b: Any, _: Any, __: Any, pa: torch.Tensor, pb: torch.Tensor, *___: Any) -> Any:
        return torch.mm(decode(a, pa, fmt), decode(b, pb, fmt).t())

    def plain(*inputs: torch.Tensor) -> torch.Tensor:
        return torch.mm(inputs[6], inputs[7].t())

    def check(inputs: Inputs, result: Any) -> None:
        a, b, _, _, pa, pb, *_ = inputs
        left, right = ScaledTensor(a, pa, fmt), ScaledTensor(b, pb, fmt)
        _check(result, matmul_reference.scaled_mm(left, right, None, torch.bfloat16, False))

    def why_not(a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor) -> str | None:
        arguments = (a, b.t(), [sa], [recipe.value], [swizzle.value], [sb], [recipe.value], [swizzle.value])
        return operators.why_not("gemm", "aten::_scaled_mm_v2", *arguments, out_dtype=torch.bfloat16)

    on = functools.partial(operators.enabled, "gemm", force=force)
    return Case(
        group=name,
        case=f"M={m} N={n} K={k}",
        bytes=_size(m, k, fmt) + _size(n, k, fmt) + m * n * 2,
        flops=2 * m * n * k,
        make=make,
        contenders={"octavo": Contender(call, on), "aten": Contender(first), "bf16": Contender(plain)},
        check=check,
        taken=lambda inputs: force or why_not(*inputs[:4]) is None,
        compiled=first,
        note="aten decodes both operands to bfloat16, then multiplies; bf16 multiplies what was never quantized",
        input_bytes=_size(m, k, fmt) + _size(n, k, fmt),
    )


def _mixed_case(name: str, m: int, n: int, k: int, force: bool) -> Case:
    fmt = FORMATS[name]

    def make() -> Inputs:
        weight = quantize(torch.randn(n, k, device="cuda", dtype=torch.bfloat16), fmt)
        x, wide = (torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for rows in (m, n))
        return x, weight.data, weight.scale, wide

    def call(x: torch.Tensor, data: torch.Tensor, scale: torch.Tensor, _: Any) -> torch.Tensor:
        return gemm.mixed_mm(x, ScaledTensor(data, scale, fmt))

    def first(x: torch.Tensor, data: torch.Tensor, scale: torch.Tensor, _: Any) -> torch.Tensor:
        return F.linear(x, decode(data, scale, fmt))

    def decode_first(x: torch.Tensor, data: torch.Tensor, scale: torch.Tensor, _: Any) -> torch.Tensor:
        return mixed.run_kernel(x, ScaledTensor(data, scale, fmt), None, Plan("decode_first"))

    def plain(x: torch.Tensor, data: torch.Tensor, scale: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
        return F.linear(x, wide)

    def check(inputs: Inputs, result: Any) -> None:
        x, data, scale, _ = inputs
        _check(result, reference.mixed_mm(x, ScaledTensor(data, scale, fmt), None))

    return Case(
        group=f"bf16_x_{name}",
        case=f"M={m} N={n} K={k}",
        bytes=m * k * 2 + _size(n, k, fmt) + m * n * 2,
        flops=2 * m * n * k,
        make=make,
        contenders={
            "octavo": Contender(call, mixed.forced if force else contextlib.nullcontext),
            "aten": Contender(first),
            "decode_first": Contender(decode_first),
            "bf16": Contender(plain),
        },
        check=check,
        taken=lambda inputs: (
            force or mixed.measured(inputs[0], ScaledTensor(inputs[1], inputs[2], fmt)) is None
        ),
        compiled=first,
        note="aten decodes the weight to bfloat16, then multiplies; bf16 has a weight that was never quantized",
        input_bytes=m * k * 2 + _size(n, k, fmt),
    )


def cases(force: bool = False) -> list[Case]:
    """The published shapes in both formats, then 16-bit rows by each kind of weight."""
    both = [_mx_case(name, *shape, force) for name in ("mxfp8", "mxfp4") for shape in published.MX]
    return both + [_mixed_case(name, *shape, force) for name in FORMATS for shape in MIXED]
