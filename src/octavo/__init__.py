"""Octavo: 8-bit floating-point training and faster kernels behind PyTorch's own operators."""

import importlib

from octavo import hardware as _hardware
from octavo._version import __version__
from octavo.dispatch import explain, use_kernels
from octavo.formats import MXFP4, MXFP8, Element, Format, ScaledTensor, ScaleLayout
from octavo.hardware import native_format
from octavo.matmul import scaled_grouped_mm, scaled_mm
from octavo.quantize import dequantize, quantize, quantize_both, quantize_grouped
from octavo.training.convert import ConvertReport, convert
from octavo.training.experts import GroupedExperts
from octavo.training.fsdp import prepare_fsdp
from octavo.training.modules import Linear, grouped_mm
from octavo.training.modules import linear_function as linear
from octavo.training.monitor import Monitor, monitor
from octavo.training.recipes import RECIPES, Product, Recipe, get_recipe
from octavo.training.weight_cache import accumulate

__all__ = [
    "MXFP4",
    "MXFP8",
    "RECIPES",
    "ConvertReport",
    "Element",
    "Format",
    "GroupedExperts",
    "Linear",
    "Monitor",
    "Product",
    "Recipe",
    "ScaleLayout",
    "ScaledTensor",
    "__version__",
    "accumulate",
    "convert",
    "dequantize",
    "explain",
    "get_recipe",
    "grouped_mm",
    "linear",
    "monitor",
    "native_format",
    "prepare_fsdp",
    "quantize",
    "quantize_both",
    "quantize_grouped",
    "scaled_grouped_mm",
    "scaled_mm",
    "use_kernels",
]

_hardware.check_torch_version()


def __getattr__(name: str) -> object:
    # Operators and serving are loaded when they are first named, so that training pays nothing for them.
    if name in ("operators", "serving"):
        return importlib.import_module(f"octavo.{name}")
    if name == "quantize_weights":
        return importlib.import_module("octavo.serving").quantize_weights
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")
