"""PEFT: the frozen base runs in 8 bits and costs no weight gradient, adapters stay in high precision."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from hf_models import build, loss_and_gradients, tokens
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import octavo
from octavo.training.convert import left_alone_by_default

ATTENTION = ["q_proj", "v_proj"]


def adapted(targets: Any = ATTENTION, convert: str = "after", rules: Any = (), **options: Any) -> Any:
    """A small Llama with LoRA, converted before PEFT wraps it, after, or never; B is not zero."""
    model, report = build("llama"), None
    if convert == "before":
        report = octavo.convert(model, rules=rules)
    config = peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", **options)
    torch.manual_seed(1)
    model = peft.get_peft_model(model, config)
    if convert == "after":
        report = octavo.convert(model, rules=rules)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape) * 0.05)
    return model, report


class Ops(TorchDispatchMode):
    """Names of this package's ops that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "octavo":
            self.calls.append(func.name().partition("::")[2].partition(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("targets", [ATTENTION, "all-linear"])
def test_the_base_is_converted_and_adapters_are_left_alone(targets: Any) -> None:
    model, report = adapted(targets)
    layers = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    adapters = [name for name in layers if "lora_" in name]
    assert len(report.converted) == 14
    assert not set(report.converted) & set(adapters)
    assert set(report.skipped) == {*adapters, "base_model.model.lm_head"}
    assert {d.reason for d in report.decisions if d.name in adapters} == {
        "adapter of PEFT, which trains in high precision"
    }
    assert set(left_alone_by_default(model)) == set(report.skipped)


@pytest.mark.parametrize("targets", [ATTENTION, ["gate_proj"], "all-linear"])
def test_before_and_after_are_the_same_bit_for_bit(targets: Any) -> None:
    (before, _), (after, _), (plain, _) = (
        adapted(targets, "before"), adapted(targets, "after"), adapted(targets, "never")
    )  # fmt: skip
    results = [loss_and_gradients(model, tokens()) for model in (before, after, plain)]
    assert results[0][0] == results[1][0] == pytest.approx(results[2][0], rel=5e-3)
    assert results[0][1].keys() == results[1][1].keys() == results[2][1].keys()
    assert all("lora_" in name for name in results[0][1])
    assert all(torch.equal(results[0][1][name], results[1][1][name]) for name in results[0][1])


def test_rules_reach_an_adapter_only_if_they_name_it() -> None:
    _, report = adapted(
        rules=[("q_proj", "mxfp8"), (r"lora_B", "rowwise"), (r"self_attn.*_proj", "tensorwise")]
    )
    recipes = {d.name.removeprefix("base_model.model.model.layers."): d.recipe for d in report.decisions}
    assert recipes["0.self_attn.q_proj.base_layer"] == "mxfp8"
    assert recipes["0.self_attn.v_proj.base_layer"] == "tensorwise"
    assert recipes["0.self_attn.q_proj.lora_A.default"] is None
    assert recipes["0.self_attn.q_proj.lora_B.default"] == "rowwise"
    assert report.unmatched_rules == ()


def test_a_head_stays_a_head_inside_peft() -> None:
    for options in ({"modules_to_save": ["lm_head"]}, {"targets": [*ATTENTION, "lm_head"]}):
        _, report = adapted(**options)
        assert len(report.converted) == 14
        heads = [d for d in report.decisions if "lm_head" in d.name and "lora" not in d.name]
        assert heads
        assert {d.recipe for d in heads} == {None}
    model = build("llama")
    model.score = nn.Linear(64, 3)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=ATTENTION, modules_to_save=["score"]))
    left = left_alone_by_default(model)
    assert "base_model.model.score.modules_to_save.default" in left
    assert "base_model.model.score.original_module" in left


def test_prompt_encoders_are_adapters_too() -> None:
    config = peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=32)
    report = octavo.convert(peft.get_peft_model(build("llama"), config))
    assert len(report.converted) == 14
    assert any("prompt_encoder" in name for name in report.skipped)


