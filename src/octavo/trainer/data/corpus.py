"""A text as tokens in memory, cut into a part to train on and a part that is held out."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from octavo.errors import UserError
from octavo.trainer.data import documents
from octavo.trainer.data.documents import Document
from octavo.trainer.data.tokens import Tokens, read_tokenizer

VALIDATION_SHARE = 0.05
MAX_VALIDATION_TOKENS = 2**20
BLOCK = 2**24
"""Tokens that are gathered before they are joined: a document may be short, and an array costs 100 bytes."""


@dataclass(frozen=True)
class Corpus:
    """Text as tokens, a part to train on and a held-out part, each documents one after the other.

    ``train`` and ``validation`` are uint8 arrays of bytes, or uint16 or uint32 arrays of a tokenizer's tokens;
    ``source`` names the text, ``files`` and ``documents`` count what it was read from, and ``sha256`` is that
    of all tokens as little-endian numbers, in the order they were read. ``tokenizer`` is "bytes" or a path,
    ``vocab_size`` its vocabulary, and ``end_of_text`` the token after every document, if there is one.
    ``bytes`` is the size of the text, so that ``loss * tokens / bytes`` compares tokenizers.
    """

    train: np.ndarray
    validation: np.ndarray
    source: str
    files: int
    sha256: str
    documents: int = 1
    tokenizer: str = "bytes"
    vocab_size: int = 256
    end_of_text: int | None = None
    bytes: int = 0


def load(
    data: Path | None, seq_len: int, tokenizer: Path | None = None, *, model_vocab: int | None = None
) -> Corpus:
    """Reads ``data`` as tokens and holds a part out: about 5%, at most 2**20 tokens, at least one sequence.

    Args:
        data: a text file, a JSONL file (``.jsonl``, ``.jsonl.gz``) with a ``text`` in each line, or a folder
            with any of them in it; None means the Python standard library's source.
        seq_len: tokens of a sequence.
        tokenizer: a Hugging Face ``tokenizer.json`` or a folder that holds one; None means bytes.
        model_vocab: vocabulary of the model, to refuse a larger one before anything is read.

    Whole documents are held out, the same ones for every run on this text, so that what is validated with was
    never seen. Where there is one document, or none of them is short enough, the text's tail is held out.

    Raises:
        UserError: ``data`` or ``tokenizer`` cannot be read or is not what it should be, the tokenizer does not
            fit the model, or there is less text than two sequences.
    """
    encoder = read_tokenizer(tokenizer)
    if model_vocab is not None and encoder.vocab_size > model_vocab:
        raise UserError(
            f"the tokenizer ({encoder.name}) has {encoder.vocab_size} tokens but the model's vocabulary is "
            f"{model_vocab}: choose a model with a larger vocabulary or a smaller tokenizer"
        )
    source = documents.find(data)
    read = _Read()
    tokens, ends = _tokenize(encoder, read.through(documents.read(source)))
    if not len(ends):
        raise UserError(
            f"--data {source.name!r} holds no text: give a text file, or a folder with text files in it"
        )
    train, validation = _split(tokens, ends, seq_len, source.name, encoder.name)
    little_endian = tokens.astype(tokens.dtype.newbyteorder("<"), copy=False)
    return Corpus(
        train=train,
        validation=validation,
        source=source.name,
        files=len(read.files),
        sha256=hashlib.sha256(little_endian.data).hexdigest(),
        documents=len(ends),
        tokenizer=encoder.name,
        vocab_size=encoder.vocab_size,
        end_of_text=encoder.end_of_text,
        bytes=read.bytes,
    )


class _Read:
    """Counts what documents come by."""

    def __init__(self) -> None:
        self.files: set[Path] = set()
        self.bytes = 0

    def through(self, texts: Iterator[Document]) -> Iterator[Document]:
        for text in texts:
            self.files.add(text.path)
            self.bytes += len(text.text)
            yield text


def _tokenize(encoder: Tokens, texts: Iterator[Document]) -> tuple[np.ndarray, np.ndarray]:
    """All tokens, and where each document ends in them."""
    blocks: list[np.ndarray] = []
    waiting: list[np.ndarray] = []
    ends = array("q")
    total = joined = 0
    for part in encoder.encode(texts):
        waiting.append(part)
        total += len(part)
        ends.append(total)
        if total - joined >= BLOCK:
            blocks.append(np.concatenate(waiting))
            waiting, joined = [], total
    if waiting:
        blocks.append(np.concatenate(waiting))
    tokens = np.concatenate(blocks) if blocks else np.empty(0, dtype=np.uint8)
    return tokens, np.frombuffer(ends, dtype=np.int64) if ends else np.empty(0, dtype=np.int64)


def _split(
    tokens: np.ndarray, ends: np.ndarray, seq_len: int, source: str, tokenizer: str
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens to train on and held-out ones, each at least a sequence and the target of its last token."""
    window = seq_len + 1
    if len(tokens) < 2 * window:
        unit = "bytes" if tokenizer == "bytes" else "tokens"
        raise UserError(
            f"{source!r} has {len(tokens)} {unit} but --seq-len {seq_len} needs at least {2 * window}, one "
            f"sequence to train on and one to validate with: give more text or a smaller --seq-len"
        )
    wanted = max(window, min(int(len(tokens) * VALIDATION_SHARE), MAX_VALIDATION_TOKENS))
    held = _held_out(np.diff(ends, prepend=0), wanted, min(2 * wanted, len(tokens) - window))
    if not len(held):
        return tokens[:-wanted], tokens[-wanted:]
    starts = ends[held] - np.diff(ends, prepend=0)[held]
    inside = np.split(tokens, np.stack((starts, ends[held]), axis=1).flatten())
    return np.concatenate(inside[0::2]), np.concatenate(inside[1::2])


def _held_out(lengths: np.ndarray, wanted: int, most: int) -> np.ndarray:
    """Numbers of documents with ``wanted`` to ``most`` tokens together, sorted; none where none are such.

    Drawn with a seed of its own, so that jobs that differ in their seed are validated alike.
    """
    if len(lengths) < 2:
        return np.empty(0, dtype=np.int64)
    chosen: list[int] = []
    total = 0
    for number in np.random.default_rng(0).permutation(len(lengths)):
        if total + lengths[number] <= most:
            chosen.append(int(number))
            total += int(lengths[number])
        if total >= wanted:
            return np.array(sorted(chosen))
    return np.empty(0, dtype=np.int64)
