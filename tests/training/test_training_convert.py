"""Conversion: what is chosen, what is left alone, and that everything about a module survives it."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from training_support import ALL_RECIPES, Net, OpCount, assert_all_equal, make_net, run_net

import octavo


class Model(nn.Module):
    """Embedding, two blocks and a head, as [tokens] to [tokens, vocabulary]."""

    def __init__(self, vocabulary: int = 50, width: int = 32, tie: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 64), nn.Linear(64, width)) for _ in range(2)
        )
        self.to_tokens = nn.Linear(width, vocabulary, bias=False)
        if tie:
            self.to_tokens.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.to_tokens(x)


def reasons(report: octavo.ConvertReport) -> dict[str, str]:
    return {d.name: d.reason for d in report.decisions}


# ---- what is chosen ---------------------------------------------------------------------------------------


@pytest.mark.case("B16")
def test_b16_the_head_and_the_embedding_projection_are_skipped_and_named() -> None:
    model = nn.ModuleDict({"embed_proj": nn.Linear(16, 32), "block": nn.ModuleList([nn.Linear(32, 32)])})
    model["lm_head"] = nn.Linear(32, 40)
    report = octavo.convert(model)
    assert report.converted == ("block.0",)
    assert report.skipped == ("embed_proj", "lm_head")
    assert type(model["block"][0]) is octavo.Linear
    assert type(model["embed_proj"]) is type(model["lm_head"]) is nn.Linear
    for name in ("embed_proj", "block.0", "lm_head"):
        assert name in str(report)
    assert "1 converted, 2 left alone" in str(report)


@pytest.mark.case("B16")
def test_b16_nothing_converted_is_an_error_that_says_why() -> None:
    model = nn.ModuleDict({"lm_head": nn.Linear(32, 40)})
    with pytest.raises(ValueError, match=r"nothing was converted(.|\n)*lm_head(.|\n)*by name"):
        octavo.convert(model)
    assert type(model["lm_head"]) is nn.Linear
    with pytest.raises(ValueError, match=r"no nn\.Linear"):
        octavo.convert(nn.Sequential(nn.ReLU()))


@pytest.mark.case("B16")
def test_b16_a_single_linear_is_converted() -> None:
    layer = nn.Linear(16, 16)
    assert octavo.convert(layer).converted == ("",)
    assert type(layer) is octavo.Linear
    assert "(root)" in str(octavo.convert(layer))


@pytest.mark.case("B16")
def test_b16_a_rule_that_matches_nothing_is_reported() -> None:
    report = octavo.convert(Model(), rules=[("blocks", "rowwise"), ("attention", "mxfp8")])
    assert report.unmatched_rules == ("attention",)
    assert "'attention' matched no linear layer" in str(report)


def test_the_vocabulary_size_marks_the_head() -> None:
    report = octavo.convert(Model())
    assert report.skipped == ("to_tokens",)
    assert "vocabulary" in reasons(report)["to_tokens"]


def test_a_vocabulary_as_wide_as_the_model_leaves_the_blocks_converted() -> None:
    report = octavo.convert(Model(vocabulary=32))
    assert {"blocks.0.0", "blocks.0.1", "blocks.1.0", "blocks.1.1"} <= set(report.converted)


def test_a_position_table_longer_than_the_vocabulary_is_not_taken_for_it() -> None:
    model = Model()
    model.positions = nn.Embedding(64, 32)
    assert octavo.convert(model).skipped == ("to_tokens",)


@pytest.mark.parametrize("wrapper", ["_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module"])
def test_a_wrapped_head_is_still_a_head(wrapper: str) -> None:
    model = nn.ModuleDict({"body": nn.Linear(32, 32), "lm_head": nn.ModuleDict({wrapper: nn.Linear(32, 40)})})
    assert octavo.convert(model).converted == ("body",)


def test_words_that_mean_a_head_at_the_top_mean_something_else_inside() -> None:
    inner = nn.ModuleDict({"output": nn.Linear(32, 32)})
    model = nn.ModuleDict({"attention": inner, "output": nn.Linear(32, 40)})
    report = octavo.convert(model)
    assert report.converted == ("attention.output",)
    assert report.skipped == ("output",)


def test_rules_are_tried_in_order_and_override_the_defaults() -> None:
    rules = [
        (r"blocks\.0\.0", None),
        (r"blocks\.0", "mxfp8"),
        (r"blocks\.0\.1", "tensorwise"),
        ("to_tokens", octavo.RECIPES["blockwise"]),
    ]
    model = Model()
    report = octavo.convert(model, "rowwise", rules=rules)
    recipes = {d.name: d.recipe for d in report.decisions}
    assert recipes == {
        "blocks.0.0": None,
        "blocks.0.1": "mxfp8",
        "blocks.1.0": "rowwise",
        "blocks.1.1": "rowwise",
        "to_tokens": "blockwise",
    }
    # A rule that matched layers but was always beaten by an earlier one did nothing.
    assert report.unmatched_rules == (r"blocks\.0\.1",)
    assert reasons(report)["blocks.0.0"] == "a rule leaves it alone"
    assert model.blocks[0][1].recipe.name == "mxfp8"
    assert type(model.blocks[0][0]) is nn.Linear


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"recipe": "fp8"}, "unknown recipe 'fp8'"),
        ({"rules": [("blocks", "fp8")]}, "unknown recipe 'fp8'"),
        ({"rules": [("blocks", "rowwise"), ("(", "rowwise")]}, "no regular expression"),
        ({"rules": [("blocks",)]}, "rule"),
        ({"rules": [(None, "rowwise")]}, "rule"),
        ({"rules": [("", None)]}, "nothing was converted"),
    ],
)
def test_an_error_leaves_the_model_untouched(kwargs: dict, match: str) -> None:
    model = Model()
    with pytest.raises(ValueError, match=match):
        octavo.convert(model, **kwargs)
    assert all(type(m) is not octavo.Linear for m in model.modules())


@pytest.mark.case("B17")
def test_b17_min_size_leaves_small_layers_alone_and_says_so() -> None:
    # The speed of the report's two sizes is measured on a GPU by the linear bench; here the filter alone.
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 4096), nn.Linear(4096, 4096))
    report = octavo.convert(model, min_size=1024)
    assert report.converted == ("2",)
    assert reasons(report)["0"] == reasons(report)["1"] == "smaller than min_size=1024"
    assert octavo.convert(model, min_size=0).converted == ("0", "1", "2")


def test_on_a_cpu_no_layer_is_too_small_by_default() -> None:
    assert octavo.convert(nn.Sequential(nn.Linear(3, 5))).converted == ("0",)


def test_what_has_behaviour_of_its_own_is_left_alone() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model = nn.ModuleDict(
        {
            "plain": nn.Linear(16, 16),
            "doubled": Doubled(16, 16),
            "attention": nn.MultiheadAttention(16, 2),
            "lazy": nn.LazyLinear(16),
            "wide": nn.Linear(16, 16, dtype=torch.float64),
        }
    )
    model["patched"] = nn.Linear(16, 16)
    model["patched"].forward = lambda x: x
    kinds = {name: type(m) for name, m in model.named_modules()}
    report = octavo.convert(model)
    assert report.converted == ("plain",)
    assert {n: type(m) for n, m in model.named_modules() if n != "plain"} == {
        n: k for n, k in kinds.items() if n != "plain"
    }
    assert "Doubled" in reasons(report)["doubled"]
    assert "NonDynamicallyQuantizableLinear" in reasons(report)["attention.out_proj"]
    assert "forward was replaced" in reasons(report)["patched"]
    assert "float64" in reasons(report)["wide"]
    x = torch.randn(4, 16)
    assert model["patched"](x) is x
    assert model["attention"](x, x, x)[0].shape == x.shape


def test_a_parametrized_weight_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    torch.nn.utils.parametrizations.weight_norm(model[0])
    assert octavo.convert(model).converted == ("1",)


# ---- what survives ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_parameters_are_the_very_tensors(recipe: str) -> None:
    model = Model()
    before, keys = dict(model.named_parameters()), list(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    octavo.convert(model, recipe)
    assert list(model.state_dict()) == keys
    assert all(p is before[n] for n, p in model.named_parameters())
    model(torch.arange(8)).sum().backward()
    old = model.blocks[0][0].weight.clone()
    optimizer.step()
    assert not torch.equal(model.blocks[0][0].weight, old)
    assert isinstance(model.blocks[0][0], nn.Linear)


@pytest.mark.case("B13")
@pytest.mark.parametrize("frozen", ["weight", "bias", "both"])
@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_b13_frozen_parameters_stay_frozen(recipe: str, frozen: str) -> None:
    layer = nn.Sequential(nn.Linear(32, 32))
    layer[0].weight.requires_grad_(frozen == "bias")
    layer[0].bias.requires_grad_(frozen == "weight")
    trained = [id(p) for p in layer.parameters() if p.requires_grad]
    octavo.convert(layer, recipe)
    assert [id(p) for p in layer.parameters() if p.requires_grad] == trained
    x = torch.randn(4, 32, requires_grad=True)
    with OpCount() as count:
        layer(x).sum().backward()
    assert x.grad is not None
    assert (layer[0].weight.grad is None) == (frozen != "bias")
    assert (layer[0].bias.grad is None) == (frozen != "weight")
    if recipe not in ("bf16", "rowwise_with_gw_hp"):
        assert count.octavo()["scaled_mm"] == (3 if frozen == "bias" else 2)


@pytest.mark.case("B13")
def test_b13_a_lora_base_costs_no_weight_gradient() -> None:
    class Lora(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(32, 32).requires_grad_(False)
            self.down, self.up = nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.up(self.down(x))

    model = Lora()
    octavo.convert(model, rules=[("base", "rowwise"), ("", None)])
    x = torch.randn(8, 32, requires_grad=True)
    with OpCount() as count:
        model(x).sum().backward()
    assert count.octavo()["scaled_mm"] == 2
    assert model.base.weight.grad is None
    assert model.up.weight.grad is not None


def test_tied_weights_stay_tied() -> None:
    model = Model(tie=True)
    octavo.convert(model)
    assert model.to_tokens.weight is model.embed.weight
    shared = nn.Linear(16, 16)
    pair = nn.ModuleDict({"a": shared, "b": nn.Linear(16, 16)})
    pair["b"].weight = shared.weight
    octavo.convert(pair)
    assert pair["a"].weight is pair["b"].weight
    x = torch.randn(4, 16)
    (pair["b"](pair["a"](x))).sum().backward()
    assert pair["a"].weight.grad is pair["b"].weight.grad


def test_one_module_in_two_places_is_converted_once() -> None:
    shared = nn.Linear(16, 16)
    model = nn.ModuleDict({"a": shared, "b": shared})
    assert octavo.convert(model).converted == ("a",)
    assert model["b"] is model["a"]


def test_the_meta_device() -> None:
    with torch.device("meta"):
        model = Model()
    octavo.convert(model)
    assert all(p.device.type == "meta" for p in model.parameters())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.normal_()
    assert type(model.blocks[0][0]) is octavo.Linear
    assert model(torch.arange(4)).isfinite().all()


def test_hooks_survive() -> None:
    layer, calls = nn.Sequential(nn.Linear(16, 16)), []
    layer[0].register_forward_pre_hook(lambda *a: calls.append("pre"))
    layer[0].register_forward_hook(lambda *a: calls.append("post"))
    layer[0].register_full_backward_hook(lambda *a: calls.append("backward"))
    layer[0].weight.register_hook(lambda g: calls.append("grad"))
    layer[0].weight.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated"))
    octavo.convert(layer)
    layer(torch.randn(4, 16, requires_grad=True)).sum().backward()
    assert sorted(calls) == ["accumulated", "backward", "grad", "post", "pre"]


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_copies_run_alike(recipe: str, clone) -> None:
    net, x = make_net(recipe), torch.randn(6, 64)
    twin = clone(net)
    assert type(twin.up) is octavo.Linear
    assert twin.up.recipe == net.up.recipe
    assert twin.up.weight is not net.up.weight
    assert_all_equal(run_net(twin, x), run_net(net, x))


def test_another_recipe_by_a_second_conversion() -> None:
    net, x = make_net("rowwise"), torch.randn(6, 64)
    for recipe in ("mxfp8", "bf16", "tensorwise"):
        octavo.convert(net, recipe)
        assert_all_equal(run_net(net, x), run_net(make_net(recipe), x))


def test_bf16_equals_the_unconverted_model() -> None:
    torch.manual_seed(0)
    plain, x = Net(), torch.randn(6, 64)
    assert_all_equal(run_net(make_net("bf16"), x), run_net(plain, x))


def test_moving_and_casting_after_conversion() -> None:
    net = make_net().to(torch.bfloat16)
    assert net(torch.randn(4, 64, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert net.half()(torch.randn(4, 64, dtype=torch.float16)).dtype == torch.float16


def test_functional_call_with_other_parameters() -> None:
    net, x = make_net(), torch.randn(4, 64)
    doubled = {n: 2 * p for n, p in net.named_parameters()}
    twin = copy.deepcopy(net)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(2)
    assert torch.equal(torch.func.functional_call(net, doubled, (x,)), twin(x))


def test_extra_repr_names_the_recipe() -> None:
    assert "recipe=rowwise" in repr(make_net())


def test_the_report_is_an_aligned_table() -> None:
    lines = str(octavo.convert(Model())).splitlines()
    assert lines[0].split() == ["module", "shape", "[N,", "K]", "recipe", "reason"]
    assert set(lines[1]) <= {"-", " "}
    column = lines[0].index("recipe")
    assert all(line[column - 2 : column] == "  " for line in lines[:-1])
    assert lines[-1] == "4 converted, 1 left alone"
