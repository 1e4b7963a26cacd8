"""The overrides on TorchTitan's configurations, without training."""

from __future__ import annotations

import pytest

pytest.importorskip("torchtitan", reason="TorchTitan is not installed: make test-torchtitan")

import torch
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts

import octavo
from octavo.integrations import torchtitan as ours
from octavo.integrations.torchtitan import config_registry
from octavo.integrations.torchtitan.modules import OctavoLinear
from octavo.integrations.torchtitan.training import OctavoSelectiveAC, effective_peak, flops_in_8_bits
from octavo.testing import sqnr

OURS = "octavo.integrations.torchtitan"


def stock(model: str):
    from importlib import import_module

    family = config_registry.MODELS[model][0]
    return getattr(import_module(f"torchtitan.models.{family}.config_registry"), model)()


def apply(config, *imports):
    apply_overrides(OverrideConfig(imports=list(imports)), config)
    return config


def linears(config) -> dict[str, object]:
    return {path: node for path, node, *_ in config.model_spec.model.traverse(Linear.Config)}


def test_heads_and_routers_stay_and_the_rest_is_converted() -> None:
    nodes = linears(apply(stock("deepseek_v3_debugmodel"), f"{OURS}.linear"))
    left = {path for path, node in nodes.items() if not isinstance(node, OctavoLinear.Config)}
    assert "lm_head" in left
    assert all(path == "lm_head" or path.endswith("router.gate") for path in left)
    assert sum(path.endswith("router.gate") for path in left) >= 1
    assert {node.recipe.name for path, node in nodes.items() if path not in left} == {"rowwise"}


def test_rules_choose_by_path_and_the_first_wins() -> None:
    rules = [[r"layers\.0\.", None], [r"feed_forward\.w2$", "blockwise"], ["lm_head", "tensorwise"]]
    config = apply(stock("llama3_debugmodel"), (f"{OURS}.linear", {"recipe": "mxfp8", "rules": rules}))
    nodes = linears(config)
    assert type(nodes["layers.0.feed_forward.w2"]) is Linear.Config
    assert nodes["layers.1.feed_forward.w2"].recipe.name == "blockwise"
    assert nodes["layers.1.feed_forward.w1"].recipe.name == "mxfp8"
    assert nodes["lm_head"].recipe.name == "tensorwise"


def test_a_second_configuration_gets_its_own_paths() -> None:
    for _ in range(2):
        nodes = linears(apply(stock("llama3_debugmodel"), f"{OURS}.linear"))
        assert type(nodes["lm_head"]) is Linear.Config
        assert type(nodes["layers.5.attention.wo"]) is OctavoLinear.Config


def test_wrong_arguments_are_named() -> None:
    for arguments, message in (
        ({"recipe": "fp9"}, "unknown recipe 'fp9'"),
        ({"rules": ["lm_head"]}, "is no rule"),
    ):
        with pytest.raises(ValueError, match=message):
            apply(stock("llama3_debugmodel"), (f"{OURS}.linear", arguments))
    with pytest.raises(TypeError, match="precision"):
        apply(stock("llama3_debugmodel"), (f"{OURS}.linear", {"precision": 8}))


def test_layers_keep_parameters_initialisation_and_sharding() -> None:
    config = apply(stock("llama3_debugmodel"), f"{OURS}.linear")
    with torch.device("meta"):
        model, plain = config.model_spec.model.build(), stock("llama3_debugmodel").model_spec.model.build()
    model.verify_module_protocol()
    assert {n: (p.shape, p.dtype) for n, p in model.named_parameters()} == {
        n: (p.shape, p.dtype) for n, p in plain.named_parameters()
    }
    layer = model.get_submodule("layers.0.feed_forward.w1")
    assert isinstance(layer, octavo.Linear)
    assert isinstance(layer, Linear)
    assert layer._param_init is not None


