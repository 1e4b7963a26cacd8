"""Opt-in reuse of quantized weights between the micro-batches of one optimizer step.

Inside ``with octavo.accumulate():`` a parameter is quantized once for each format and direction and served
from here until its version changes (every in-place write that PyTorch sees counts one up), any optimizer of
the process takes a step, or the block ends. Writes through ``.data`` are not seen by PyTorch's version
counter and so not by this cache; ``accumulate(debug=True)`` compares a checksum at each use and raises.
Under torch.compile and CUDA-graph capture the cache is off: such graphs quantize inside the graph.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from octavo.formats import Format, ScaledTensor
from octavo.quantize import quantize
from octavo.training.shared import capturing

T = TypeVar("T")

_Place = tuple[Any, ...]
"""Where a weight lies: address, shape, strides and dtype, the same for a parameter and its detached views."""


@dataclass
class _Entry:
    version: int
    quantized: Any
    checksum: torch.Tensor | None


@dataclass
class _Cache:
    debug: bool
    parameters: dict[_Place, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    entries: dict[tuple[Any, ...], _Entry] = field(default_factory=dict)


_active: list[_Cache] = []


@contextlib.contextmanager
def accumulate(*, debug: bool = False) -> Iterator[None]:
    """Quantize each weight once while gradients accumulate; see the module's docstring for its bounds.

    Args:
        debug: compare a checksum of the weight at each use; one synchronisation each.

    Raises:
        RuntimeError: with ``debug``, at the first use of a weight that was written through ``.data``.
    """
    cache = _Cache(debug)
    hook = register_optimizer_step_post_hook(lambda *_: cache.entries.clear())
    _active.append(cache)
    try:
        yield
    finally:
        _active.remove(cache)
        hook.remove()


def quantize_weight(weight: torch.Tensor, fmt: Format, transpose: bool = False) -> ScaledTensor:
    """``quantize(weight, fmt, transpose=transpose)``, from the cache where that is on and still true."""
    return cached((weight,), (fmt.key, transpose), lambda: quantize(weight, fmt, transpose=transpose))


def cached(weights: Sequence[torch.Tensor], key: tuple[Hashable, ...], make: Callable[[], T]) -> T:
    """``make()``, a quantized form of ``weights`` called ``key``, once while the cache is on and it stays true.

    Raises:
        RuntimeError: with ``accumulate(debug=True)``, if a weight changed unseen by its version counter.
    """
    if torch.compiler.is_compiling() or not _active or capturing() or any(w.is_inference() for w in weights):
        return make()
    cache = _active[-1]
    places = tuple(_place(w) for w in weights)
    if not all(_is_parameter(cache, w, place) for w, place in zip(weights, places, strict=True)):
        return make()
    entry, version = cache.entries.get((places, key)), sum(w._version for w in weights)
    if entry is None or entry.version != version:
        checksum = _checksum(weights) if cache.debug else None
        entry = cache.entries[(places, key)] = _Entry(version, make(), checksum)
    elif entry.checksum is not None and not torch.equal(entry.checksum, _checksum(weights)):
        raise RuntimeError(
            f"a weight of shape {tuple(weights[0].shape)} changed without PyTorch's version counter seeing it, "
            "so its cached FP8 copy is stale: write in place under torch.no_grad() instead of through .data"
        )
    return entry.quantized


def _place(weight: torch.Tensor) -> _Place:
    return (weight.data_ptr(), tuple(weight.shape), weight.stride(), weight.dtype)


def _is_parameter(cache: _Cache, weight: torch.Tensor, place: _Place) -> bool:
    """Whether ``weight`` is a parameter, or lies where a living parameter that was seen here lies.

    Backward under activation checkpointing gets its weight detached: another object, the same memory and
    version counter.
    """
    if isinstance(weight, torch.nn.Parameter):
        known = cache.parameters.get(place)
        if known is None or known() is not weight:
            cache.parameters[place] = weakref.ref(weight)
            cache.entries = {k: e for k, e in cache.entries.items() if place not in k[0]}
        return True
    known = cache.parameters.get(place)
    return known is not None and known() is not None


def _checksum(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    sums = []
    for weight in weights:
        bits = weight.detach().contiguous().view(torch.uint8).to(torch.int64).flatten()
        sums.append((bits * (torch.arange(bits.numel(), device=bits.device) % 1021 + 1)).sum())
    return torch.stack(sums)
