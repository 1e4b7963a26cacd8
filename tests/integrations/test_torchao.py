"""torchao's names: the same configuration means the same products, and a script runs with the import changed."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hf_models import build, loss_and_gradients, tokens
from torch import nn

import octavo
from octavo.errors import UserError
from octavo.formats import E4M3FN, E5M2, Format
from octavo.integrations import torchao as ao

# As it stands in torchao's README and tutorials, but on the CPU and for a few steps.
SCRIPT = """
import torch
import torch.nn as nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

torch.manual_seed(0)
m = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 1)).bfloat16()
x = torch.randn(64, 128, dtype=torch.bfloat16)
optimizer = torch.optim.AdamW(m.parameters(), lr=1e-3)

def module_filter_fn(mod: torch.nn.Module, fqn: str):
    if fqn == "4":
        return False
    if isinstance(mod, torch.nn.Linear):
        if mod.in_features % 16 != 0 or mod.out_features % 16 != 0:
            return False
    return True

config = Float8LinearConfig.from_recipe_name("RECIPE")
convert_to_float8_training(m, config=config, module_filter_fn=module_filter_fn)
for _ in range(20):
    optimizer.zero_grad()
    loss = (m(x) - 1).square().mean()
    loss.backward()
    optimizer.step()
    precompute_float8_dynamic_scale_for_fsdp(m)
