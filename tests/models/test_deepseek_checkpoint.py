"""DeepSeek's weights in Hugging Face's layout: the same logits as transformers, and nothing lost on the way."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from octavo import models
from octavo.models import DeepSeek, DeepSeekConfig, hf_deepseek
from octavo.models.latent_attention import LatentConfig, YarnScaling
from octavo.models.mixture import MixtureConfig

LATENT = LatentConfig(q_rank=24, kv_rank=16, nope_dim=16, rope_dim=8, v_dim=12)
V3 = DeepSeekConfig(
    dim=64,
    n_layers=3,
    n_heads=4,
    ffn_dim=96,
    dense_layers=1,
    mixture=MixtureConfig(
        experts=16,
        active=4,
        ffn_dim=32,
        shared=1,
        score="sigmoid",
        groups=4,
        active_groups=2,
        normalized=True,
        scale=2.5,
        balance_rate=0.001,
    ),
    latent=LATENT,
    vocab_size=37,
    max_seq_len=64,
    yarn=YarnScaling(factor=4.0, original_seq_len=16, mscale=1.0, mscale_all_dim=0.7),
)
V2 = dataclasses.replace(
    V3,
    mixture=MixtureConfig(experts=8, active=3, ffn_dim=24, shared=2),
    latent=dataclasses.replace(LATENT, q_rank=None),
    yarn=None,
)
V1 = dataclasses.replace(
    V3, mixture=MixtureConfig(experts=8, active=3, ffn_dim=24, shared=2), latent=None, yarn=None
)
VARIANTS = {
    "v3": V3,
    "v3 without yarn, groups and query rank": dataclasses.replace(
        V3,
        yarn=None,
        latent=dataclasses.replace(LATENT, q_rank=None),
        mixture=dataclasses.replace(V3.mixture, groups=1, active_groups=1, normalized=False, shared=2),
    ),
    "v2": V2,
    "v2 with groups": dataclasses.replace(
        V2,
        latent=LATENT,
        mixture=dataclasses.replace(V2.mixture, groups=4, active_groups=2, scale=4.0),
    ),
}
NAMES = {"v3": "DeepseekV3", "v2": "DeepseekV2"}


def built(config: DeepSeekConfig, seed: int = 0) -> DeepSeek:
    model = config.build()
    model.init_weights(seed)
    shake(model)
    return model


@torch.no_grad()
def shake(model: nn.Module) -> None:
    """Weights large enough that attention and routers choose, norms that differ, and biases that matter."""
    generator = torch.Generator().manual_seed(2)
    for weight in model.parameters():
        scale = torch.rand(weight.shape, generator=generator) + 0.5 if weight.dim() == 1 else 0.1
        weight.copy_(scale if weight.dim() == 1 else scale * torch.randn(weight.shape, generator=generator))
    for name, buffer in model.named_buffers():
        if name.endswith("bias"):
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))


def compare(ours: nn.Module, theirs: nn.Module) -> None:
    tokens = torch.randint(0, 37, (2, 50), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        mine, other = ours(tokens), theirs(tokens).logits
    assert other.std() > 0.1
    assert (mine - other).abs().max() < 1e-5 * max(1.0, other.abs().max())


def transformers_model(variant: str, folder: Path) -> Any:
    """A model of transformers with the dimensions of a variant, by our own ``config.json``."""
    transformers = pytest.importorskip("transformers", reason="needs the extra octavo[hf]")
    name = NAMES[variant[:2]]
    words = hf_deepseek.LAYOUTS[f"{name}ForCausalLM"].to_config(VARIANTS[variant])
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(words))
    config = getattr(transformers, f"{name}Config").from_pretrained(folder)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    shake(model)
    return model


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_of_transformers_gives_its_logits_here(variant: str, tmp_path: Path) -> None:
    theirs = transformers_model(variant, tmp_path / "config")
    theirs.save_pretrained(tmp_path / "model", max_shard_size="200KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    ours = models.from_pretrained(tmp_path / "model")
    assert ours.config == VARIANTS[variant]
    compare(ours, theirs)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_from_here_gives_its_logits_in_transformers(variant: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra octavo[hf]")
    ours = built(VARIANTS[variant])
    models.save_safetensors(ours, tmp_path, max_shard_bytes=200_000)
    cls = getattr(transformers, f"{NAMES[variant[:2]]}ForCausalLM")
    theirs, info = cls.from_pretrained(tmp_path, output_loading_info=True, dtype=torch.float32)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    compare(ours, theirs.eval())
