"""``octavo export``: a checkpoint in, a quantized one and its report out; what cannot be done is one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from octavo.errors import UserError
from octavo.serving import load
from octavo.serving.export import export, perplexity

transformers = pytest.importorskip("transformers", reason="checkpoints are loaded with it")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "generation_config.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("Every number is compared with its reference. " * 400)
    return path


def test_the_command_writes_what_its_report_says(checkpoint: Path, text: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "octavo", "export", str(checkpoint), "--format", "fp8-blockwise"]
    options = ["--out", str(tmp_path), "--text", str(text), "--seq-len", "64", "--tokens", "512"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "export.json").read_text())
    assert report["format"] == "fp8-blockwise"
    assert sum(layer["scheme"] is not None for layer in report["layers"]) == 14
    assert report["bytes_after"] < report["bytes_before"] / 1.6  # the head stays
    quality = report["quality"]
    assert abs(quality["change_percent"]) < 1
    assert f"{quality['perplexity_before']:.4f} -> {quality['perplexity_after']:.4f}" in done.stdout
    assert (tmp_path / "generation_config.json").is_file()

    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto").eval()
    load(model, tmp_path)
    from octavo.trainer.data.corpus import load as read
    from octavo.trainer.data.packing import validation_batches

    batches = list(validation_batches(read(text, 64).validation, 64, 4, 512))
    assert perplexity(model, batches) == pytest.approx(quality["perplexity_after"], rel=1e-6)


def test_what_cannot_be_exported_is_one_line_and_writes_nothing(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(UserError, match=r"unknown weight format 'mxfp9'"):
        export(checkpoint, out, "mxfp9")
    with pytest.raises(UserError, match=r"has no config\.json: give the folder of a checkpoint"):
        export(tmp_path, out, "mxfp8")
    with pytest.raises(UserError, match="--out is the checkpoint itself"):
        export(checkpoint, checkpoint, "mxfp8")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    (broken / "model.safetensors").write_bytes(b"no tensors here")
    with pytest.raises(UserError, match=r"cannot load '.*broken': "):
        export(broken, out, "mxfp8")
    assert not out.exists()
    export(checkpoint, out, "mxfp4")
    with pytest.raises(UserError, match="is quantized already"):
        export(out, tmp_path / "again", "mxfp8")