@pytest.mark.parametrize("name", config_registry.names())
def test_ready_configurations_build(name: str) -> None:
    config = getattr(config_registry, name)()
    apply_overrides(config.override, config)
    quantized = [n for n in linears(config).values() if isinstance(n, OctavoLinear.Config)]
    assert bool(quantized) != name.endswith("_bf16")
    if "deepseek" in name and quantized:
        experts = [n for _, n, *_ in config.model_spec.model.traverse(GroupedExperts.Config)]
        assert {type(n)._owner.__name__ for n in experts} == {"OctavoGroupedExperts"}
        assert isinstance(config.activation_checkpoint, OctavoSelectiveAC.Config)
        assert type(config.metrics) is not MetricsProcessor.Config


def test_an_unknown_configuration_lists_the_known() -> None:
    with pytest.raises(AttributeError, match="llama3_8b_rowwise"):
        config_registry.llama3_9b_rowwise


def test_flops_in_8_bits_count_products_experts_and_recipes() -> None:
    config = apply(
        stock("deepseek_v3_debugmodel"),
        f"{OURS}.linear",
        (f"{OURS}.experts", {"recipe": "rowwise_with_gw_hp"}),
    )
    with torch.device("meta"):
        model = config.model_spec.model.build()
    expected = 0.0
    for name, module in model.named_modules():
        if isinstance(module, OctavoLinear):
            expected += 6 * module.weight.numel()
        elif name.endswith("inner_experts"):
            router = model.get_submodule(name.removesuffix("routed_experts.inner_experts") + "router")
            weights = sum(p.numel() for p in module.parameters())
            expected += 4 * weights * router.top_k / module.num_experts
    assert flops_in_8_bits([model]) == pytest.approx(expected)


def test_effective_peak_lies_between_the_peaks() -> None:
    assert effective_peak(100.0, 10.0, 0.0) == 100
    assert effective_peak(100.0, 10.0, 10.0) == 200
    assert effective_peak(100.0, 10.0, 5.0) == pytest.approx(100 / 0.75)


def test_the_names_of_the_command_line_are_registered() -> None:
    for kind in ("linear", "experts", "metrics", "selective_ac"):
        assert callable(getattr(ours, kind))


@pytest.mark.parametrize("counts", [[3, 0, 20, 9], [0, 0, 0, 0], [32, 0, 0, 0]], ids=str)
def test_titans_experts_are_one_function_and_a_models_own_are_not(counts: list[int]) -> None:
    """The span has fewer products, and to the rounding of SwiGLU the numbers of the products one by one."""
    from octavo.integrations.torchtitan.modules import experts_class

    class Own(GroupedExperts):
        def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
            return super().forward(x_RD, num_tokens_per_expert_E)

    torch.manual_seed(0)
    x, grad = torch.randn(40, 64).bfloat16(), torch.randn(40, 64).bfloat16()
    rows = torch.tensor(counts)
    results, products = [], []
    for parent in (GroupedExperts, Own):
        kind = experts_class(parent)
        experts = kind(kind.Config(dim=64, hidden_dim=32, num_experts=4, recipe="rowwise"))
        torch.manual_seed(1)
        for weight in experts.parameters():
            torch.nn.init.normal_(weight, std=0.1)
        inputs = x.clone().requires_grad_()
        with torch.profiler.profile() as profile:
            out = experts(inputs, rows)
            gradients = torch.autograd.grad(out, (inputs, *experts.parameters()), grad)
        products.append(sum(e.count for e in profile.key_averages() if e.key == "octavo::scaled_grouped_mm"))
        results.append([out, *gradients])
    assert products == [6, 9]
    live = sum(counts)
    for spanned, plain in zip(*results, strict=True):
        assert spanned.dtype == plain.dtype
        # TorchTitan's SwiGLU rounds twice, the span's once: single codes after it differ.
        assert sqnr(spanned, plain) > 30
    assert not results[0][0][live:].any()
