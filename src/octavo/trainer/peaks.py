"""Peak rates of cards, and how much of them a mixed-precision step uses."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from octavo.trainer.flops import FP8_OPERATORS


@dataclass(frozen=True)
class Peak:
    """Dense matrix rates of one card in TFLOPS, as its maker states them; None where it has no such unit."""

    bf16: float
    fp8: float | None
    fp32: float
    """With float32 operands: on NVIDIA cards outside the tensor cores."""
    tf32: float | None


_H100_SXM = Peak(bf16=989.4, fp8=1978.9, fp32=66.9, tf32=494.7)
_NVL = Peak(bf16=835.5, fp8=1670.5, fp32=60.0, tf32=417.5)
_CDNA3 = Peak(bf16=1307.4, fp8=2614.9, fp32=163.4, tf32=653.7)

PEAKS: dict[str, Peak] = {
    "H200 NVL": _NVL,
    "H200": _H100_SXM,
    "GH200": _H100_SXM,
    "H100 NVL": _NVL,
    "H100 PCIe": Peak(bf16=756.0, fp8=1513.0, fp32=51.0, tf32=378.0),
    "H100": _H100_SXM,
    "A100": Peak(bf16=312.0, fp8=None, fp32=19.5, tf32=156.0),
    "MI300X": _CDNA3,
    "MI325X": _CDNA3,
    "MI350X": Peak(bf16=2309.6, fp8=4614.0, fp32=144.2, tf32=None),
    "MI355X": Peak(bf16=2516.6, fp8=5033.2, fp32=157.3, tf32=None),
}
"""By a part of the name the driver gives; the first that fits counts. From the makers' data sheets, without
sparsity. MI350 has no TF32 unit and emulates it."""


def peak_of(device: torch.device) -> Peak | None:
    """The card's rates, None for a CPU and for a card that is not in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def ideal_seconds(flops: dict[str, int], dtype: torch.dtype, peak: Peak) -> float | None:
    """How long ``flops`` by operator take at the card's peak: 8-bit products at that of FP8, the rest at that
    of ``dtype``. None where the card lacks one of them.

    This is the mixed-precision form of model FLOPs utilisation (PaLM, arXiv:2204.02311, appendix B): a sum
    over dtypes of FLOPs over that dtype's peak. Dividing all FLOPs by one peak would let a recipe with more
    8-bit products look better, or worse, at the same speed.
    """
    fp8 = sum(n for operator, n in flops.items() if operator in FP8_OPERATORS)
    fp32_rate = peak.tf32 if torch.backends.cuda.matmul.allow_tf32 else peak.fp32
    rate = {torch.float32: fp32_rate}.get(dtype, peak.bf16)
    if rate is None or (fp8 and peak.fp8 is None):
        return None
    return (sum(flops.values()) - fp8) / (rate * 1e12) + (fp8 / (peak.fp8 * 1e12) if peak.fp8 else 0.0)


def mfu(
    flops: dict[str, int], seconds: float | None, device: torch.device, dtype: torch.dtype
) -> float | None:
    """Share of the card's peak that a step of ``seconds`` reached, 0 to 1; None where the peak is not known.

    Attention counts in full, as in the definition, though causal attention computes half of it.
    """
    peak = peak_of(device)
    ideal = ideal_seconds(flops, dtype, peak) if peak and flops else None
    return ideal / seconds if ideal is not None and seconds else None
