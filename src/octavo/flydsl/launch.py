"""Allocation and launches of the FlyDSL kernels. Imported when the first call is served.

No launch here was ever made on a GPU: `octavo.check.gcn.torch_launch.executing` replaces ``launch`` to run this code
on CPU tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from octavo.compile_cases import CompileCase
from octavo.flydsl.plan import MM_TILE, MX_K
from octavo.formats import ScaledTensor

_compiled: dict[tuple[Any, ...], Any] = {}


def launch(case: CompileCase, grid: Sequence[int], arguments: Sequence[Any]) -> None:
    """Run ``case`` on the current stream of its tensors' device.

    Args:
        case: the kernel, with the constants to build it from; compiled at its first launch on a device and kept,
            since each plain call of a FlyDSL function traces it again.
        grid: workgroups in x, y and z.
        arguments: its run-time arguments in the order of ``case.signature``.
    """
    from octavo.flydsl.kernel import placeholders

    device = next(a.device for a in arguments if isinstance(a, torch.Tensor))
    with torch.cuda.device(device):
        plain = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        sizes = (*grid, 1, 1)[:3]
        key = (case.name, tuple(case.constexprs.items()), case.divisible, device.index)
        run = _compiled.get(key)
        if run is not None:
            run(*plain, *sizes, stream)
            return
        import flydsl.compiler as flyc
        import flydsl.expr as fx

        # FlyDSL compiles by running once on what it is given.
        typed = placeholders(case.signature, case.divisible, plain)
        function = case.function.build(**case.constexprs)
        _compiled[key] = flyc.compile(function, *typed, *sizes, fx.Stream(stream))


def fused_rms_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None, eps: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``aten::_fused_rms_norm`` for arguments that ``why_not_rms_norm`` accepts: y, and rstd in float32."""
    from octavo.flydsl.rms_norm_kernels import rms_norm_case

    dims, n = len(normalized_shape), math.prod(normalized_shape)
    x = input.reshape(-1, n)
    # A kernel whose lanes read 16 bytes at once wants rows to start at multiples of them.
    case = rms_norm_case(n, weight is not None)
    if case.divisible:
        x = rows_of_16_bytes(x)
    elif x.stride(1) != 1:
        x = x.contiguous()
    y = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    rstd = torch.empty((*input.shape[:-dims], *([1] * dims)), dtype=torch.float32, device=input.device)
    scale = x if weight is None else aligned(weight.contiguous())
    epsilon = torch.finfo(torch.float32).eps if eps is None else eps
    launch(case, (x.shape[0],), (x, scale, y, rstd, x.stride(0), epsilon))
    return y, rstd


def aligned(x: torch.Tensor) -> torch.Tensor:
    """``x``, contiguous, at an address that is a multiple of 16; a copy if it is not at one."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


def rows_of_16_bytes(x: torch.Tensor) -> torch.Tensor:
    """``x`` [rows, columns] with unit column stride and every row at a multiple of 16 bytes; a copy if it is not so."""
    wide = x.stride(1) == 1 and x.stride(0) * x.element_size() % 16 == 0
    return aligned(x if wide else x.contiguous())


def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, K] @ b [N, K].T in bfloat16 for operands that ``why_not_mm`` accepts, summed in float32."""
    from octavo.flydsl.mm_kernels import mm_case

    a, b = rows_of_16_bytes(a), rows_of_16_bytes(b)
    m, n, k = a.shape[0], b.shape[0], a.shape[1]
    c = torch.empty((m, n), dtype=a.dtype, device=a.device)
    grid = (-(-m // MM_TILE), -(-n // MM_TILE))
    launch(mm_case(), grid, (a, b, c, m, n, k, a.stride(0), b.stride(0)))
    return c


def scaled_mm(
    a: ScaledTensor, b: ScaledTensor, bias: torch.Tensor | None, out_dtype: torch.dtype, fast_accum: bool
) -> torch.Tensor:
    """a [M, K] @ b [N, K].T in bfloat16 for operands that ``why_not_scaled_mm`` accepts."""
    from octavo.flydsl.mx_kernels import mx_case

    (m, k), n = a.shape, b.shape[0]
    case = mx_case(a.format.element.name, b.format.element.name, k % MX_K == 0)
    data = [aligned(x.data.contiguous().view(torch.uint8)) for x in (a, b)]
    scales = [aligned(x.scale.contiguous().view(torch.uint8)) for x in (a, b)]
    c = torch.empty((m, n), dtype=out_dtype, device=a.device)
    launch(case, (-(-m // MM_TILE), -(-n // MM_TILE)), (*data, *scales, c, m, n, k))
    return c
