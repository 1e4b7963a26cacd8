"""Weights in 8 and 4 bits for inference: in a model, and in safetensors that transformers and vLLM read.

import octavo
octavo.quantize_weights(model, "mxfp4")
octavo.serving.save(model, "folder")
octavo.serving.load(other_model, "folder")
"""

from octavo.serving.files import load, save
from octavo.serving.schemes import SCHEMES, Scheme, get_scheme
from octavo.serving.weights import QuantizedLinear, WeightsReport, quantize_weights

__all__ = [
    "SCHEMES",
    "QuantizedLinear",
    "Scheme",
    "WeightsReport",
    "get_scheme",
    "load",
    "quantize_weights",
    "save",
]
