"""Quantized weights for inference: numerics, files in and out, other engines' readers, errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import octavo
from octavo.serving import QuantizedLinear, load, save
from octavo.serving.schemes import SCHEMES
from octavo.testing import sqnr

# The least over normal weights of these shapes; the formats' own noise.
FLOOR_DB = {"mxfp8": 30, "mxfp4": 17, "fp8-blockwise": 30}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 96)
        self.up = nn.Linear(96, 200)
        self.down = nn.Linear(200, 96, bias=False)
        self.norm = nn.LayerNorm(96)
        self.lm_head = nn.Linear(96, 64, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        return self.lm_head(self.norm(x + self.down(self.up(x).relu())))


def _net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().eval()


TOKENS = torch.arange(48).view(2, 24)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_layers_hold_the_formats_codes_and_multiply_as_the_reference(scheme: str) -> None:
    model, exact = _net(), _net()
    report = octavo.quantize_weights(model, scheme)
    assert report.quantized == ["up", "down"]
    assert report.left_alone == ["lm_head"]
    assert "output head" in str(report)
    for name in report.quantized:
        layer, linear = model.get_submodule(name), exact.get_submodule(name)
        assert isinstance(layer, QuantizedLinear)
        want = octavo.quantize(linear.weight.detach(), SCHEMES[scheme].weight)
        assert torch.equal(layer.weight_data.view(torch.uint8), want.data.view(torch.uint8))
        assert sqnr(layer.weight_in(torch.float32), linear.weight) >= FLOOR_DB[scheme]
        x = torch.randn(3, 5, linear.in_features)
        rows = (
            x
            if layer.scheme.activation is None
            else octavo.dequantize(
                octavo.quantize(x.view(15, -1), layer.scheme.activation), torch.float32
            ).view_as(x)
        )
        expected = nn.functional.linear(rows, octavo.dequantize(want, torch.float32), linear.bias)
        assert sqnr(layer(x), expected) >= 50
        assert layer(x.bfloat16()).dtype == torch.bfloat16
    assert sum(x.bytes_after for x in report.layers) < sum(x.bytes_before for x in report.layers)
    assert sqnr(model(TOKENS), exact(TOKENS)) > FLOOR_DB[scheme] - 6


def test_activations_are_the_users_choice() -> None:
    model = _net()
    octavo.quantize_weights(model, "mxfp4", activations="quantized", skip=["down"])
    assert model.up.scheme.activation == SCHEMES["mxfp4"].weight
    assert isinstance(model.down, nn.Linear)
    model = _net()
    octavo.quantize_weights(model, "mxfp8", activations="16-bit")
    assert model.up.scheme.activation is None


@pytest.mark.parametrize("activations", [None, "quantized", "16-bit"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_saved_and_loaded_models_agree_bit_for_bit(
    scheme: str, activations, device: str, tmp_path: Path
) -> None:
    model = _net()
    octavo.quantize_weights(model, scheme, activations=activations)
    files = save(model, tmp_path, max_shard_bytes=20_000)
    assert len(files) > 2
    with torch.device(device):
        other = Net().eval()
    # DeepSeek's layout has no word for 16-bit activations: that choice is made again at loading.
    again = activations if scheme == "fp8-blockwise" else None
    assert load(other, tmp_path, activations=again) is other
    assert torch.equal(other(TOKENS), model(TOKENS))
    assert other.up.scheme == model.up.scheme
    save(model, tmp_path)
    assert {p.name for p in tmp_path.iterdir() if "-of-" not in p.name} == {
        "config.json",
        "model.safetensors",
    }
    assert torch.equal(load(_net(1), tmp_path, activations=again)(TOKENS), model(TOKENS))


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown weight format 'mxfp6': did you mean"):
        octavo.quantize_weights(_net(), "mxfp6")
    with pytest.raises(ValueError, match=r"activations is 'int8': choose from quantized, 16-bit"):
        octavo.quantize_weights(_net(), "mxfp8", activations="int8")
    with pytest.raises(ValueError, match=r"no linear layer was left to quantize .*check skip and only"):
        octavo.quantize_weights(_net(), "mxfp8", skip=["."])
    with pytest.raises(ValueError, match=r"skip pattern '\(' is no regular expression"):
        octavo.quantize_weights(_net(), "mxfp8", skip=["("])
    with pytest.raises(ValueError, match="no quantized layer: call octavo"):
        save(_net(), tmp_path)
    model = _net()
    octavo.quantize_weights(model, "mxfp8")
    save(model, tmp_path)
    with pytest.raises(ValueError, match=r"holds 'down' quantized, which is no linear layer of the model"):
        load(nn.Sequential(nn.Linear(96, 200)), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["format"] = "int-quantized"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ValueError, match=r"quantized as 'int-quantized', which is none of mxfp8, mxfp4, fp8-blockwise"
    ):
        load(_net(), tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="no quantization_config: it is no quantized checkpoint"):
        load(_net(), tmp_path)


def _llama(**options):
    transformers = pytest.importorskip("transformers", reason="loading back needs transformers")
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=256, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_transformers_llama_in_and_out(scheme: str, tied: bool, tmp_path: Path) -> None:
    model = _llama(tie_word_embeddings=tied)
    exact = model(TOKENS).logits
    report = octavo.quantize_weights(model, scheme)
    assert len(report.quantized) == 14
    assert report.left_alone == ["lm_head"]
    save(model, tmp_path)
    with torch.device("meta"):
        empty = type(model)(model.config)
    loaded = load(empty, tmp_path).eval()
    # Buffers that no file holds (rotary frequencies) are made by the model; on meta they have no values.
    loaded.model.rotary_emb = model.model.rotary_emb
    assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)
    assert sqnr(model(TOKENS).logits, exact) > FLOOR_DB[scheme] - 8


@pytest.mark.parametrize("scheme", SCHEMES)
def test_transformers_itself_reads_the_files(scheme: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="it reads the files")
    if scheme != "fp8-blockwise":
        pytest.importorskip("compressed_tensors", reason="transformers reads this format through it")
    model = _llama()
    octavo.quantize_weights(model, scheme, activations="16-bit")
    save(model, tmp_path)
    options = {}
    if scheme == "fp8-blockwise":
        options["quantization_config"] = transformers.FineGrainedFP8Config(dequantize=True)
    else:
        options["quantization_config"] = transformers.CompressedTensorsConfig(run_compressed=False)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, **options
    ).eval()
    assert sqnr(theirs(TOKENS).logits, model(TOKENS).logits) > 60
