"""Overrides for TorchTitan on a CPU; not part of the product."""

from __future__ import annotations

from torchtitan.config import derive, override
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention


@override(target=FlexAttention.Config, description="causal attention by SDPA, which a CPU can run")
def sdpa(config: FlexAttention.Config) -> ScaledDotProductAttention.Config:
    return derive(config, ScaledDotProductAttention.Config)