print(",".join(type(layer).__name__ for layer in m), loss.item())
torch.save(m.state_dict(), "/dev/null")
"""


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_a_script_runs_with_the_import_changed(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    script = SCRIPT.replace("torchao.float8", "octavo.integrations.torchao").replace("RECIPE", recipe)
    exec(compile(script, "script.py", "exec"), {"__name__": "__main__"})
    kinds, loss = capsys.readouterr().out.split()
    assert kinds == "Linear,ReLU,Linear,ReLU,Linear"
    assert float(loss) < 0.5


def test_the_module_needs_no_torchao_and_is_not_loaded_by_octavo() -> None:
    name = "octavo.integrations.torchao"
    code = (
        f"import sys, octavo; print({name!r} in sys.modules); import {name}; print('torchao' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "False"], done.stderr


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_ready_configurations_are_the_recipes_of_that_name(name: str) -> None:
    for given in (name, ao.Float8LinearRecipeName(name)):
        assert ao.Float8LinearConfig.from_recipe_name(given).recipe() is octavo.RECIPES[name]
    assert ao.Float8LinearConfig().recipe() is octavo.RECIPES["tensorwise"]


def test_a_configuration_by_hand_becomes_its_products() -> None:
    row, high = (
        ao.CastConfig(scaling_granularity=ao.ScalingGranularity.AXISWISE),
        ao.CastConfig(scaling_type=ao.ScalingType.DISABLED),
    )
    config = ao.Float8LinearConfig(
        cast_config_input=row,
        cast_config_input_for_grad_weight=high,
        cast_config_grad_output_for_grad_weight=high,
        gemm_config_output=ao.Float8GemmConfig(use_fast_accum=False),
        gemm_config_grad_input=ao.Float8GemmConfig(use_fast_accum=True),
    )
    recipe = config.recipe()
    one = Format(E4M3FN, "tensorwise")
    assert recipe.output == octavo.Product(Format(E4M3FN, "rowwise"), one, fast_accum=False)
    assert recipe.grad_input == octavo.Product(Format(E5M2, "tensorwise"), one, fast_accum=True)
    assert recipe.grad_weight is None
    layer = nn.Linear(64, 32)
    assert ao.convert_to_float8_training(layer, config=config) is layer
    assert isinstance(layer, ao.Float8Linear)
    layer(torch.randn(8, 64, requires_grad=True)).sum().backward()


def test_fnuz_types_are_asked_for_by_dtype_and_not_mixed() -> None:
    fnuz = {
        f"cast_config_{name}": ao.CastConfig(target_dtype=torch.float8_e4m3fnuz)
        for name in ("input", "weight", "grad_output")
    }
    recipe = ao.Float8LinearConfig(**fnuz).recipe()
    assert recipe.family == "fnuz"
    product = recipe.product("output", torch.device("cpu"))
    assert product.a.element.dtype == torch.float8_e4m3fnuz
    with pytest.raises(UserError, match="fnuz variant"):
        ao.Float8LinearConfig(cast_config_input=fnuz["cast_config_input"])


def test_the_filter_alone_decides_and_the_head_is_converted_without_one() -> None:
    seen = []

    def no_head(module: nn.Module, name: str) -> bool:
        seen.append(name)
        return "lm_head" not in name

    model = build("llama")
    assert ao.convert_to_float8_training(model, module_filter_fn=no_head) is model
    layers = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    assert seen == layers
    assert [n for n, m in model.named_modules() if isinstance(m, octavo.Linear)] == layers[:-1]
    whole = ao.convert_to_float8_training(build("llama"))
    assert isinstance(whole.lm_head, octavo.Linear)
    plain = build("llama")
    octavo.convert(plain, "tensorwise")
    assert loss_and_gradients(model, tokens())[0] == loss_and_gradients(plain, tokens())[0]


def test_what_was_chosen_and_cannot_be_converted_is_told() -> None:
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(32, 32), Own(32, 32))
    with pytest.warns(UserWarning, match="1 was not converted: Own is a subclass"):
        ao.convert_to_float8_training(model)
    with pytest.raises(ValueError, match="nothing was converted"):
        ao.convert_to_float8_training(nn.Sequential(nn.Linear(32, 32)), module_filter_fn=lambda *_: False)
    with pytest.raises(UserError, match="call convert_to_float8_training first"):
        ao.precompute_float8_dynamic_scale_for_fsdp(nn.Linear(4, 4))


def test_8_bit_all_gather_prepares_the_weights() -> None:
    from octavo.training.fsdp import ShardedWeight

    config = ao.Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    model = ao.convert_to_float8_training(build("llama"), config=config)
    assert isinstance(model.model.layers[0].mlp.gate_proj.weight.data, ShardedWeight)
    assert type(model.state_dict()["model.layers.0.mlp.gate_proj.weight"]) is torch.Tensor
    row = ao.CastConfig(scaling_granularity=ao.ScalingGranularity.AXISWISE)
    with pytest.raises(UserError, match="rowwise_block_weight"):
        ao.Float8LinearConfig(cast_config_weight=row, enable_fsdp_float8_all_gather=True)


@pytest.mark.parametrize("name", sorted(ao._NO_COUNTERPART))
def test_names_without_a_counterpart_say_so_when_imported(name: str) -> None:
    with pytest.raises(ImportError, match=rf"torchao's {name} has no counterpart in Octavo: \w"):
        exec(f"from octavo.integrations.torchao import {name}")
    with pytest.raises(ImportError, match="cannot import name 'nonsense'"):
        exec("from octavo.integrations.torchao import nonsense")


def test_settings_without_a_counterpart_say_so() -> None:
    for kind in (ao.ScalingType.DELAYED, ao.ScalingType.STATIC):
        with pytest.raises(
            NotImplementedError, match=f"{kind.name} has no counterpart.*use ScalingType.DYNAMIC"
        ):
            ao.CastConfig(scaling_type=kind)
    with pytest.raises(NotImplementedError, match="delayed_scaling_config has no counterpart"):
        ao.Float8LinearConfig(delayed_scaling_config=object())
    with pytest.raises(UserError, match="tensorwise, rowwise, rowwise_with_gw_hp, got 'lw_axiswise'"):
        ao.Float8LinearConfig.from_recipe_name("lw_axiswise")
    with pytest.raises(UserError, match=r"torch.float16 is none of torch.float8_e4m3fn"):
        ao.CastConfig(target_dtype=torch.float16)
    high = ao.CastConfig(scaling_type=ao.ScalingType.DISABLED)
    with pytest.raises(UserError, match="operands of grad_input must both be"):
        ao.Float8LinearConfig(cast_config_weight_for_grad_input=high)
    with pytest.warns(UserWarning, match="emulate=True has no effect"):
        ao.Float8LinearConfig(emulate=True)
