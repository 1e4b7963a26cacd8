"""How weights are kept for inference: one constant a scheme, with the names that other engines read it by.

MXFP8 and MXFP4 follow the ``compressed-tensors`` layout (``mxfp8-quantized``, ``mxfp4-pack-quantized``: e8m0 scales as
uint8, two e2m1 codes a byte with the even index in the low nibble); blockwise FP8 follows DeepSeek-V3's
(``weight_scale_inv``, float32, one for each 128 x 128 block), which transformers and vLLM call ``fp8``.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from octavo.formats import E4M3FN, MXFP4, MXFP8, Format

ACTIVATIONS = ("quantized", "16-bit")


@dataclass(frozen=True)
class Scheme:
    """Weights of linear layers in a format, and what their inputs are turned into.

    Args:
        name: as the user gives it.
        weight: format of the weight [N, K].
        activation: format of the input's rows, None to multiply in the input's own dtype.
        data: name of the tensor of codes in files.
        scale: name of the tensor of scales in files.
        stored_scale: dtype of the scales in files; e8m0 codes are stored as uint8.
        config: makes the ``quantization_config`` of ``config.json`` from the names of the layers left alone.
    """

    name: str
    weight: Format
    activation: Format | None
    data: str
    scale: str
    stored_scale: torch.dtype
    config: Callable[[Scheme, Sequence[str]], dict[str, Any]]

    def quantization_config(self, left_alone: Sequence[str]) -> dict[str, Any]:
        """The entry of ``config.json`` that tells another engine how to read the weights."""
        return self.config(self, left_alone)


def _mx_arguments(bits: int, dynamic: bool) -> dict[str, Any]:
    return {
        "num_bits": bits, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True,
        "dynamic": dynamic, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8",
    }  # fmt: skip


def _compressed_tensors(scheme: Scheme, left_alone: Sequence[str]) -> dict[str, Any]:
    bits = 8 // scheme.weight.element.packed
    form = "mxfp8-quantized" if bits == 8 else "mxfp4-pack-quantized"
    group: dict[str, Any] = {
        "targets": ["Linear"],
        "format": form,
        "weights": _mx_arguments(bits, dynamic=False),
    }
    if scheme.activation is not None:
        group["input_activations"] = _mx_arguments(8 // scheme.activation.element.packed, dynamic=True)
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": list(left_alone),
    }  # fmt: skip


def _fp8(scheme: Scheme, left_alone: Sequence[str]) -> dict[str, Any]:
    return {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": list(left_alone),
    }  # fmt: skip


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("mxfp8", MXFP8, MXFP8, "weight", "weight_scale", torch.uint8, _compressed_tensors),
        Scheme("mxfp4", MXFP4, None, "weight_packed", "weight_scale", torch.uint8, _compressed_tensors),
        Scheme(
            "fp8-blockwise",
            Format(E4M3FN, "128x128"),
            Format(E4M3FN, "1x128"),
            "weight",
            "weight_scale_inv",
            torch.float32,
            _fp8,
        ),
    )
}
"""By name. MXFP4 keeps inputs in 16 bits by default: 4-bit inputs cost far more accuracy than 4-bit weights."""


def get_scheme(scheme: str | Scheme) -> Scheme:
    """The scheme of that name.

    Raises:
        ValueError: for an unknown one.
    """
    if isinstance(scheme, Scheme):
        return scheme
    if scheme not in SCHEMES:
        close = difflib.get_close_matches(scheme, SCHEMES, 1)
        hint = f": did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown weight format {scheme!r}{hint} Choose from {', '.join(SCHEMES)}")
    return SCHEMES[scheme]
