"""DeepSeek's models in Hugging Face's words: ``config.json`` and the names and layout of the weights.

Experts are stored one by one and kept here as one tensor [E, ...]. The rotary channels of DeepSeek-V2 and V3
are paired (2i, 2i + 1) in the files as they are here; those of DeepSeek-MoE-16B as Llama's. Its own code is not
part of transformers, so its ``config.json`` has the words that DeepSeek published.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.models.deepseek import DeepSeekConfig
from octavo.models.hf_llama import Place, number, whole
from octavo.models.latent_attention import LatentConfig, YarnScaling
from octavo.models.mixture import MixtureConfig

BALANCE_RATE = 0.001
"""DeepSeek-V3's bias update speed (arXiv:2412.19437, section 4.2), which its ``config.json`` does not hold."""


@dataclass(frozen=True)
class Layout:
    """An architecture: the words of its ``config.json``, and which configurations are of it.

    ``fixed`` are entries that another value of which would be another model; a file may leave them out.
    """

    model_type: str
    fixed: Mapping[str, Any]
    read_mixture: Callable[[Mapping[str, Any]], MixtureConfig]
    write_mixture: Callable[[MixtureConfig], dict[str, Any]]
    latent: bool
    fits_mixture: Callable[[MixtureConfig], bool]

    def fits(self, config: DeepSeekConfig) -> bool:
        """Whether ``config`` can be told in this architecture's words."""
        plain = config.latent is None and config.yarn is None
        return (config.latent is not None if self.latent else plain) and self.fits_mixture(config.mixture)

    def from_config(self, content: Mapping[str, Any]) -> DeepSeekConfig:
        """The dimensions in a ``config.json`` of this architecture, of transformers 4 or 5.

        Raises:
            ValueError: a dimension is missing or no whole number, or the model has what is not here: biases,
                another activation, another rotary scaling, quantized weights.
        """
        _check_kind(content, self.fixed)
        heads = whole(content, "num_attention_heads")
        if not self.latent and content.get("num_key_value_heads") not in (None, heads):
            raise ValueError(
                f"config.json has num_key_value_heads {content['num_key_value_heads']!r}, but the model here has "
                f"one for each of the {heads} heads"
            )
        theta, yarn = _rope(content)
        return DeepSeekConfig(
            dim=whole(content, "hidden_size"),
            n_layers=whole(content, "num_hidden_layers"),
            n_heads=heads,
            ffn_dim=whole(content, "intermediate_size"),
            dense_layers=_count(content, "first_k_dense_replace", 0),
            mixture=self.read_mixture(content),
            latent=_latent(content) if self.latent else None,
            vocab_size=whole(content, "vocab_size"),
            max_seq_len=whole(content, "max_position_embeddings"),
            rope_theta=theta,
            yarn=yarn,
            norm_eps=number(content, "rms_norm_eps", 1e-6),
            initial_std=number(content, "initializer_range", 0.02),
        )

    def to_config(self, config: DeepSeekConfig) -> dict[str, Any]:
        """The content of a ``config.json`` of this architecture; tokens of beginning and end are not named."""
        return (
            {
                "architectures": [next(name for name, layout in LAYOUTS.items() if layout is self)],
                "model_type": self.model_type,
                "hidden_size": config.dim,
                "num_hidden_layers": config.n_layers,
                "num_attention_heads": config.n_heads,
                "num_key_value_heads": config.n_heads,
                "intermediate_size": config.ffn_dim,
                "first_k_dense_replace": config.dense_layers,
                "vocab_size": config.vocab_size,
                "max_position_embeddings": config.max_seq_len,
                "rope_theta": config.rope_theta,
                "rope_scaling": None if config.yarn is None else _yarn_words(config.yarn),
                "rms_norm_eps": config.norm_eps,
                "initializer_range": config.initial_std,
                "bos_token_id": None,
                "eos_token_id": None,
            }
            | COMMON
            | dict(self.fixed)
            | self.write_mixture(config.mixture)
            | ({} if config.latent is None else _latent_words(config.latent))
        )


COMMON = {
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "moe_layer_freq": 1,
}
"""Entries that have one value in every model here."""


