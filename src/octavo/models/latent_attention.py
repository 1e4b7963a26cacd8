"""Multi-head latent attention with a decoupled rotary part, and YaRN.

Shape letters: B sequences, S tokens, D model width, H heads, R rank of the compressed keys and values.

Sources: DeepSeek-V2 (arXiv:2405.04434, section 2.1), YaRN (arXiv:2309.00071, section 3) and its parameters in
DeepSeek-V3 (arXiv:2412.19437, section 4.3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.models.llama3 import apply_rope

LATENT_EPS = 1e-6
"""Of the norms inside the attention, whatever that of the blocks is."""


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN's stretching of rotary frequencies to ``factor`` times the ``original_seq_len`` tokens.

    Pairs that turn more than ``beta_fast`` times over the original context stay, those that turn less than
    ``beta_slow`` times are slowed by ``factor``, and those between are interpolated. Scores are multiplied by
    ``(0.1 mscale_all_dim ln(factor) + 1)^2``, and rotations by the ratio of the same with ``mscale`` and with
    ``mscale_all_dim``, without the squares.
    """

    factor: float
    original_seq_len: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0

    def _magnitude(self, scale: float) -> float:
        return 1.0 if self.factor <= 1.0 else 0.1 * scale * math.log(self.factor) + 1.0

    @property
    def score_factor(self) -> float:
        """What attention scores are multiplied with."""
        return self._magnitude(self.mscale_all_dim) ** 2

    @property
    def rotation_factor(self) -> float:
        """What cosines and sines are multiplied with."""
        return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)


def yarn_frequencies(
    width: int, theta: float, scaling: YarnScaling | None, device: torch.device | str | None = None
) -> Tensor:
    """Angular frequency of each pair of ``width`` channels, float32 [width / 2], in radians a token."""
    channel = torch.arange(0, width, 2, dtype=torch.float32, device=device)
    frequency = theta ** (-channel / width)
    if scaling is None:
        return frequency

    def pair(turns: float) -> float:
        """The pair, as a fraction, that turns so often over the original context."""
        return width * math.log(scaling.original_seq_len / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = max(math.floor(pair(scaling.beta_fast)), 0)
    last = min(math.ceil(pair(scaling.beta_slow)), width - 1)
    # As published: where both ends fall on one pair the ramp is a step there.
    ramp = (torch.arange(width // 2, device=device) - first) / max(last - first, 0.001)
    slowed = ramp.clamp(0.0, 1.0)
    return frequency * (1.0 - slowed) + frequency / scaling.factor * slowed


def yarn_table(
    width: int, theta: float, scaling: YarnScaling | None, seq_len: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position's rotations, each float32 [S, 1, width / 2].

    Computed once a forward pass, as :func:`octavo.models.llama3.rope_table` explains.
    """
    position = torch.arange(seq_len, dtype=torch.float32, device=device)
    angle = torch.outer(position, yarn_frequencies(width, theta, scaling, device))[:, None, :]
    factor = 1.0 if scaling is None else scaling.rotation_factor
    return angle.cos() * factor, angle.sin() * factor


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Dimensions of multi-head latent attention.

    ``q_rank`` None projects queries in one step. A head's queries and keys have ``nope_dim`` channels without
    positions and ``rope_dim`` with them; the latter part of the keys is one for all heads.

    Raises:
        ValueError: ``rope_dim`` is odd.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int

    def __post_init__(self) -> None:
        if self.rope_dim < 2 or self.rope_dim % 2:
            raise ValueError(f"rope_dim is {self.rope_dim}: rotary embeddings need an even one")


class LatentAttention(nn.Module):
    """Causal attention whose keys and values come out of one narrow vector a token.

    Names as in DeepSeek's code and TorchTitan. In training keys and values are computed from the narrow
    vector; that a cache could hold it instead is of no concern here.
    """

    def __init__(self, dim: int, n_heads: int, latent: LatentConfig, score_factor: float = 1.0) -> None:
        super().__init__()
        self.n_heads, self.latent = n_heads, latent
        width = latent.nope_dim + latent.rope_dim
        self.scale = width**-0.5 * score_factor
        if latent.q_rank is None:
            self.wq = nn.Linear(dim, n_heads * width, bias=False)
        else:
            self.wq_a = nn.Linear(dim, latent.q_rank, bias=False)
            self.q_norm = nn.RMSNorm(latent.q_rank, eps=LATENT_EPS)
            self.wq_b = nn.Linear(latent.q_rank, n_heads * width, bias=False)
        self.wkv_a = nn.Linear(dim, latent.kv_rank + latent.rope_dim, bias=False)
        self.kv_norm = nn.RMSNorm(latent.kv_rank, eps=LATENT_EPS)
        self.wkv_b = nn.Linear(latent.kv_rank, n_heads * (latent.nope_dim + latent.v_dim), bias=False)
        self.wo = nn.Linear(n_heads * latent.v_dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x`` [B, S, D] to [B, S, D]."""
        sizes, heads = self.latent, (self.n_heads, -1)
        q = self.wq(x) if sizes.q_rank is None else self.wq_b(self.q_norm(self.wq_a(x)))
        q_nope, q_rope = q.unflatten(-1, heads).split((sizes.nope_dim, sizes.rope_dim), dim=-1)
        q = torch.cat((q_nope, apply_rope(q_rope, cos, sin)), dim=-1)  # [B, S, H, nope + rope]
        narrow, k_rope = self.wkv_a(x).split((sizes.kv_rank, sizes.rope_dim), dim=-1)
        k_rope = apply_rope(k_rope.unsqueeze(-2), cos, sin)  # [B, S, 1, rope]
        kv = self.wkv_b(self.kv_norm(narrow)).unflatten(-1, heads)
        k_nope, v = kv.split((sizes.nope_dim, sizes.v_dim), dim=-1)
        k = torch.cat((k_nope, k_rope.expand(-1, -1, self.n_heads, -1)), dim=-1)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, scale=self.scale
        )
        return self.wo(out.transpose(1, 2).flatten(-2))
