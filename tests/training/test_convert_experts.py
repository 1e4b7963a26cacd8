"""Experts through ``convert``: the package's own and those of transformers, by rule, with a report."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from training_support import OpCount

import octavo
from octavo.testing import sqnr
from octavo.training.fsdp import weight_names

transformers = pytest.importorskip("transformers")
E, K, D, H = 4, 2, 64, 32
COMMON = {
    "vocab_size": 128, "hidden_size": D, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "num_key_value_heads": 4, "moe_intermediate_size": H, "n_routed_experts": E, "num_experts_per_tok": K,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": E, "num_experts_per_tok": K, "intermediate_size": H}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {"num_experts": E, "num_experts_per_tok": K, "moe_intermediate_size": H,
                                          "shared_expert_intermediate_size": 48}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {"num_experts": E, "num_experts_per_tok": K, "moe_intermediate_size": H,
                                          "head_dim": 16}),
    "deepseek_v2": ("DeepseekV2ForCausalLM", LATENT),
    "deepseek_v3": ("DeepseekV3ForCausalLM", LATENT),
}  # fmt: skip


def make(name: str, implementation: str = "eager", **changes: Any) -> nn.Module:
    """A small model of transformers with fixed weights."""
    class_name, options = MODELS[name]
    options = options | changes
    cls = getattr(transformers, class_name)
    torch.manual_seed(0)
    model = cls(cls.config_class(**{**COMMON, **options}, experts_implementation=implementation))
    for parameter in model.parameters():
        if parameter.dim() == 3:
            nn.init.normal_(parameter, std=0.1)
    return model


def run(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits and the gradients of the experts' weights."""
    tokens = torch.arange(24).view(2, 12) * 5 % 128
    model.zero_grad()
    logits = model(tokens).logits
    (logits.float() * torch.linspace(-1, 1, logits.shape[-1])).sum().backward()
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.dim() == 3}


@pytest.mark.parametrize("name", MODELS)
def test_experts_of_transformers_compute_what_they_did(name: str) -> None:
    model = make(name)
    keys, (logits, grads) = list(model.state_dict()), run(model)
    report = octavo.convert(model, "bf16")
    banks = {n for n, m in model.named_modules() if hasattr(m, "gate_up_proj") and n.endswith("experts")}
    assert banks
    assert banks <= set(report.converted)
    found, found_grads = run(model)
    assert list(model.state_dict()) == keys
    assert sqnr(found, logits) > 90
    assert all(sqnr(found_grads[n], g) > 90 for n, g in grads.items())


@pytest.mark.parametrize("name", MODELS)
def test_experts_of_transformers_train_in_8_bits(name: str) -> None:
    # One layer whose linear layers are left alone: in deeper ones a token whose best experts are close may change
    # its mind, which is no matter of precision.
    dense = {"first_k_dense_replace": 0} if name.startswith("deepseek") else {}
    model = make(name, num_hidden_layers=1, **dense)
    logits, grads = run(model)
    report = octavo.convert(model, "rowwise", rules=[(r"experts$", "rowwise"), ("", None)])
    with OpCount() as count:
        found, found_grads = run(model)
    assert len(report.converted) == 1
    # Six products, forward and backward, and no other.
    assert count.octavo()["scaled_grouped_mm"] == 6
    assert not {"grouped_mm", "scaled_mm"} & set(count.octavo())
    assert sqnr(found, logits) > 20
    assert all(sqnr(found_grads[n], g) > 18 for n, g in grads.items())


def test_whatever_implementation_transformers_was_to_use() -> None:
    logits = []
    for implementation in ("eager", "grouped_mm"):
        model = make("mixtral", implementation)
        octavo.convert(model, "rowwise")
        logits.append(run(model)[0])
    assert torch.equal(*logits)


def test_gates_stay_unless_a_rule_names_them() -> None:
    model = make("qwen2_moe")
    report = octavo.convert(model, "rowwise")
    reasons = {d.name: d.reason for d in report.decisions}
    assert "beside experts" in reasons["model.layers.0.mlp.shared_expert_gate"]
    assert not isinstance(model.model.layers[0].mlp.shared_expert_gate, octavo.Linear)
    report = octavo.convert(model, "rowwise", rules=[("shared_expert_gate", "rowwise")])
    assert isinstance(model.model.layers[0].mlp.shared_expert_gate, octavo.Linear)
    assert "model.layers.0.mlp.shared_expert" in report.spans