def places(config: DeepSeekConfig) -> dict[str, Place | Sequence[Place]]:
    """Where each weight of ``DeepSeek`` is stored, by its name here."""
    found: dict[str, Place | Sequence[Place]] = {
        "tok_embeddings.weight": Place("model.embed_tokens.weight"),
        "norm.weight": Place("model.norm.weight"),
        "output.weight": Place("lm_head.weight"),
    }
    for n in range(config.n_layers):
        own, theirs = f"layers.{n}.", f"model.layers.{n}."
        found[f"{own}attention_norm.weight"] = Place(f"{theirs}input_layernorm.weight")
        found[f"{own}ffn_norm.weight"] = Place(f"{theirs}post_attention_layernorm.weight")
        for name, place in _attention(config).items():
            part = place._replace(name=f"{theirs}self_attn.{place.name}.weight")
            found[f"{own}attention.{name}.weight"] = part
        if n < config.dense_layers:
            found |= _feed_forward(f"{own}feed_forward.", f"{theirs}mlp.")
        else:
            found |= _mixture(config.mixture, f"{own}moe.", f"{theirs}mlp.")
    return found


def multi_token_prediction(config: DeepSeekConfig, names: Collection[str]) -> Collection[str]:
    """Those of ``names`` that belong to the multi-token prediction module, stored as one more layer."""
    layer = f"model.layers.{config.n_layers}."
    return [name for name in names if name.startswith(layer)] if f"{layer}eh_proj.weight" in names else ()


def _attention(config: DeepSeekConfig) -> dict[str, Place]:
    if config.latent is None:
        return {
            "wq": Place("q_proj", config.n_heads),
            "wk": Place("k_proj", config.n_heads),
            "wv": Place("v_proj"),
            "wo": Place("o_proj"),
        }
    if config.latent.q_rank is None:
        queries = {"wq": Place("q_proj")}
    else:
        queries = {"wq_a": Place("q_a_proj"), "q_norm": Place("q_a_layernorm"), "wq_b": Place("q_b_proj")}
    return queries | {
        "wkv_a": Place("kv_a_proj_with_mqa"),
        "kv_norm": Place("kv_a_layernorm"),
        "wkv_b": Place("kv_b_proj"),
        "wo": Place("o_proj"),
    }


PROJECTIONS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def _feed_forward(own: str, theirs: str) -> dict[str, Place]:
    return {f"{own}{w}.weight": Place(f"{theirs}{name}.weight") for w, name in PROJECTIONS.items()}


def _mixture(config: MixtureConfig, own: str, theirs: str) -> dict[str, Place | Sequence[Place]]:
    found: dict[str, Place | Sequence[Place]] = {
        f"{own}router.gate.weight": Place(f"{theirs}gate.weight"),
        **{
            f"{own}experts.{w}": [Place(f"{theirs}experts.{e}.{name}.weight") for e in range(config.experts)]
            for w, name in PROJECTIONS.items()
        },
    }
    if config.balance_rate is not None:
        bias = Place(f"{theirs}gate.e_score_correction_bias", keeps_dtype=True)
        found[f"{own}router.expert_bias"] = bias
    if config.shared:
        found |= _feed_forward(f"{own}shared_experts.", f"{theirs}shared_experts.")
    return found


