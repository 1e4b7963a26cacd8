"""Hugging Face Llama, Mistral and Qwen: conversion changes the products and nothing else about the model."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hf_models import CONFIGS, build, loss_and_gradients, tokens
from torch import nn

import octavo
from octavo.testing import sqnr
from octavo.training import autograd, spanning

KINDS = sorted(CONFIGS)
PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each autograd Function ran forward."""
    count: Counter[str] = Counter()
    for function in (spanning._MLP, autograd._Linear):

        def counted(*args: Any, forward: Any = function.forward, name: str = function.__name__) -> Any:
            count[name] += 1
            return forward(*args)

        monkeypatch.setattr(function, "forward", staticmethod(counted))
    return count


@pytest.mark.parametrize("kind", KINDS)
def test_projections_are_converted_and_nothing_else_changes(kind: str) -> None:
    model, plain = build(kind), build(kind)
    names = [(name, type(m).__name__) for name, m in model.named_modules()]
    parameters = {name: (id(p), p.requires_grad) for name, p in model.named_parameters()}
    report = octavo.convert(model)
    assert {name.rpartition(".")[2] for name in report.converted} == PROJECTIONS
    assert len(report.converted) == 14
    assert report.skipped == ("lm_head",)
    assert report.spans == ("model.layers.0.mlp", "model.layers.1.mlp")
    assert [(name, type(m).__name__) for name, m in model.named_modules()] == names
    assert {name: (id(p), p.requires_grad) for name, p in model.named_parameters()} == parameters
    state, expected = model.state_dict(), plain.state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    for kept in (nn.Embedding, type(model.model.norm)):  # q_norm and k_norm of Qwen 3 among them
        assert all(type(m) is kept for m in model.modules() if isinstance(m, kept))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", ["rowwise", "mxfp8"])
def test_loss_and_gradients_stay_close(kind: str, recipe: str) -> None:
    model, plain, x = build(kind), build(kind), tokens()
    octavo.convert(model, recipe)
    loss, gradients = loss_and_gradients(model, x)
    expected_loss, expected = loss_and_gradients(plain, x)
    assert loss == pytest.approx(expected_loss, rel=5e-3)
    assert list(gradients) == list(expected)
    floors = {name: sqnr(gradients[name], expected[name]) for name in expected}
    weights = {name: dB for name, dB in floors.items() if not name.endswith(".bias")}
    assert min(weights.values()) > 12, floors


