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
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from octavo.formats import Format, ScaledTensor
from octavo.quantize import quantize
from octavo.training.shared import capturing

_Key = tuple[int, str, bool]


@dataclass
class _Entry:
    weight: weakref.ref[torch.Tensor]
    version: int
    quantized: ScaledTensor
    checksum: torch.Tensor | None


@dataclass
class _Cache:
    debug: bool
    entries: dict[_Key, _Entry] = field(default_factory=dict)


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
    if (
        torch.compiler.is_compiling()
        or not _active
        or not isinstance(weight, torch.nn.Parameter)
        or capturing()
    ):
        return quantize(weight, fmt, transpose=transpose)
    cache, key = _active[-1], (id(weight), fmt.key, transpose)
    entry = cache.entries.get(key)
    if entry is not None and entry.weight() is weight and entry.version == weight._version:
        if entry.checksum is not None and not torch.equal(entry.checksum, _checksum(weight)):
            raise RuntimeError(
                f"a weight of shape {tuple(weight.shape)} changed without PyTorch's version counter seeing it, "
                "so its cached FP8 copy is stale: write in place under torch.no_grad() instead of through .data"
            )
        return entry.quantized
    quantized = quantize(weight, fmt, transpose=transpose)
    checksum = _checksum(weight) if cache.debug else None
    cache.entries[key] = _Entry(weakref.ref(weight), weight._version, quantized, checksum)
    return quantized


def _checksum(weight: torch.Tensor) -> torch.Tensor:
    bits = weight.detach().contiguous().view(torch.uint8).to(torch.int64).flatten()
    return (bits * (torch.arange(bits.numel(), device=bits.device) % 1021 + 1)).sum()
