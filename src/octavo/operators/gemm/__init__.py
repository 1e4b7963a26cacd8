"""Matrix products behind PyTorch's operators: MX products where hardware has none, and 16-bit rows by narrow weights.

``F.scaled_mm`` with ``BlockWise1x32`` (``aten::_scaled_mm_v2``) and ``torch._scaled_mm`` with e8m0 scales raise on
Hopper and MI300; with ``octavo.operators.enable("gemm")`` they run there, decoded exactly inside the kernel. What the
kernels are right for is decided in :mod:`.scaled`; a refused call keeps PyTorch's kernel and its error.
Grouped products (``torch._grouped_mm``, ``F.grouped_mm``, ``_scaled_grouped_mm``) are in :mod:`.grouped`, FP8 products
with a scale a row or in blocks of 128 in :mod:`.fp8`, plain 16-bit ones in :mod:`.dense`, and under torch.compile in
:mod:`.compiled`.
:func:`mixed_mm` is no operator of PyTorch's: layers of :mod:`octavo.serving` call it.
"""

from __future__ import annotations

import torch

from octavo.operators import inductor
from octavo.operators.gemm import compiled, dense, grouped, scaled
from octavo.operators.gemm.mixed import mixed_mm
from octavo.operators.gemm.scaled import scaled_mm
from octavo.operators.override import Override

__all__ = ["OVERRIDES", "counted", "mixed_mm", "prepare", "reset", "scaled_mm", "turned"]

turned, counted, reset = compiled.turned, compiled.counted, compiled.reset


def prepare() -> None:
    """What ``enable`` does once beside registering: compiled MX products call the operator."""
    inductor.call_mx_products()


def _exists(overload: str) -> bool:
    """Whether this PyTorch has the operator; the newer ones of those below came one by one."""
    name, _, variant = overload.removeprefix("aten::").partition(".")
    packet = getattr(torch.ops.aten, name, None)
    return packet is not None and (variant or "default") in packet.overloads()


_OVERRIDES = (
    Override("aten::_scaled_mm_v2", scaled.why_not_v2, scaled.measured_v2, scaled.run_v2),
    Override("aten::_scaled_mm_v2.out", scaled.why_not_v2_out, scaled.measured_v2, scaled.run_v2),
    Override("aten::_scaled_mm", scaled.why_not_v1, scaled.measured_v1, scaled.run_v1),
    Override("aten::_scaled_mm.out", scaled.why_not_v1_out, scaled.measured_v1, scaled.run_v1),
    Override("aten::_grouped_mm", grouped.why_not_grouped, grouped.measured_grouped, grouped.run_grouped),
    Override("aten::_scaled_grouped_mm", grouped.why_not_scaled, grouped.measured_scaled, grouped.run_scaled),
    Override(
        "aten::_scaled_grouped_mm_v2",
        grouped.why_not_scaled_v2,
        grouped.measured_scaled_v2,
        grouped.run_scaled_v2,
    ),
    Override("aten::mm", dense.why_not_mm, dense.measured_mm, dense.run_mm, only_with_wins="mm"),
    Override("aten::addmm", dense.why_not_addmm, dense.measured_addmm, dense.run_addmm, only_with_wins="mm"),
)
OVERRIDES = tuple(override for override in _OVERRIDES if _exists(override.overload))
