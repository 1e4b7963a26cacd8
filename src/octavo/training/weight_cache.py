"""Opt-in reuse of quantized weights between the micro-batches of one optimizer step.

Inside ``with octavo.accumulate():`` a parameter is quantized once for each format and direction and served
from here until its version changes (every in-place write that PyTorch sees counts one up), any optimizer of
the process takes a step, or the block ends. A frozen parameter outlives optimizer steps: with the block around
the whole of a LoRA fine-tuning the base is quantized once, for two more bytes an element. Writes through ``.data``
are not seen by PyTorch's version counter and so not by this cache (PEFT merges adapters that way: merge outside
the block); ``accumulate(debug=True)`` compares a checksum at each use and raises. Under torch.compile and
CUDA-graph capture the cache is off: such graphs quantize inside the graph.

Under FSDP2 an 8-bit copy lives as long as the unsharded weight: when FSDP has freed that, the copy goes at the
next weight that is quantized, since copies of the whole model would undo the sharding. So the cache saves work
where weights stay unsharded between micro-batches (``reshard_after_forward=False`` and
``set_reshard_after_backward(False)``). FSDP writes unsharded weights without counting a version: an optimizer
that is not a ``torch.optim.Optimizer`` must step outside the block. Weights that arrive in 8 bits already
(:func:`octavo.prepare_fsdp`) and DTensors are not cached.
"""

from __future__ import annotations

import contextlib
import sys
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
class _Cast:
    """A copy of a parameter in autocast's dtype, as long as that very tensor lives."""

    copy: weakref.ref[torch.Tensor]
    master: weakref.ref[torch.Tensor]
    version: int


