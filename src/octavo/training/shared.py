"""Layers that read the same tensor share one quantization of it, in eager mode.

The q, k and v projections of an attention layer, or gate and up of an MLP, get the very same input. The last
input's quantized operands are kept while that tensor lives, and served again if the same tensor comes with
the same version and formats: one pass instead of three, and one saved 8-bit copy for backward instead of
three. Under torch.compile common subexpressions do this; under CUDA-graph capture it is off, because a graph
must quantize what its replay finds in memory. Only activations of a training step are shared, tensors that
autograd made: a leaf may be a buffer that something outside PyTorch refills without the version counter seeing it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class _Last(threading.local):
    """What the calling thread quantized last: (weak reference to the tensor, version, key, result)."""

    entry: tuple[weakref.ref[torch.Tensor], int, Hashable, Any] | None = None


_last = _Last()


def share(x: torch.Tensor, key: Hashable, make: Callable[[], T]) -> T:
    """``make()``, or its last result if that was for this tensor, at this version, under this ``key``."""
    if torch.compiler.is_compiling() or x.grad_fn is None or capturing():
        return make()
    entry = _last.entry
    if entry is not None and entry[0]() is x and entry[1:3] == (x._version, key):
        return entry[3]
    result = make()
    _last.entry = (weakref.ref(x, _forget), x._version, key, result)
    return result


def _forget(reference: weakref.ref[torch.Tensor]) -> None:
    # The tensor is gone, and with it any use of its quantized copy.
    if _last.entry is not None and _last.entry[0] is reference:
        _last.entry = None


def capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
