"""DeepSeek's weights in Hugging Face's layout: the same logits as transformers, and nothing lost on the way."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import octavo
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


@pytest.mark.parametrize("variant", ["v3", "v2 with groups"])
def test_gradients_are_those_of_transformers(variant: str, tmp_path: Path) -> None:
    theirs = transformers_model(variant, tmp_path / "config")
    theirs.save_pretrained(tmp_path / "model")
    ours = models.from_pretrained(tmp_path / "model")
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 37, (2, 50), generator=generator)
    direction = torch.randn(2, 50, 37, generator=generator)
    (ours(tokens) * direction).sum().backward()
    (theirs(tokens).logits * direction).sum().backward()
    for own, other in {
        "tok_embeddings.weight": "model.embed_tokens.weight",
        "layers.0.attention.wkv_a.weight": "model.layers.0.self_attn.kv_a_proj_with_mqa.weight",
        "layers.1.moe.router.gate.weight": "model.layers.1.mlp.gate.weight",
        "layers.2.moe.router.gate.weight": "model.layers.2.mlp.gate.weight",
        "layers.2.moe.experts.w2": "model.layers.2.mlp.experts.down_proj",
    }.items():
        found, expected = ours.get_parameter(own).grad, theirs.get_parameter(other).grad
        assert found is not None
        assert expected is not None
        assert expected.norm() > 1e-3, own
        assert (found - expected).norm() < 1e-4 * expected.norm(), own


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_from_here_gives_its_logits_in_transformers(variant: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra octavo[hf]")
    ours = built(VARIANTS[variant])
    models.save_safetensors(ours, tmp_path, max_shard_bytes=200_000)
    cls = getattr(transformers, f"{NAMES[variant[:2]]}ForCausalLM")
    theirs, info = cls.from_pretrained(tmp_path, output_loading_info=True, dtype=torch.float32)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    compare(ours, theirs.eval())


@pytest.mark.parametrize("config", [*VARIANTS.values(), V1], ids=[*VARIANTS, "moe-16b"])
@pytest.mark.parametrize("converted", [False, True])
def test_files_give_the_same_model_back(config: DeepSeekConfig, converted: bool, tmp_path: Path) -> None:
    model = built(config)
    if converted:
        octavo.convert(model)
    models.save_safetensors(model, tmp_path)
    again = models.from_pretrained(tmp_path)
    assert again.config == config
    same_weights(model, again)
    models.save_safetensors(model, tmp_path / "one.safetensors")
    other = built(config, seed=1)
    models.load_safetensors(other, tmp_path / "one.safetensors")
    same_weights(model, other)


def same_weights(first: nn.Module, second: nn.Module) -> None:
    a, b = first.state_dict(), second.state_dict()
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_rows_of_deepseek_moe_are_in_the_order_of_its_own_code(tmp_path: Path) -> None:
    """It rotates channels i and i + E/2 together, as Llama in transformers does."""
    model = built(V1)
    models.save_safetensors(model, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    weight = model.layers[1].attention.wq.weight  # type: ignore[union-attr]
    head = stored["model.layers.1.self_attn.q_proj.weight"][:16]
    assert torch.equal(head[:8], weight[0:16:2])
    assert torch.equal(head[8:], weight[1:16:2])
    assert torch.equal(
        stored["model.layers.2.mlp.experts.5.down_proj.weight"],
        model.layers[2].moe.experts.w2[5],  # type: ignore[union-attr, index]
    )
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["DeepseekForCausalLM"]


def test_the_bias_is_stored_in_float32_beside_16_bit_weights(tmp_path: Path) -> None:
    model = built(V3)
    models.save_safetensors(model, tmp_path, dtype=torch.bfloat16)
    stored = load_file(tmp_path / "model.safetensors")
    kinds = {n.rsplit(".", 1)[-1]: t.dtype for n, t in stored.items()}
    assert kinds == {"weight": torch.bfloat16, "e_score_correction_bias": torch.float32}
    again = models.from_pretrained(tmp_path)
    assert again.layers[1].moe.router.expert_bias.dtype == torch.float32  # type: ignore[union-attr]
    name = "layers.1.moe.router.expert_bias"
    assert torch.equal(again.state_dict()[name], model.state_dict()[name])


def test_the_module_of_multi_token_prediction_is_left_out(tmp_path: Path) -> None:
    models.save_safetensors(built(V3), tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    more = {
        "model.layers.3.eh_proj.weight": torch.zeros(64, 128),
        "model.layers.3.mlp.experts.0.up_proj.weight": torch.zeros(32, 64),
    }
    save_file(stored | more, file)
    same_weights(models.from_pretrained(tmp_path), built(V3))
    del more["model.layers.3.eh_proj.weight"]  # then it is one layer too many
    save_file(stored | more, file)
    with pytest.raises(ValueError, match=r"layers\.3\.mlp\.experts\.0\.up_proj.*another model"):
        models.from_pretrained(tmp_path)


def test_a_missing_expert_is_named_and_nothing_is_changed(tmp_path: Path) -> None:
    file = tmp_path / "one.safetensors"
    models.save_safetensors(built(V3), file)
    stored = load_file(file)
    del stored["model.layers.2.mlp.experts.7.up_proj.weight"]
    save_file(stored, file)
    model = built(V3, seed=1)
    with pytest.raises(ValueError, match=r"no tensor 'model\.layers\.2\.mlp\.experts\.7\.up_proj\.weight'"):
        models.load_safetensors(model, file)
    same_weights(model, built(V3, seed=1))


def test_a_model_that_no_architecture_has_keeps_its_own_names(tmp_path: Path) -> None:
    """Softmax with a bias is trained elsewhere, but no published file has a place for the bias."""
    config = dataclasses.replace(V2, mixture=dataclasses.replace(V2.mixture, balance_rate=0.001))
    model = built(config)
    models.save_safetensors(model, tmp_path)
    assert not (tmp_path / "config.json").exists()
    assert load_file(tmp_path / "model.safetensors").keys() == model.state_dict().keys()
    other = built(config, seed=1)
    models.load_safetensors(other, tmp_path)
    same_weights(model, other)


# What deepseek-ai published beside the weights, without tokens, types and what only their code reads.
PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek-moe-16b": {
        "architectures": ["DeepseekForCausalLM"],
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 10944,
        "max_position_embeddings": 4096,
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 28,
        "num_key_value_heads": 16,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000,
        "scoring_func": "softmax",
        "tie_word_embeddings": False,
        "vocab_size": 102400,
    },
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "first_k_dense_replace": 1,
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 10944,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "topk_group": 1,
        "topk_method": "greedy",
        "v_head_dim": 128,
        "vocab_size": 102400,
    },
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "initializer_range": 0.02,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
        "vocab_size": 129280,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_are_the_published_configurations(name: str) -> None:
    """But for the deviation of the initial weights, which is the paper's: 0.02 is transformers' default."""
    content = PUBLISHED[name]
    layout = hf_deepseek.LAYOUTS[content["architectures"][0]]
    expected = models.preset(name)
    assert layout.from_config(content) == dataclasses.replace(expected, initial_std=0.02)
    assert layout.from_config(layout.to_config(expected)) == expected


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("deepseek-v3", {"quantization_config": {"quant_method": "fp8"}}, "give the model in 16 or 32 bits"),
        ("deepseek-v3", {"hidden_act": "gelu"}, "hidden_act 'gelu', but the model here has only 'silu'"),
        ("deepseek-v3", {"attention_bias": True}, "attention_bias True"),
        ("deepseek-v3", {"rope_interleave": False}, "rope_interleave False"),
        ("deepseek-v3", {"tie_word_embeddings": True}, "tie_word_embeddings True"),
        ("deepseek-v3", {"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ("deepseek-v3", {"topk_method": "greedy"}, "topk_method 'greedy'"),
        ("deepseek-v3", {"kv_lora_rank": None}, "'kv_lora_rank' is None"),
        ("deepseek-v3", {"rope_scaling": {"type": "linear"}}, "scales rotary embeddings by 'linear'"),
        ("deepseek-v3", {"n_group": 7}, "256 experts do not make 7 equal groups"),
        ("deepseek-v2-lite", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
        ("deepseek-v2-lite", {"norm_topk_prob": True}, "norm_topk_prob True"),
        ("deepseek-moe-16b", {"num_key_value_heads": 4}, "one for each of the 16 heads"),
        ("deepseek-moe-16b", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid'"),
    ],
)
def test_what_is_not_here_is_refused(name: str, changes: dict[str, Any], message: str) -> None:
    content = PUBLISHED[name] | changes
    with pytest.raises(ValueError, match=message):
        hf_deepseek.LAYOUTS[content["architectures"][0]].from_config(content)
