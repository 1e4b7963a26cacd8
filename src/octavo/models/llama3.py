"""The Llama 3 architecture, written to be read.

A decoder of pre-norm blocks: RMSNorm, grouped-query attention with rotary position embeddings, RMSNorm,
SwiGLU. Parameter names are Meta's and TorchTitan's (``layers.0.attention.wq.weight``), so checkpoints and
parallel plans written for those fit. Every dense product is a plain ``nn.Linear``, which is what
``octavo.convert`` looks for.

Shape letters in the comments: B sequences, S tokens in a sequence, D model width, H query heads, G key and
value heads, E width of a head, F width of the feed-forward layer, V vocabulary.

Sources: "The Llama 3 Herd of Models" (arXiv:2407.21783), table 3, and the published configurations of
Llama 3.1 8B, 70B and Llama 3.2 1B.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.models.base import Model


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's stretching of the rotary frequencies to contexts longer than ``original_seq_len`` tokens.

    Wavelengths shorter than ``original_seq_len / high_freq_factor`` stay, those longer than
    ``original_seq_len / low_freq_factor`` grow by ``factor``, and those between are interpolated.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_seq_len: int = 8192


@dataclass(frozen=True, kw_only=True)
class Llama3Config:
    """Dimensions of a Llama 3 model.

    ``head_width`` is the width of an attention head where it is not ``dim / n_heads``.

    Raises:
        ValueError: the heads do not divide the width, or the key and value heads do not divide the heads.
    """

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    vocab_size: int = 128_256
    max_seq_len: int = 131_072
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tied_embeddings: bool = False
    head_width: int | None = None

    def __post_init__(self) -> None:
        if self.head_width is not None and (self.head_width < 2 or self.head_width % 2):
            raise ValueError(f"head_width is {self.head_width}: rotary embeddings need an even one")
        if self.head_width is None and (self.dim % self.n_heads or (self.dim // self.n_heads) % 2):
            raise ValueError(
                f"dim {self.dim} must be n_heads {self.n_heads} times an even head width: change one of them"
            )
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads {self.n_heads} must be a multiple of n_kv_heads {self.n_kv_heads}: change one"
            )

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.n_heads if self.head_width is None else self.head_width

    def build(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Llama3:
        """The model with unset weights on ``device`` ("meta" costs nothing); ``init_weights`` sets them."""
        with torch.device(device or "cpu"):
            return Llama3(self).to(dtype=dtype)


PRESETS: dict[str, Llama3Config] = {
    "llama3-debug": Llama3Config(
        dim=256, n_layers=6, n_heads=8, n_kv_heads=4, ffn_dim=768, vocab_size=256, max_seq_len=2048
    ),
    # Of no publication: the shape of GPT-2 small with Llama 3's architecture, 100.1 M parameters.
    "llama3-100m": Llama3Config(
        dim=768,
        n_layers=12,
        n_heads=12,
        n_kv_heads=4,
        ffn_dim=2048,
        vocab_size=32_000,
        max_seq_len=8192,
        tied_embeddings=True,
    ),
    "llama3-1b": Llama3Config(
        dim=2048,
        n_layers=16,
        n_heads=32,
        n_kv_heads=8,
        ffn_dim=8192,
        rope_scaling=RopeScaling(factor=32.0),
        tied_embeddings=True,
    ),
    "llama3-8b": Llama3Config(
        dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim=14_336, rope_scaling=RopeScaling(factor=8.0)
    ),
    "llama3-70b": Llama3Config(
        dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, ffn_dim=28_672, rope_scaling=RopeScaling(factor=8.0)
    ),
}


def rope_frequencies(config: Llama3Config, device: torch.device | str | None = None) -> Tensor:
    """Angular frequency of each pair of channels, float32 [E/2], in radians a token.

    ``theta ** (-2i / E)``, stretched by ``config.rope_scaling`` where it is given.
    """
    channel = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device)
    frequency = config.rope_theta ** (-channel / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    # How many turns a pair makes over the original context decides what happens to it.
    turns = scaling.original_seq_len * frequency / (2 * math.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return keep * frequency + (1.0 - keep) * frequency / scaling.factor


def rope_table(config: Llama3Config, seq_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position's rotations, each float32 [S, 1, E/2].

    Computed once a forward pass and not kept as a buffer: a buffer would be rounded by
    ``model.to(bfloat16)``, where positions beyond 256 are not exact, and would be lost on the meta device.
    """
    position = torch.arange(seq_len, dtype=torch.float32, device=device)
    angle = torch.outer(position, rope_frequencies(config, device))[:, None, :]
    return angle.cos(), angle.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates each pair of channels (2i, 2i + 1) of ``x`` [B, S, heads, E] by the angle of its position.

    Computed in float32, returned in the dtype of ``x``. This is Meta's channel order; Hugging Face pairs
    channel i with i + E/2, so its ``wq`` and ``wk`` rows are permuted.
    """
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary position embeddings."""

    def __init__(self, dim: int, n_heads: int, n_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.wq = nn.Linear(dim, n_heads * head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * head_dim, bias=False)
        self.wo = nn.Linear(n_heads * head_dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x`` [B, S, D] to [B, S, D]."""
        q = apply_rope(self.wq(x).unflatten(-1, (-1, self.head_dim)), cos, sin)  # [B, S, H, E]
        k = apply_rope(self.wk(x).unflatten(-1, (-1, self.head_dim)), cos, sin)  # [B, S, G, E]
        v = self.wv(x).unflatten(-1, (-1, self.head_dim))
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        return self.wo(out.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU: ``w2(silu(w1(x)) * w3(x))``."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, ffn_dim, bias=False)
        self.w2 = nn.Linear(ffn_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [B, S, D] to [B, S, D], over [B, S, F]."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each behind a norm and around a residual connection."""

    def __init__(self, config: Llama3Config) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config.dim, config.n_heads, config.n_kv_heads, config.head_dim)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = FeedForward(config.dim, config.ffn_dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x`` [B, S, D] to [B, S, D]."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama3(Model):
    """A Llama 3 decoder: token numbers [B, S] to logits [B, S, V]."""

    def __init__(self, config: Llama3Config) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(TransformerBlock(config) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        """One tensor for the embedding and the output head, where the configuration ties them."""
        if self.config.tied_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, S, V] for integer ``tokens`` [B, S].

        Raises:
            ValueError: more tokens in a sequence than ``config.max_seq_len``.
        """
        seq_len = tokens.shape[1]
        if seq_len > self.config.max_seq_len:
            raise ValueError(
                f"a sequence has {seq_len} tokens but the model takes {self.config.max_seq_len}: shorten it"
            )
        cos, sin = rope_table(self.config, seq_len, tokens.device)
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.output(self.norm(x))

    def initial_std(self, name: str) -> float:
        """Standard deviation of a weight matrix at the start.

        The Llama 3 paper gives none. 0.02 is ``initializer_range`` in the published configurations; the two
        exceptions below are from the sources named there.
        """
        if name == "tok_embeddings.weight" and not self.config.tied_embeddings:
            return 1.0  # as in TorchTitan: the first norm would magnify the gradient of a smaller one
        if name.endswith(("attention.wo.weight", "feed_forward.w2.weight")):
            # What writes into the residual stream, so that its variance does not grow with depth (GPT-2).
            return 0.02 / math.sqrt(2 * self.config.n_layers)
        return 0.02
