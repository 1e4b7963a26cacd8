"""The plan of a run on many GPUs: its formulas against counted tensors and published parameter counts."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import octavo
from octavo import plan
from octavo.cli import app
from octavo.errors import UserError
from octavo.models.llama3 import PRESETS, TransformerBlock, rope_table
from octavo.plan_command import plan as command

TOKENS = 256


@pytest.mark.parametrize(
    ("model", "parameters"),
    [("llama3-8b", 8_030_261_248), ("llama3-70b", 70_553_706_496), ("deepseek-v3", 671_026_419_200)],
)
def test_parameters_are_the_published_ones(model: str, parameters: int) -> None:
    # DeepSeek-V3's count is that of its published safetensors without the multi-token prediction layer.
    assert plan.MODELS[model].parameters == parameters


def test_dimensions_are_those_of_the_models_here() -> None:
    for name in ("llama3-8b", "llama3-70b"):
        config, shape = PRESETS[name], plan.MODELS[name]
        assert (shape.dim, shape.layers, shape.heads) == (config.dim, config.n_layers, config.n_heads)
        assert (shape.kv_heads, shape.ffn) == (config.n_kv_heads, config.ffn_dim)
        assert shape.vocabulary == config.vocab_size


def _kept_bytes(recipe: str) -> int:
    """Bytes that a small block without norms keeps for backward, parameters left out."""
    torch.manual_seed(0)
    config = replace(PRESETS["llama3-8b"], dim=512, n_heads=4, n_kv_heads=1, ffn_dim=1792)
    block = TransformerBlock(config).to(torch.bfloat16)
    for name, module in list(block.named_children()):
        if isinstance(module, nn.RMSNorm):  # off the GPU it is not one operator and keeps float32 copies
            setattr(block, name, nn.Identity())
    if recipe != "bf16":
        octavo.convert(block, recipe)
    not_counted = {p.untyped_storage().data_ptr() for p in block.parameters()}
    cos, sin = rope_table(config, TOKENS, torch.device("cpu"))
    not_counted |= {cos.untyped_storage().data_ptr(), sin.untyped_storage().data_ptr()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in not_counted:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.randn(1, TOKENS, config.dim, dtype=torch.bfloat16, requires_grad=True) * 1.0
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x, cos, sin)
    return sum(kept.values())


@pytest.mark.parametrize("recipe", ["bf16", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8"])
def test_activations_are_what_autograd_keeps(recipe: str) -> None:
    shape = plan.Shape(dim=512, layers=1, heads=4, kv_heads=1, head_dim=128, ffn=1792, vocabulary=1)
    formula, _ = plan.activation_bytes(shape, octavo.get_recipe(recipe), plan.Layout(gpus=1, tokens=TOKENS))
    norms = 2 * plan.BF16 * shape.dim * TOKENS
    assert formula - norms == pytest.approx(_kept_bytes(recipe), rel=0.03)


def test_more_gpus_need_less_memory_each() -> None:
    totals = [plan.plan("llama3-8b", "rowwise", plan.Layout(gpus=n)).total_memory for n in (1, 8, 64)]
    assert totals == sorted(totals, reverse=True)
    states = plan.plan("llama3-8b", "rowwise", plan.Layout(gpus=8)).memory
    assert states["weights"] + states["gradients"] + states["optimizer"] == 16 * 8_030_261_248 / 8


def test_8_bit_gather_halves_what_fsdp_gathers_of_layers_and_says_why_not() -> None:
    of = {
        name: plan.plan("llama3-8b", name, plan.Layout(gpus=8)) for name in ("bf16", "rowwise", "blockwise")
    }
    gathered = {name: p.communication["FSDP all-gather"] for name, p in of.items()}
    ends = 2 * 2 * 7 / 8 * 2 * 128_256 * 4096
    assert gathered["bf16"] == gathered["rowwise"]
    assert gathered["blockwise"] - ends == pytest.approx((gathered["bf16"] - ends) / 2)
    assert any("gathered in 16 bits" in note for note in of["rowwise"].notes)
    assert not any("gathered in 16 bits" in note for note in of["blockwise"].notes)


@pytest.mark.parametrize(
    ("model", "layout", "words"),
    [
        ("llama3-8b", plan.Layout(gpus=0), "--gpus is 0"),
        ("llama3-8b", plan.Layout(gpus=8, tp=3), "8 GPUs do not split"),
        ("llama3-8b", plan.Layout(gpus=16, tp=16), "must divide 32 heads"),
        ("llama3-8b", plan.Layout(gpus=8, ep=2), "no experts"),
        ("deepseek-v3", plan.Layout(gpus=256, ep=96), "--ep 96 must divide"),
        ("llama3-8b", plan.Layout(gpus=64, pp=64), "has 32 layers"),
        ("llama3-8b", plan.Layout(gpus=8, pp=4, micro_batches=2), "at least 4"),
        ("llama4", plan.Layout(gpus=8), "unknown model 'llama4'"),
    ],
)
def test_what_does_not_fit_is_said(model: str, layout: plan.Layout, words: str) -> None:
    with pytest.raises(UserError, match=words):
        plan.plan(model, "rowwise", layout)


def test_command_prints_tables_or_json() -> None:
    if not any(entry.callback is command for entry in app.registered_commands):
        app.command("plan")(command)
    arguments = ["plan", "--model", "deepseek-v3", "--gpus", "256", "--ep", "64", "--recipe", "blockwise"]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0
    assert "671.0 B parameters" in shown.output
    assert "expert parallel" in shown.output
    assert "not a measurement" in shown.output
    content = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)
    assert content["layout"]["dp"] == 256
    parts = content["memory_bytes_per_gpu"]
    assert parts.pop("total") == pytest.approx(sum(parts.values()))
