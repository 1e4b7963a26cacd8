"""``--save-final``: a folder that transformers loads, with the tokenizer and the token that ends a text."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from resume_support import Job, run

from octavo import models
from octavo.trainer import data
from octavo.trainer import job as jobs
from octavo.trainer.config import UserError
from octavo.trainer.data import Batches

transformers = pytest.importorskip("transformers", reason="needs the extra octavo[hf]")
tokenizers = pytest.importorskip("tokenizers", reason="needs the extra octavo[data]")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A folder with a tokenizer of 60 words, and what transformers writes beside it."""
    words = [
        "[UNK]",
        "<|endoftext|>",
        *["bottles", "of", "beer", "on", "the", "wall", "take", "down", ";", ".", ","],
        *map(str, range(47)),
    ]
    made: Any = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: n for n, w in enumerate(words)}, "[UNK]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["<|endoftext|>"])
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"})
    )
    return folder


@pytest.mark.parametrize("recipe", ["bf16", "rowwise"])
def test_transformers_loads_what_was_trained(job: Job, tmp_path: Path, tokenizer: Path, recipe: str) -> None:
    final = tmp_path / "final"
    config = job(recipes=(recipe,), tokenizer=tokenizer, save_final=final, seq_len=16)
    done = run(config)
    assert done.status == 0
    assert sorted(p.name for p in final.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert json.loads((final / "config.json").read_text())["eos_token_id"] == 1
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(final, dtype=torch.float32)
    assert loaded.config.eos_token_id == 1

    corpus = data.load(config.data, config.seq_len, tokenizer)
    tokens = Batches(corpus.train, config.seq_len, 2, 0)(0)[0]
    ours = models.from_pretrained(final)
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, ours(tokens), rtol=1e-4, atol=1e-4)
    words: Any = transformers.AutoTokenizer.from_pretrained(final)
    assert words.eos_token_id == 1
    assert words("bottles of beer")["input_ids"] == [2, 3, 4]


def test_each_of_several_recipes_has_a_folder_and_bytes_have_no_tokenizer(job: Job, tmp_path: Path) -> None:
    run(job(recipes=("bf16", "rowwise"), save_final=tmp_path / "final"))
    for recipe in ("bf16", "rowwise"):
        folder = tmp_path / "final" / recipe
        assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
        assert json.loads((folder / "config.json").read_text())["eos_token_id"] is None


def test_the_name_of_a_file_is_refused_before_training(job: Job, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--save-final .* is to be a folder"):
        jobs.prepare(job(save_final=tmp_path / "m.safetensors"))


def test_perplexity_is_that_of_the_held_out_text(job: Job) -> None:
    content = run(job()).runs["bf16"]
    assert content["perplexity"] == pytest.approx(math.exp(content["validation_loss"]))
