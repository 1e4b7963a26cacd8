"""Where the values of a tile come from: what is quantized need not be in memory.

A source is a name. Fused sources compute in float32 and round once to the dtype of their input, exactly where
:mod:`octavo.fused.reference` rounds.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x) in float32."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def load_source(at, mask, half, SOURCE: tl.constexpr, EVICT: tl.constexpr):
    """Values at the pointers ``at``, 0 where masked.

    ``plain``: what is there. ``swiglu``: silu(gate) * up, where ``at`` points to the gate and ``half`` further
    on lies the up projection.
    """
    found = tl.load(at, mask=mask, other=0.0, eviction_policy=EVICT)
    if SOURCE == "swiglu":
        gate = found.to(tl.float32)
        up = tl.load(at + half, mask=mask, other=0.0, eviction_policy=EVICT).to(tl.float32)
        found = (gate * sigmoid(gate) * up).to(found.dtype)
    return found