@dataclass
class _Cache:
    debug: bool
    parameters: dict[_Place, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    casts: dict[int, _Cast] = field(default_factory=dict)
    entries: dict[tuple[Any, ...], _Entry] = field(default_factory=dict)


_active: list[_Cache] = []


@contextlib.contextmanager
def accumulate(*, debug: bool = False) -> Iterator[None]:
    """Quantize each weight once while gradients accumulate, and a frozen one once for all steps of the block.

    See the module's docstring for its bounds.

    Args:
        debug: compare a checksum of the weight at each use; one synchronisation each.

    Raises:
        RuntimeError: with ``debug``, at the first use of a weight that was written through ``.data``.
    """
    cache = _Cache(debug)
    hook = register_optimizer_step_post_hook(lambda *_: _keep_frozen(cache))
    _active.append(cache)
    try:
        yield
    finally:
        _active.remove(cache)
        hook.remove()


def quantize_weight(
    weight: torch.Tensor, fmt: Format, transpose: bool = False, after: torch.Tensor | None = None
) -> ScaledTensor:
    """``quantize`` with these arguments, from the cache where that is on and still true."""
    make = lambda: quantize(weight, fmt, transpose=transpose, after=after)  # noqa: E731
    return cached((weight,), (fmt.key, transpose), make)


def cached(weights: Sequence[torch.Tensor], key: tuple[Hashable, ...], make: Callable[[], T]) -> T:
    """``make()``, a quantized form of ``weights`` called ``key``, once while the cache is on and it stays true.

    Raises:
        RuntimeError: with ``accumulate(debug=True)``, if a weight changed unseen by its version counter.
    """
    if torch.compiler.is_compiling() or not _active or capturing() or not all(map(_cacheable, weights)):
        return make()
    cache = _active[-1]
    sources = [_source(cache, w) for w in weights]
    if any(source is None for source in sources):
        return make()
    places, versions = zip(*(source for source in sources if source is not None), strict=True)
    entry, version = cache.entries.get((places, key)), sum(versions)
    if entry is None or entry.version != version:
        _drop_freed(cache)
        checksum = _checksum(weights) if cache.debug else None
        entry = cache.entries[(places, key)] = _Entry(version, make(), checksum)
    elif entry.checksum is not None and not torch.equal(entry.checksum, _checksum(weights)):
        raise RuntimeError(
            f"a weight of shape {tuple(weights[0].shape)} changed without PyTorch's version counter seeing it, "
            "so its cached FP8 copy is stale: write in place under torch.no_grad() instead of through .data"
        )
    return entry.quantized


def _cacheable(weight: torch.Tensor) -> bool:
    """Whether the memory of ``weight`` says which weight it is: a subclass holds its data elsewhere."""
    return type(weight) in (torch.Tensor, torch.nn.Parameter) and not weight.is_inference()


def _keep_frozen(cache: _Cache) -> None:
    """Forget what an optimizer may have written: everything but parameters that take no gradient."""
    _drop_freed(cache)
    owners = {place: owner() for place, owner in cache.parameters.items()}
    frozen = {place for place, owner in owners.items() if owner is not None and not owner.requires_grad}
    cache.entries = {k: e for k, e in cache.entries.items() if frozen.issuperset(k[0])}


def _drop_freed(cache: _Cache) -> None:
    """Forget weights whose memory FSDP has freed, or given back to them elsewhere."""
    if "torch.distributed.fsdp" not in sys.modules:
        return
    gone = {place for place, owner in cache.parameters.items() if not _lies_at(owner(), place)}
    if gone:
        cache.parameters = {p: owner for p, owner in cache.parameters.items() if p not in gone}
        cache.entries = {k: e for k, e in cache.entries.items() if not gone.intersection(k[0])}


def _lies_at(owner: torch.Tensor | None, place: _Place) -> bool:
    if owner is None:
        return False
    storage = owner.untyped_storage()
    return storage.data_ptr() <= place[0] < storage.data_ptr() + storage.size()


def _place(weight: torch.Tensor) -> _Place:
    return (weight.data_ptr(), tuple(weight.shape), weight.stride(), weight.dtype)


def _source(cache: _Cache, weight: torch.Tensor) -> tuple[_Place, int] | None:
    """Where the parameter behind ``weight`` lies and its version; None if there is no parameter behind it.

    That is the parameter itself, a view of it (an expert weight transposed twice), its copy by autocast, or
    another tensor in the place of one that was seen here: backward under activation checkpointing gets its
    weight detached, another object with the same memory and version counter.
    """
    cast = cache.casts.get(id(weight))
    if cast is not None and cast.copy() is weight:
        master = cast.master()
        if master is None or master._version != cast.version:
            return None
        place = (*_place(master), weight.dtype)
        _remember(cache, place, master)
        return place, cast.version
    place = _place(weight)
    owner = weight if weight._base is None else weight._base
    if isinstance(owner, torch.nn.Parameter):
        _remember(cache, place, owner)
        return place, weight._version
    known = cache.parameters.get(place)
    return (place, weight._version) if known is not None and known() is not None else None


def _remember(cache: _Cache, place: _Place, owner: torch.Tensor) -> None:
    """Note whose place this is; what another parameter left there before is forgotten."""
    known = cache.parameters.get(place)
    if known is None or known() is not owner:
        cache.parameters[place] = weakref.ref(owner)
        cache.entries = {k: e for k, e in cache.entries.items() if place not in k[0]}


def cast_weight(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``weight.to(dtype)``, known to the cache as that parameter's."""
    copy = weight.to(dtype)
    if (
        not torch.compiler.is_compiling()
        and _active
        and isinstance(weight, torch.nn.Parameter)
        and copy is not weight
    ):
        cache, version = _active[-1], weight._version
        cache.casts = {i: c for i, c in cache.casts.items() if c.copy() is not None}
        cache.casts[id(copy)] = _Cast(weakref.ref(copy), weakref.ref(weight), version)
    return copy


def _checksum(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    sums = []
    for weight in weights:
        bits = weight.detach().contiguous().view(torch.uint8).to(torch.int64).flatten()
        sums.append((bits * (torch.arange(bits.numel(), device=bits.device) % 1021 + 1)).sum())
    return torch.stack(sums)