def test_a_layer_runs_as_four_functions_and_quantizes_what_q_k_and_v_read_once(
    calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("llama")
    octavo.convert(model)
    inputs: Counter[int] = Counter()
    both = autograd.both

    def counted(x: torch.Tensor, *formats: Any) -> Any:
        inputs["both"] += 1
        return both(x, *formats)

    monkeypatch.setattr(autograd, "both", counted)
    model(input_ids=tokens())
    assert calls == {"_MLP": 2, "_Linear": 8}
    assert inputs["both"] == 4  # of each layer: the norm's output for q, k and v, and the attention's output


def variants() -> Iterator[tuple[str, dict[str, Any], int]]:
    """(kind, configuration, MLPs that run as one Function)"""
    yield "llama", {"mlp_bias": True}, 0
    yield "llama", {"attention_bias": True}, 2
    yield "llama", {"hidden_act": "gelu"}, 0
    yield "qwen2", {"tie_word_embeddings": True}, 2
    yield "qwen2", {"use_sliding_window": True, "sliding_window": 8}, 2
    yield "qwen3", {"tie_word_embeddings": True}, 2
    yield "mistral", {"sliding_window": 8}, 2


@pytest.mark.parametrize(("kind", "changes", "spans"), list(variants()))
def test_spans_run_where_they_are_valid(
    kind: str, changes: dict[str, Any], spans: int, calls: Counter[str]
) -> None:
    model, plain, x = build(kind, **changes), build(kind, **changes), tokens()
    octavo.convert(model)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == bool(
        changes.get("tie_word_embeddings")
    )
    loss, gradients = loss_and_gradients(model, x)
    expected_loss, expected = loss_and_gradients(plain, x)
    assert calls["_MLP"] == spans
    assert loss == pytest.approx(expected_loss, rel=5e-3)
    assert list(gradients) == list(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_save_pretrained_and_from_pretrained_round_trip(kind: str, tmp_path: Any) -> None:
    model, x = build(kind), tokens()
    octavo.convert(model)
    logits = model(input_ids=x).logits
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert not any(isinstance(m, octavo.Linear) for m in loaded.modules())
    assert loaded.config.architectures == [type(build(kind)).__name__]
    octavo.convert(loaded)
    assert torch.equal(loaded(input_ids=x).logits, logits)


@pytest.mark.parametrize("kind", KINDS)
def test_generate_works(kind: str) -> None:
    model, x = build(kind, use_cache=True), tokens(length=6)
    octavo.convert(model)
    for options in ({"do_sample": False}, {"do_sample": True, "top_k": 5}, {"num_beams": 2}):
        out = model.generate(input_ids=x, attention_mask=torch.ones_like(x), max_new_tokens=4, **options)
        assert torch.equal(out[:, :6], x)
        assert 6 < out.shape[1] <= 10


@pytest.mark.filterwarnings("ignore::FutureWarning")  # renamed in transformers 5, and the old name works
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_gradient_checkpointing_changes_no_bit(reentrant: bool, recipe: str, calls: Counter[str]) -> None:
    model, x = build("llama"), tokens()
    octavo.convert(model, recipe)
    model.train()
    expected = loss_and_gradients(model, x)
    once = dict(calls)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    loss, gradients = loss_and_gradients(model, x)
    assert calls["_MLP"] == 3 * once["_MLP"]  # recomputed as well
    assert loss == expected[0]
    assert all(torch.equal(gradients[name], expected[1][name]) for name in expected[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_spans_the_mlp_and_computes_what_bf16_operands_give(
    dtype: torch.dtype, calls: Counter[str]
) -> None:
    model, x = build("llama").to(dtype), tokens()
    octavo.convert(model)
    mlp, hidden = model.model.layers[0].mlp, torch.randn(2, 8, 64).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        out = mlp(hidden)
        loss, gradients = loss_and_gradients(model, x)
    assert calls["_MLP"] == 3
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, copy.deepcopy(mlp).bfloat16()(hidden.bfloat16()))
    with torch.autocast("cpu", torch.bfloat16):
        expected, _ = loss_and_gradients(build("llama").to(dtype), x)
    assert loss == pytest.approx(expected, rel=5e-3)
    assert {g.dtype for g in gradients.values()} == {dtype}


def test_accelerate_in_bf16_trains_a_model_converted_before_or_after() -> None:
    from accelerate import Accelerator

    losses = {}
    for order in ("never", "before", "after"):
        accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
        model = build("llama")
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        if order == "before":
            octavo.convert(model)
        model, optimizer = accelerator.prepare(model, optimizer)
        if order == "after":
            octavo.convert(model)
        losses[order] = []
        for step in range(12):
            with accelerator.accumulate(model):
                x = tokens(4, seed=step)
                loss = model(input_ids=x, labels=x).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses[order].append(loss.item())
    assert losses["before"] == losses["after"]
    assert losses["before"][-1] == pytest.approx(losses["never"][-1], rel=1e-2)
    assert losses["never"][-1] < 0.9 * losses["never"][0]


def test_hooks_of_accelerate_work_on_a_converted_model_and_are_not_bypassed_by_conversion() -> None:
    from accelerate.hooks import attach_execution_device_hook

    model, x = build("llama"), tokens()
    octavo.convert(model)
    expected = loss_and_gradients(model, x)
    attach_execution_device_hook(model, "cpu")
    loss, gradients = loss_and_gradients(model, x)
    assert loss == expected[0]
    assert all(torch.equal(gradients[name], expected[1][name]) for name in expected[1])
    hooked = build("llama")
    attach_execution_device_hook(hooked, "cpu")
    with pytest.raises(
        ValueError, match=r"nothing was converted(.|\n)*its forward was replaced on the instance"
    ):
        octavo.convert(hooked)


@pytest.mark.slow
def test_torch_compile_takes_the_model_as_one_graph_that_agrees_with_eager() -> None:
    torch._dynamo.reset()
    model, x = build("llama", num_hidden_layers=1), tokens()
    octavo.convert(model)
    expected_loss, expected = loss_and_gradients(model, x)
    compiled = torch.compile(model, fullgraph=True)
    loss, gradients = loss_and_gradients(compiled, x)
    assert loss == pytest.approx(expected_loss, rel=1e-4)
    for name, gradient in gradients.items():
        assert sqnr(gradient, expected[name.removeprefix("_orig_mod.")]) > 25, name