@pytest.mark.parametrize(("targets", "frozen_base", "trained"), [(ATTENTION, 21, 36), ("all-linear", 25, 42)])
def test_a_frozen_base_costs_no_weight_gradient(targets: Any, frozen_base: int, trained: int) -> None:
    # A layer of the model has seven products, or six where gate and up are joined in a span. The first layer's
    # q, k and v read the frozen embedding, which takes no gradient.
    model, _ = adapted(targets)
    with Ops() as ops:
        loss_and_gradients(model, tokens())
    assert ops.calls.count("scaled_mm") == frozen_base
    full, _ = adapted(targets)
    full.requires_grad_(True)
    with Ops() as ops:
        loss_and_gradients(full, tokens())
    assert ops.calls.count("scaled_mm") == trained
    frozen = [p for n, p in model.named_parameters() if "lora_" not in n]
    assert all(p.grad is None and not p.requires_grad for p in frozen)


def test_frozen_weights_are_quantized_once_for_all_steps_and_trained_ones_anew() -> None:
    model, _ = adapted()
    plain, _ = adapted()
    layers = [m for m in model.modules() if isinstance(m, octavo.Linear)]
    layers[-1].weight.requires_grad_(True)
    [m for m in plain.modules() if isinstance(m, octavo.Linear)][-1].weight.requires_grad_(True)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain)]
    expected, losses, counts = [], [], []
    for step in range(3):
        expected.append(loss_and_gradients(plain, tokens(seed=step))[0])
        optimizers[1].step()
    with octavo.accumulate(debug=True):
        for step in range(3):
            with Ops() as ops:
                losses.append(loss_and_gradients(model, tokens(seed=step))[0])
            optimizers[0].step()
            counts.append([ops.calls.count(op) for op in ("quantize", "quantize_both", "quantize_concat")])
    assert losses == expected
    assert counts[1] == counts[2]
    assert counts[0][2] - counts[1][2] == 4  # gate and up joined, of two spans, in both directions
    assert counts[0][0] - counts[1][0] > 10
    assert counts[1][2] == 0


def test_merged_adapters_are_in_the_saved_model(tmp_path: Any) -> None:
    model, _ = adapted("all-linear")
    x = tokens()
    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(build("llama"), tmp_path / "adapter")
    octavo.convert(again)
    assert torch.equal(again(input_ids=x).logits, model(input_ids=x).logits)
    expected = adapted("all-linear", "never")[0].merge_and_unload()
    merged = model.merge_and_unload()
    assert merged.state_dict().keys() == expected.state_dict().keys()
    for name, value in expected.state_dict().items():
        assert torch.equal(merged.state_dict()[name], value), name
    assert isinstance(merged.model.layers[0].mlp.gate_proj, octavo.Linear)
    merged.save_pretrained(tmp_path / "merged")
    assert (
        type(expected).from_pretrained(tmp_path / "merged").state_dict().keys()
        == expected.state_dict().keys()
    )


def test_merging_inside_the_block_of_cached_weights_is_found_by_its_debug_mode() -> None:
    model, _ = adapted()
    with octavo.accumulate(debug=True):
        loss_and_gradients(model, tokens())
        model.merge_adapter()
        with pytest.raises(RuntimeError, match="changed without PyTorch's version counter"):
            loss_and_gradients(model, tokens())
    x = tokens()
    merged = model(input_ids=x, labels=x).loss.item()  # outside of the block it is right
    assert merged == pytest.approx(loss_and_gradients(adapted()[0], x)[0], rel=5e-3)


def test_adapters_of_a_bf16_base_are_float32() -> None:
    model = build("llama").bfloat16()
    octavo.convert(model)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))
    loss, gradients = loss_and_gradients(model, tokens())
    assert {g.dtype for g in gradients.values()} == {torch.float32}
    assert loss == pytest.approx(loss_and_gradients(build("llama"), tokens())[0], rel=1e-2)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_with_adapters(reentrant: bool) -> None:
    model, _ = adapted("all-linear")
    expected = loss_and_gradients(model.train(), tokens())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    loss, gradients = loss_and_gradients(model, tokens())
    assert loss == expected[0]
    assert all(torch.equal(gradients[name], expected[1][name]) for name in expected[1])