def _check_kind(content: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    if content.get("quantization_config") is not None:
        raise ValueError(
            "config.json has a 'quantization_config', its weights are quantized: give the model in 16 or 32 bits"
        )
    for name, value in (COMMON | dict(fixed)).items():
        if content.get(name, value) != value:
            raise ValueError(
                f"config.json has {name} {content[name]!r}, but the model here has only {value!r}"
            )


def _count(content: Mapping[str, Any], name: str, default: int) -> int:
    """A whole number of at least 0; ``null`` means none."""
    return 0 if content.get(name, default) in (0, None) else whole(content, name, default)


def _not_negative(content: Mapping[str, Any], name: str, default: float) -> float:
    return 0.0 if content.get(name, default) == 0 else number(content, name, default)


def _rope(content: Mapping[str, Any]) -> tuple[float, YarnScaling | None]:
    """Base of the rotary frequencies and their scaling; transformers 5 keeps both in ``rope_parameters``."""
    settings = content.get("rope_parameters") or content.get("rope_scaling") or {}
    theta = number(settings if "rope_theta" in settings else content, "rope_theta", 10_000.0)
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "yarn":
        raise ValueError(
            f"config.json scales rotary embeddings by {kind!r}: only 'yarn' and 'default' are known"
        )
    return theta, YarnScaling(
        factor=number(settings, "factor"),
        original_seq_len=whole(settings, "original_max_position_embeddings"),
        beta_fast=number(settings, "beta_fast", 32.0),
        beta_slow=number(settings, "beta_slow", 1.0),
        mscale=number(settings, "mscale", 1.0),
        mscale_all_dim=_not_negative(settings, "mscale_all_dim", 0.0),
    )


def _yarn_words(yarn: YarnScaling) -> dict[str, Any]:
    return {
        "type": "yarn",
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_seq_len,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "mscale": yarn.mscale,
        "mscale_all_dim": yarn.mscale_all_dim,
    }


def _latent(content: Mapping[str, Any]) -> LatentConfig:
    return LatentConfig(
        q_rank=None if content.get("q_lora_rank") is None else whole(content, "q_lora_rank"),
        kv_rank=whole(content, "kv_lora_rank"),
        nope_dim=whole(content, "qk_nope_head_dim"),
        rope_dim=whole(content, "qk_rope_head_dim"),
        v_dim=whole(content, "v_head_dim"),
    )


def _latent_words(latent: LatentConfig) -> dict[str, Any]:
    return {
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.nope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.v_dim,
    }


# --- mixtures, one pair of functions an architecture
# -------------------------------------------------------------


def _sizes(content: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "experts": whole(content, "n_routed_experts"),
        "active": whole(content, "num_experts_per_tok"),
        "ffn_dim": whole(content, "moe_intermediate_size"),
        "shared": _count(content, "n_shared_experts", 0),
    }


def _sizes_words(mixture: MixtureConfig) -> dict[str, Any]:
    return {
        "n_routed_experts": mixture.experts,
        "num_experts_per_tok": mixture.active,
        "moe_intermediate_size": mixture.ffn_dim,
        "n_shared_experts": mixture.shared or None,
    }


def _read_v1(content: Mapping[str, Any]) -> MixtureConfig:
    return MixtureConfig(**_sizes(content), normalized=bool(content.get("norm_topk_prob", False)))


def _write_v1(mixture: MixtureConfig) -> dict[str, Any]:
    return _sizes_words(mixture) | {"norm_topk_prob": mixture.normalized}


def _read_v2(content: Mapping[str, Any]) -> MixtureConfig:
    method = content.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ValueError(
            f"config.json has topk_method {method!r}: only 'greedy' and 'group_limited_greedy' are known"
        )
    limited = method != "greedy"
    return MixtureConfig(
        **_sizes(content),
        groups=whole(content, "n_group") if limited else 1,
        active_groups=whole(content, "topk_group") if limited else 1,
        scale=number(content, "routed_scaling_factor", 1.0),
    )


def _write_v2(mixture: MixtureConfig) -> dict[str, Any]:
    return _sizes_words(mixture) | {
        "topk_method": "greedy" if mixture.groups == 1 else "group_limited_greedy",
        "n_group": mixture.groups,
        "topk_group": mixture.active_groups,
        "routed_scaling_factor": mixture.scale,
    }


def _read_v3(content: Mapping[str, Any]) -> MixtureConfig:
    return MixtureConfig(
        **_sizes(content),
        score="sigmoid",
        groups=whole(content, "n_group", 1),
        active_groups=whole(content, "topk_group", 1),
        normalized=bool(content.get("norm_topk_prob", True)),
        scale=number(content, "routed_scaling_factor", 2.5),
        balance_rate=_not_negative(content, "bias_update_speed", BALANCE_RATE),
    )


def _write_v3(mixture: MixtureConfig) -> dict[str, Any]:
    return _sizes_words(mixture) | {
        "n_group": mixture.groups,
        "topk_group": mixture.active_groups,
        "norm_topk_prob": mixture.normalized,
        "routed_scaling_factor": mixture.scale,
        "bias_update_speed": mixture.balance_rate,
        "num_nextn_predict_layers": 0,
    }


def _softmax(mixture: MixtureConfig) -> bool:
    return mixture.score == "softmax" and mixture.balance_rate is None


LAYOUTS: dict[str, Layout] = {
    "DeepseekForCausalLM": Layout(
        model_type="deepseek",
        fixed={"scoring_func": "softmax"},
        read_mixture=_read_v1,
        write_mixture=_write_v1,
        latent=False,
        fits_mixture=lambda mixture: _softmax(mixture) and mixture.groups == 1 and mixture.scale == 1.0,
    ),
    "DeepseekV2ForCausalLM": Layout(
        model_type="deepseek_v2",
        fixed={"scoring_func": "softmax", "norm_topk_prob": False},
        read_mixture=_read_v2,
        write_mixture=_write_v2,
        latent=True,
        fits_mixture=lambda mixture: _softmax(mixture) and not mixture.normalized,
    ),
    "DeepseekV3ForCausalLM": Layout(
        model_type="deepseek_v3",
        fixed={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_interleave": True},
        read_mixture=_read_v3,
        write_mixture=_write_v3,
        latent=True,
        fits_mixture=lambda mixture: mixture.score == "sigmoid" and mixture.balance_rate is not None,
    ),
}
"""By the name in ``config.json``. A configuration that fits none is stored under the model's own names."""
