"""vLLM's RMSNorm through PyTorch's fused operator, which Octavo's kernel stands behind.

vLLM lets another class take the place of one of its own (``CustomOp.register_oot``). With Inductor, vLLM's default, its
own norm classes are compiled away unless ``+rms_norm`` is among ``custom_ops``; that is the user's choice.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from vllm.model_executor.custom_op import CustomOp  # type: ignore[import-not-found]
from vllm.model_executor.layers.layernorm import RMSNorm  # type: ignore[import-not-found]


class OctavoRMSNorm(RMSNorm):
    """x [..., D] -> w * x / sqrt(mean(x**2) + eps), in x's dtype; everything else is vLLM's own forward."""

    def forward_cuda(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """As vLLM's; rows that are added to a residual first go to vLLM's fused kernel, which reads them once."""
        plain = residual is None and self.variance_size_override is None and self.has_weight
        if plain and self.weight.dtype == x.dtype:
            return F.rms_norm(x, (x.shape[-1],), self.weight, self.variance_epsilon)
        return super().forward_cuda(x, residual)


def register() -> None:
    """Puts the class in the place of vLLM's."""
    CustomOp.register_oot(name=RMSNorm.__name__)(OctavoRMSNorm)
    OctavoRMSNorm.name = RMSNorm.name  # so that +rms_norm and -rms_norm go on to mean this layer
