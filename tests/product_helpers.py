"""What the tests of products share: devices, operands moved and decoded, reasons of kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import numerics_oracle as oracle
from octavo import dispatch
from octavo.formats import ScaledTensor
from quantize_helpers import codes, raw

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def to(x: ScaledTensor, device: str) -> ScaledTensor:
    """A scaled tensor on another device."""
    ends = None if x.group_ends is None else x.group_ends.to(device)
    return replace(x, data=x.data.to(device), scale=x.scale.to(device), group_ends=ends)


def decode64(x: ScaledTensor) -> torch.Tensor:
    """float64 values of a scaled matrix, by the oracle."""
    scale = raw(x.scale).numpy() if x.format.is_mx else x.scale.cpu().numpy()
    return torch.from_numpy(oracle.decode(codes(x), scale, x.format.element.name, x.format.granularity))


def serving(op: str, kernel: str, *args: Any) -> str | None:
    """Why ``kernel`` does not serve these arguments, or None."""
    return next(k.why_not(*args) for k in dispatch.kernels(op) if k.name == kernel)
