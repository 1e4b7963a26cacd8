"""Text through a Hugging Face tokenizer.json: the library's own tokens, packed, and what does not fit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.errors import UserError
from octavo.trainer import data
from octavo.trainer.data import corpus as corpus_module
from octavo.trainer.data import tokens

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra octavo[data]")

WORDS = [
    "to be or not to be",
    "that is the question:",
    "whether 'tis nobler in the mind",
    "to suffer\nthe slings",
]


def trained(vocab: int = 300, special: tuple[str, ...] = ("<|begin|>", "<|endoftext|>")) -> Any:
    """A small byte-level BPE with a template that would put <|begin|> before every text."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(special),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(WORDS, trainer)
    if "<|begin|>" in special:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single="<|begin|> $A", special_tokens=[("<|begin|>", tokenizer.token_to_id("<|begin|>"))]
        )
    return tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A tokenizer.json that asks for truncation and padding as well."""
    made = trained()
    made.enable_truncation(4)
    made.enable_padding(length=9)
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """JSONL of eighty short documents, all different."""
    path = tmp_path / "text.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"{WORDS[n % 4]} {n}"}) for n in range(80)))
    return path


def test_documents_are_packed_whole_between_ends_of_text(tokenizer: Path, lines: Path) -> None:
    corpus = data.load(lines, 16, tokenizer)
    end = corpus.end_of_text
    assert corpus.train.dtype == corpus.validation.dtype == np.uint16
    assert end == trained().token_to_id("<|endoftext|>")
    texts = [f"{WORDS[n % 4]} {n}" for n in range(80)]
    found = [_documents(part, end) for part in (corpus.train, corpus.validation)]
    assert sorted(found[0] + found[1]) == sorted(texts)
    assert found[0] == [text for text in texts if text not in found[1]]
    assert 4 <= len(found[1]) <= 8
    assert (corpus.documents, corpus.files, corpus.bytes) == (80, 1, sum(map(len, texts)))
    assert (corpus.tokenizer, corpus.vocab_size) == (str(tokenizer), trained().get_vocab_size())


def _documents(part: np.ndarray, end: int | None) -> list[str]:
    """The texts in ``part``, each of which ends with ``end``."""
    assert part[-1] == end
    pieces = np.split(part, np.flatnonzero(part == end) + 1)[:-1]
    return [trained().decode(piece[:-1].tolist(), skip_special_tokens=False) for piece in pieces]


def test_a_folder_with_a_tokenizer_is_enough(tokenizer: Path, lines: Path) -> None:
    assert data.load(lines, 16, tokenizer.parent).sha256 == data.load(lines, 16, tokenizer).sha256


def test_long_documents_and_many_short_ones_are_tokenized_in_parts(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "PIECE", 40)
    monkeypatch.setattr(tokens, "BATCH", 100)
    monkeypatch.setattr(corpus_module, "BLOCK", 64)
    whole = "\n".join(WORDS * 20)
    documents = [whole, "x" * 500, "a " * 300, *WORDS, "\n".join(["y" * 40] * 2) + "\n"]
    path = tmp_path / "text.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in documents))
    corpus = data.load(path, 8, tokenizer)
    both = _documents(corpus.train, corpus.end_of_text) + _documents(corpus.validation, corpus.end_of_text)
    assert sorted(both) == sorted(documents)
    # Cut after lines, the tokens are those of the text in one piece.
    once = trained().encode(whole, add_special_tokens=False).ids
    assert once in [piece[:-1].tolist() for piece in np.split(corpus.train, _after_ends(corpus))]


def _after_ends(corpus: data.Corpus) -> np.ndarray:
    return np.flatnonzero(corpus.train == corpus.end_of_text) + 1


def test_a_tokenizer_without_an_end_joins_documents(tmp_path: Path, lines: Path) -> None:
    trained(special=()).save(str(tmp_path / "tokenizer.json"))
    corpus = data.load(lines, 16, tmp_path)
    assert corpus.end_of_text is None
    assert trained(special=()).decode(corpus.train.tolist()).startswith("to be or not to be 0that is")


@pytest.mark.parametrize("name", ["<|end_of_text|>", "</s>", "<｜end▁of▁sentence｜>", "<eos>"])
def test_ends_of_text_are_known_by_their_usual_names(name: str, tmp_path: Path) -> None:
    made = trained(special=("<pad>", name))
    made.save(str(tmp_path / "tokenizer.json"))
    assert data.read_tokenizer(tmp_path).end_of_text == made.token_to_id(name) == 1


def test_numbers_of_a_large_vocabulary_are_kept(tmp_path: Path, lines: Path) -> None:
    made = trained()
    made.add_tokens([f"<{n}>" for n in range(70_000)])
    made.save(str(tmp_path / "tokenizer.json"))
    lines.write_text("\n".join(json.dumps({"text": f"<{n}>"}) for n in range(69_000, 69_040)))
    corpus = data.load(lines, 4, tmp_path)
    assert corpus.train.dtype == np.uint32
    assert corpus.train.max() > 2**16
    inputs, _ = data.Batches(corpus.train, 4, 8, seed=0)(0)
    assert inputs.max() > 2**16


def test_a_vocabulary_larger_than_the_model_is_refused_before_the_text_is_read(tokenizer: Path) -> None:
    size = trained().get_vocab_size()
    with pytest.raises(
        UserError, match=rf"has {size} tokens but the model's vocabulary is {size - 1}: choose"
    ):
        data.load(Path("no such text"), 8, tokenizer, model_vocab=size - 1)
    with pytest.raises(UserError, match="does not exist"):
        data.load(Path("no such text"), 8, tokenizer, model_vocab=size)
    with pytest.raises(UserError, match=r"\(bytes\) has 256 tokens but the model's vocabulary is 255"):
        data.load(None, 8, model_vocab=255)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"cannot read the tokenizer '.*tokenizer.json' \(No such file"),
        (b"\x80sentencepiece", "is not JSON: give the tokenizer.json of a Hugging Face model"),
        (b"{}", "is JSON but no tokenizer, it has no 'model'"),
        (b"[1]", "is JSON but no tokenizer, it has no 'model'"),
        (b'{"model": {"type": "BPE"}}', r"is no tokenizer that can be read \(.*\): give the tokenizer.json"),
    ],
)
def test_what_is_no_tokenizer_is_refused(content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        data.load(None, 8, tmp_path)
    assert "\n" not in str(caught.value)


def test_a_missing_library_is_named(tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"pip install 'octavo\[data\]'"):
        data.load(None, 8, tokenizer)


def test_text_that_is_not_utf8_is_refused_with_a_tokenizer_alone(tokenizer: Path, tmp_path: Path) -> None:
    path = tmp_path / "latin1.txt"
    path.write_bytes("für und wider ".encode("latin-1") * 20)
    with pytest.raises(
        UserError, match=r"latin1.txt' is not UTF-8 \(at byte 2\): convert it, or train on bytes"
    ):
        data.load(path, 8, tokenizer)
    assert data.load(path, 8).train[1] == 0xFC


def test_a_text_of_too_few_tokens_is_refused(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("to be or not to be")
    with pytest.raises(UserError, match=r"short.txt' has \d+ tokens but --seq-len 30 needs at least 62"):
        data.load(tmp_path / "short.txt", 30, tokenizer)