def test_a_gate_without_experts_is_a_layer_as_any_other() -> None:
    model = nn.ModuleDict({"gate": nn.Linear(32, 32), "up": nn.Linear(32, 32)})
    assert set(octavo.convert(model, "rowwise").converted) == {"gate", "up"}


def test_rules_name_experts_by_path() -> None:
    model = make("mixtral")
    rules = [(r"layers\.0\.mlp\.experts", None), (r"experts$", "mxfp8"), ("self_attn", None)]
    report = octavo.convert(model, "rowwise", rules=rules)
    recipes = {d.name: d.recipe for d in report.decisions if d.name.endswith("experts")}
    assert recipes == {"model.layers.0.mlp.experts": None, "model.layers.1.mlp.experts": "mxfp8"}
    assert report.unmatched_rules == ()
    assert model.model.layers[1].mlp.experts.recipe.name == "mxfp8"
    assert not hasattr(model.model.layers[0].mlp.experts, "recipe")
    assert "[4, 64, 64]" in str(report)
    octavo.convert(model, "rowwise", rules=[(r"self_attn|lm_head", None)])
    assert {m.mlp.experts.recipe.name for m in model.model.layers} == {"rowwise"}


def test_min_size_counts_an_experts_width() -> None:
    report = octavo.convert(make("qwen3_moe"), "rowwise", min_size=64)
    assert {d.reason for d in report.decisions if d.name.endswith("experts")} == {"default"}
    report = octavo.convert(make("qwen3_moe"), "rowwise", min_size=65, rules=[("q_proj", "rowwise")])
    assert {d.reason for d in report.decisions if d.name.endswith("experts")} == {"smaller than min_size=65"}


def test_converted_experts_can_be_copied_and_pickled() -> None:
    model = make("mixtral")
    octavo.convert(model, "rowwise")
    expected = run(model)[0]
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(run(twin)[0], expected)
        assert type(twin.model.layers[0].mlp.experts) is type(model.model.layers[0].mlp.experts)
    assert type(model.model.layers[0].mlp.experts).__name__ == "MixtralExperts"
    assert weight_names(model.model.layers[0].mlp.experts) == ("gate_up_proj", "down_proj")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda m: setattr(m, "is_transposed", True), "is_transposed"),
        (lambda m: setattr(m, "has_bias", True), "has_bias"),
        (lambda m: setattr(m, "act_fn", nn.GELU()), "GELU, not SiLU"),
        (lambda m: setattr(m, "forward", lambda *a: a[0]), "replaced on the instance"),
    ],
)
def test_experts_that_compute_something_else_are_left_alone(change, match: str) -> None:
    model = make("mixtral")
    change(model.model.layers[0].mlp.experts)
    reasons = {d.name: d.reason for d in octavo.convert(model, "rowwise").decisions}
    assert match in reasons["model.layers.0.mlp.experts"]
    assert reasons["model.layers.1.mlp.experts"] == "default"


def test_experts_with_a_formula_of_their_own_are_left_alone() -> None:
    config = transformers.GptOssConfig(
        **{**COMMON, "num_local_experts": E, "num_experts_per_tok": K, "intermediate_size": H, "head_dim": 16}
    )
    report = octavo.convert(transformers.GptOssForCausalLM(config), "rowwise")
    reasons = {d.name: d.reason for d in report.decisions if d.name.endswith("experts")}
    assert len(reasons) == 2
    assert all("experts differ from" in reason for reason in reasons.values())


def test_a_bank_alone_is_a_model() -> None:
    experts = octavo.GroupedExperts(D, H, E, recipe="bf16")
    assert octavo.convert(experts, "blockwise").converted == ("",)
    assert experts.recipe.name == "blockwise"
    assert octavo.convert(experts, "blockwise", rules=[("^$", "mxfp8")]).converted == ("",)
    assert experts.recipe.name == "mxfp8"
    with pytest.raises(ValueError, match="every layer was left alone"):
        octavo.convert(experts, rules=[("", None)])
    assert experts.recipe.name == "mxfp8"
    with pytest.raises(ValueError, match=r"no nn\.Linear and no experts"):
        octavo.convert(nn.Identity())
