"""The vLLM plugin on stand-ins of vLLM's plugin seams."""

from __future__ import annotations

import importlib.metadata
import logging

import pytest
import torch
import torch.nn.functional as F
import vllm_stand_ins as vllm

from octavo import operators
from octavo.errors import UserError
from octavo.integrations import vllm as plugin
from octavo.serving import SCHEMES, QuantizedLinear, Scheme
from octavo.testing import sqnr


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm.install(monkeypatch)
    monkeypatch.setattr(plugin, "_registered", set())
    monkeypatch.delenv(plugin.ENVIRONMENT, raising=False)
    monkeypatch.setattr(operators, "enable", lambda *names, force=False: None)


def test_vllm_finds_the_plugin() -> None:
    (found,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="octavo")
    assert found.load() is plugin.register


def test_registering_twice_registers_once() -> None:
    plugin.register()
    plugin.register()
    assert sorted(vllm.METHODS) == ["octavo_fp8_blockwise", "octavo_mxfp4", "octavo_mxfp8"]
    assert list(vllm.CustomOp.oot) == ["RMSNorm"]


def test_operators_are_switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(operators, "enable", lambda *names: calls.append(names))
    plugin.register()
    assert calls == [()]


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_is_quantized_when_it_is_loaded(scheme: Scheme, bias: bool) -> None:
    plugin.register()
    config = vllm.METHODS["octavo_" + scheme.name.replace("-", "_")]()
    torch.manual_seed(0)
    weight, x = torch.randn(256, 128, dtype=torch.bfloat16), torch.randn(3, 5, 128, dtype=torch.bfloat16)
    added = torch.randn(256, dtype=torch.bfloat16) if bias else None
    layer = vllm.LinearBase(weight, added, config)
    assert not hasattr(layer, "weight")
    quantized = layer.octavo
    assert isinstance(quantized, QuantizedLinear)
    out = layer(x)
    assert (out.shape, out.dtype) == ((3, 5, 256), torch.bfloat16)
    right = F.linear(x, quantized.weight_in(torch.bfloat16), added)
    assert sqnr(right, out) > (25 if scheme is not SCHEMES["mxfp4"] else 45)


def test_a_configuration_answers_what_vllm_asks() -> None:
    plugin.register()
    config = vllm.METHODS["octavo_mxfp8"]()
    assert config.get_name() == "octavo_mxfp8"
    assert config.get_supported_act_dtypes() == [torch.bfloat16, torch.float16]
    assert config.get_min_capability() == 90
    assert config.get_config_filenames() == []
    assert config.get_quant_method(torch.nn.Embedding(2, 2), "embed") is None
    assert config.packed_modules_mapping == {}


def test_a_checkpoint_that_is_quantized_already_is_refused() -> None:
    plugin.register()
    with pytest.raises(ValueError, match=r"quantized already \(fp8\): leave --quantization out"):
        vllm.METHODS["octavo_mxfp4"].from_config({"quant_method": "fp8"})


def test_a_norm_runs_pytorchs_operator_where_it_can() -> None:
    plugin.register()
    x, residual = torch.randn(4, 32), torch.randn(4, 32)
    norm = vllm.RMSNorm(32)
    assert type(norm).__name__ == "OctavoRMSNorm"
    assert type(norm).name == "rms_norm"
    torch.nn.init.normal_(norm.weight)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (32,), norm.weight, 1e-6))
    assert norm.own_calls == 0
    out, total = norm(x, residual)  # vLLM's kernel adds and norms in one read
    torch.testing.assert_close(out, F.rms_norm(x + residual, (32,), norm.weight, 1e-6))
    assert norm.own_calls == 1
    norm(x.bfloat16())  # a weight of another dtype
    assert norm.own_calls == 2
    assert torch.equal(total, x + residual)
    for other in (vllm.RMSNorm(32, var_hidden_size=16), vllm.RMSNorm(32, has_weight=False)):
        other(x)
        assert other.own_calls == 1


def test_parts_are_chosen_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugin.ENVIRONMENT, "quantization")
    plugin.register()
    assert vllm.METHODS
    assert not vllm.CustomOp.oot
    monkeypatch.setenv(plugin.ENVIRONMENT, "attention")
    with pytest.raises(UserError, match="names 'attention': choose from operators, norm, quantization"):
        plugin.register()


def test_a_vllm_without_a_seam_runs_without_that_part(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    vllm.install(monkeypatch, without="vllm.model_executor.layers.layernorm")
    with caplog.at_level(logging.WARNING, logger="vllm.octavo"):
        plugin.register()
    assert [record.message.split(",")[0] for record in caplog.records] == ["octavo: norm left out"]
    assert vllm.METHODS
