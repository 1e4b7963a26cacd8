"""Llama in Hugging Face's words: ``config.json`` and the names and layout of the weights.

Hugging Face's rotary embedding pairs channel i of a head with i + E/2, this package's and Meta's 2i with
2i + 1, so the rows of ``wq`` and ``wk`` stand in another order within each head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from octavo.models.llama3 import Llama3Config, RopeScaling

ARCHITECTURE = "LlamaForCausalLM"


class Place(NamedTuple):
    """Where a weight is stored: its name, the heads whose rows are in Hugging Face's order (0: none), and whether
    it keeps its dtype where the others are stored in another."""

    name: str
    rotary_heads: int = 0
    keeps_dtype: bool = False


def rows_to_hugging_face(weight: Tensor, heads: int) -> Tensor:
    """Rows [heads * E, D] from pairs (2i, 2i + 1) to pairs (i, i + E/2)."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def rows_from_hugging_face(weight: Tensor, heads: int) -> Tensor:
    """The inverse of ``rows_to_hugging_face``."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def places(config: Llama3Config) -> dict[str, Place]:
    """Where each weight of ``Llama3`` is stored, by its name here; a tied output head is not stored."""
    found = {"tok_embeddings.weight": Place("model.embed_tokens.weight")}
    for n in range(config.n_layers):
        own, theirs = f"layers.{n}.", f"model.layers.{n}."
        found |= {
            f"{own}attention_norm.weight": Place(f"{theirs}input_layernorm.weight"),
            f"{own}attention.wq.weight": Place(f"{theirs}self_attn.q_proj.weight", config.n_heads),
            f"{own}attention.wk.weight": Place(f"{theirs}self_attn.k_proj.weight", config.n_kv_heads),
            f"{own}attention.wv.weight": Place(f"{theirs}self_attn.v_proj.weight"),
            f"{own}attention.wo.weight": Place(f"{theirs}self_attn.o_proj.weight"),
            f"{own}ffn_norm.weight": Place(f"{theirs}post_attention_layernorm.weight"),
            f"{own}feed_forward.w1.weight": Place(f"{theirs}mlp.gate_proj.weight"),
            f"{own}feed_forward.w3.weight": Place(f"{theirs}mlp.up_proj.weight"),
            f"{own}feed_forward.w2.weight": Place(f"{theirs}mlp.down_proj.weight"),
        }
    found["norm.weight"] = Place("model.norm.weight")
    if not config.tied_embeddings:
        found["output.weight"] = Place("lm_head.weight")
    return found


def copies(config: Llama3Config) -> dict[str, str]:
    """The output head is the embedding where the two are tied; some files hold both."""
    return {"lm_head.weight": "model.embed_tokens.weight"} if config.tied_embeddings else {}


def from_config(content: Mapping[str, Any]) -> Llama3Config:
    """The dimensions in a ``config.json`` of a ``LlamaForCausalLM``, of transformers 4 or 5.

    What is not in the file has the default of transformers' ``LlamaConfig``.

    Raises:
        ValueError: a dimension is missing or no whole number, or the model has what ``Llama3`` has not: biases,
            another activation, another rotary scaling, quantized weights.
    """
    _check_kind(content)
    heads = whole(content, "num_attention_heads")
    theta, scaling = _rope(content)
    head_dim = content.get("head_dim")
    return Llama3Config(
        dim=whole(content, "hidden_size"),
        n_layers=whole(content, "num_hidden_layers"),
        n_heads=heads,
        n_kv_heads=heads
        if content.get("num_key_value_heads") is None
        else whole(content, "num_key_value_heads"),
        ffn_dim=whole(content, "intermediate_size"),
        vocab_size=whole(content, "vocab_size"),
        max_seq_len=whole(content, "max_position_embeddings", 2048),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=number(content, "rms_norm_eps", 1e-6),
        tied_embeddings=bool(content.get("tie_word_embeddings", False)),
        head_width=None if head_dim is None else whole(content, "head_dim"),
    )


def to_config(config: Llama3Config) -> dict[str, Any]:
    """The content of a ``config.json`` that transformers reads.

    The rotary settings are in the words of transformers 4, which 5 reads as well. No tokens of beginning and
    end are named, for the weights do not tell them, and transformers' defaults belong to another tokenizer.
    """
    scaling = config.rope_scaling
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None
        if scaling is None
        else {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_seq_len,
        },
        "tie_word_embeddings": config.tied_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _check_kind(content: Mapping[str, Any]) -> None:
    if content.get("quantization_config") is not None:
        raise ValueError(
            "config.json has a 'quantization_config', its weights are quantized: give the model in 16 or 32 bits"
        )
    if content.get("hidden_act", "silu") != "silu":
        raise ValueError(
            f"config.json has hidden_act {content['hidden_act']!r}, but Llama's SwiGLU needs 'silu'"
        )
    for bias in ("attention_bias", "mlp_bias"):
        if content.get(bias):
            raise ValueError(f"config.json has {bias} true, but the Llama model here has no biases")


def whole(content: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """The whole number of at least 1 under ``name``.

    Raises:
        ValueError: it is missing without a default, or something else.
    """
    value = content.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        found = f"is {value!r}" if name in content else "is missing"
        raise ValueError(f"{name!r} {found} in config.json: it must be a whole number of at least 1")
    return value


def number(content: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """The number above 0 under ``name``; errors as :func:`whole`."""
    value = content.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        found = f"is {value!r}" if name in content else "is missing"
        raise ValueError(f"{name!r} {found} in config.json: it must be a number above 0")
    return float(value)


def _rope(content: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base of the rotary frequencies and their scaling; transformers 5 keeps both in ``rope_parameters``."""
    settings = content.get("rope_parameters") or content.get("rope_scaling") or {}
    theta = number(settings if "rope_theta" in settings else content, "rope_theta", 10_000.0)
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(
            f"config.json scales rotary embeddings by {kind!r}: only 'llama3' and 'default' are known"
        )
    return theta, RopeScaling(
        factor=number(settings, "factor"),
        low_freq_factor=number(settings, "low_freq_factor"),
        high_freq_factor=number(settings, "high_freq_factor"),
        original_seq_len=whole(settings, "original_max_position_embeddings"),
    )
