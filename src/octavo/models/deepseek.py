"""DeepSeek's mixture-of-experts models: DeepSeek-MoE-16B, DeepSeek-V2-Lite and DeepSeek-V3.

Decoders of pre-norm blocks whose first layers have a dense feed-forward layer and the others a mixture of
experts. DeepSeek-MoE-16B has plain multi-head attention, the later ones multi-head latent attention. Names
are TorchTitan's where it has the part. Not here: the multi-token prediction module of DeepSeek-V3, which its
count of 671 B parameters leaves out too, and the auxiliary balance losses.

Sources: DeepSeekMoE (arXiv:2401.06066), DeepSeek-V2 (arXiv:2405.04434, appendix B for the Lite model),
DeepSeek-V3 (arXiv:2412.19437), and the ``config.json`` published with the weights of each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from octavo.models.base import Model
from octavo.models.latent_attention import LatentAttention, LatentConfig, YarnScaling, yarn_table
from octavo.models.llama3 import Attention, FeedForward
from octavo.models.mixture import MixtureConfig, MixtureOfExperts, balance


@dataclass(frozen=True, kw_only=True)
class DeepSeekConfig:
    """Dimensions of a DeepSeek model.

    Args:
        ffn_dim: width of the feed-forward layer of the ``dense_layers`` first layers.
        mixture: experts of the other layers.
        latent: dimensions of latent attention; None is multi-head attention of ``n_heads`` equal heads.
        yarn: stretching of the rotary frequencies; None leaves them.
        initial_std: standard deviation of every weight matrix at the start.

    Raises:
        ValueError: the heads do not divide the width, or there are more dense layers than layers.
    """

    dim: int
    n_layers: int
    n_heads: int
    ffn_dim: int
    dense_layers: int
    mixture: MixtureConfig
    latent: LatentConfig | None = None
    vocab_size: int = 102_400
    max_seq_len: int = 4096
    rope_theta: float = 10_000.0
    yarn: YarnScaling | None = None
    norm_eps: float = 1e-6
    initial_std: float = 0.006

    def __post_init__(self) -> None:
        if self.latent is None and (self.dim % self.n_heads or (self.dim // self.n_heads) % 2):
            raise ValueError(
                f"dim {self.dim} must be n_heads {self.n_heads} times an even head width: change one of them"
            )
        if not 0 <= self.dense_layers <= self.n_layers:
            raise ValueError(f"dense_layers is {self.dense_layers}: give 0 to n_layers, {self.n_layers}")

    @property
    def rope_dim(self) -> int:
        """Channels of a head that rotate with the position."""
        return self.dim // self.n_heads if self.latent is None else self.latent.rope_dim

    def build(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> DeepSeek:
        """The model with unset weights on ``device`` ("meta" costs nothing); ``init_weights`` sets them.

        The routers' biases are float32 in every ``dtype``.
        """
        with torch.device(device or "cpu"):
            return DeepSeek(self).to(dtype=dtype)


_MIXTURE_16B = MixtureConfig(experts=64, active=6, ffn_dim=1408, shared=2)
_V3_MIXTURE = MixtureConfig(
    experts=256,
    active=8,
    ffn_dim=2048,
    shared=1,
    score="sigmoid",
    groups=8,
    active_groups=4,
    normalized=True,
    scale=2.5,
    balance_rate=0.001,
)

PRESETS: dict[str, DeepSeekConfig] = {
    # Of no publication: every part of DeepSeek-V3 at a size for a CPU, on bytes.
    "deepseek-v3-debug": DeepSeekConfig(
        dim=256,
        n_layers=4,
        n_heads=8,
        ffn_dim=768,
        dense_layers=1,
        mixture=replace(_V3_MIXTURE, experts=16, active=4, ffn_dim=128, groups=4, active_groups=2),
        latent=LatentConfig(q_rank=128, kv_rank=64, nope_dim=32, rope_dim=16, v_dim=32),
        vocab_size=256,
        max_seq_len=2048,
        yarn=YarnScaling(factor=8.0, original_seq_len=256),
        initial_std=0.02,
    ),
    "deepseek-v2-lite": DeepSeekConfig(
        dim=2048,
        n_layers=27,
        n_heads=16,
        ffn_dim=10_944,
        dense_layers=1,
        mixture=_MIXTURE_16B,
        latent=LatentConfig(q_rank=None, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128),
        max_seq_len=163_840,
        yarn=YarnScaling(factor=40.0, mscale=0.707, mscale_all_dim=0.707),
    ),
    "deepseek-moe-16b": DeepSeekConfig(
        dim=2048,
        n_layers=28,
        n_heads=16,
        ffn_dim=10_944,
        dense_layers=1,
        mixture=_MIXTURE_16B,
    ),
    "deepseek-v3": DeepSeekConfig(
        dim=7168,
        n_layers=61,
        n_heads=128,
        ffn_dim=18_432,
        dense_layers=3,
        mixture=_V3_MIXTURE,
        latent=LatentConfig(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128),
        vocab_size=129_280,
        max_seq_len=163_840,
        yarn=YarnScaling(factor=40.0),
    ),
}


class DeepSeekBlock(nn.Module):
    """Attention and feed-forward layer or experts, each behind a norm and around a residual connection."""

    def __init__(self, config: DeepSeekConfig, number: int) -> None:
        super().__init__()
        dim, heads = config.dim, config.n_heads
        self.attention_norm = nn.RMSNorm(dim, eps=config.norm_eps)
        if config.latent is None:
            self.attention = Attention(dim, heads, heads, dim // heads)
        else:
            factor = 1.0 if config.yarn is None else config.yarn.score_factor
            self.attention = LatentAttention(dim, heads, config.latent, factor)
        self.ffn_norm = nn.RMSNorm(dim, eps=config.norm_eps)
        self.feed_forward = FeedForward(dim, config.ffn_dim) if number < config.dense_layers else None
        self.moe = None if number < config.dense_layers else MixtureOfExperts(dim, config.mixture)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x`` [B, S, D] to [B, S, D]."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + (self.feed_forward or self.moe)(self.ffn_norm(x))  # pyright: ignore[reportOptionalCall]


class DeepSeek(Model):
    """A DeepSeek decoder: token numbers [B, S] to logits [B, S, V]."""

    def __init__(self, config: DeepSeekConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(DeepSeekBlock(config, n) for n in range(config.n_layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, S, V] for integer ``tokens`` [B, S].

        Raises:
            ValueError: more tokens in a sequence than ``config.max_seq_len``.
        """
        config, seq_len = self.config, tokens.shape[1]
        if seq_len > config.max_seq_len:
            raise ValueError(
                f"a sequence has {seq_len} tokens but the model takes {config.max_seq_len}: shorten it"
            )
        cos, sin = yarn_table(config.rope_dim, config.rope_theta, config.yarn, seq_len, tokens.device)
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.output(self.norm(x))

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """As :class:`Model`; the routers' biases and counts start at zero."""
        super().init_weights(seed)
        for name, buffer in self.named_buffers():
            assert name.endswith((".expert_bias", ".tokens_per_expert")), name
            buffer.zero_()

    def initial_std(self, name: str) -> float:
        """The one deviation of the papers for every weight, 0.006 at the published sizes."""
        return self.config.initial_std

    def after_step(self) -> None:
        """Balances the experts by the routers' biases, see :func:`octavo.models.mixture.balance`."""
        balance(self)
