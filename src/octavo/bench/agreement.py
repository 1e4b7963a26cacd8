"""Whether a result is right before it is timed: bit for bit, or in dB."""

from __future__ import annotations

from typing import Any

import torch

TOLERANCE = 10 ** (-50 / 20)
"""Relative error of a bfloat16 product: 50 dB."""
FAST_TOLERANCE = 10 ** (-40 / 20)
"""The same where the accumulator may be Hopper's of 14 bits."""


def sqnr_db(result: torch.Tensor, wanted: torch.Tensor) -> float:
    """Signal to quantization noise ratio of ``result`` against ``wanted`` in dB; minus infinity with a NaN."""
    wanted = wanted.float()
    noise = (result.float() - wanted).norm()
    if noise.isnan():
        return float("-inf")
    return float(20 * torch.log10(wanted.norm() / noise)) if noise > 0 else float("inf")


def relative_error(result: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference over the norm of ``wanted``, in float64."""
    return ((result.double() - wanted.double()).norm() / wanted.double().norm()).item()


def same_bits(found: tuple[Any, ...], wanted: tuple[Any, ...], share: float = 0.0) -> str | None:
    """The first output that differs in more than ``share`` of its elements; NaN scales are all alike."""
    for n, (a, b) in enumerate(zip(found, wanted, strict=True)):
        if a is None or b is None or not b.numel():
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"output {n}: {a.dtype} {tuple(a.shape)} for {b.dtype} {tuple(b.shape)}"
        if a.dtype == torch.float32:
            differ = (a != b) & ~(a.isnan() & b.isnan())
        else:
            differ = a.view(torch.uint8) != b.view(torch.uint8)
        count = int(differ.sum())
        if count > share * differ.numel():
            return f"output {n}: {count} of {differ.numel()} differ"
    return None
