"""Text to tokens: bytes, or a Hugging Face ``tokenizer.json``.

Both turn batches of documents into arrays of the smallest unsigned type that holds the vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from octavo.errors import UserError
from octavo.trainer.data.documents import Document

VOCAB_SIZE = 256
"""Of bytes."""

END_OF_TEXT = (
    "<|end_of_text|>",
    "<|endoftext|>",
    "</s>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<eos>",
    "[EOS]",
    "<|im_end|>",
)
"""Names of the token that ends a document, as Llama 3, GPT-2 and Qwen, Llama 2 and Mistral, DeepSeek, Gemma
and others call it; the first that a tokenizer has is taken."""

PIECE = 2**20
"""Characters after which a longer document is cut, at the next line's end where one is near: tokenizers slow
down and grow on very long texts."""
BATCH = 2**22
"""Characters that are tokenized at once."""


class Tokens(Protocol):
    """Turns documents into tokens."""

    name: str
    vocab_size: int
    end_of_text: int | None
    """Token that stands after every document, None where there is none."""

    def encode(self, documents: Iterable[Document]) -> Iterator[np.ndarray]:
        """The tokens of each document, in order, one array of unsigned integers for each."""
        ...


class Bytes:
    """A token is a byte. Documents have no separator of their own, so each one ends with a line's end."""

    name = "bytes"
    vocab_size = VOCAB_SIZE
    end_of_text: int | None = None

    def encode(self, documents: Iterable[Document]) -> Iterator[np.ndarray]:
        """uint8 arrays; a line's end is added where a document has none and another follows."""
        before: bytes | None = None
        for document in documents:
            if before is not None:
                yield np.frombuffer(before if before.endswith(b"\n") else before + b"\n", dtype=np.uint8)
            before = document.text
        if before is not None:
            yield np.frombuffer(before, dtype=np.uint8)


class TokenizerFile:
    """A Hugging Face ``tokenizer.json``; each document ends with ``end_of_text`` where the tokenizer has one.

    No other special token is added: a template that puts one before every text is not applied, nor are the
    file's truncation and padding.
    """

    def __init__(self, tokenizer: Any, name: str) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.name = name
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        found = (tokenizer.token_to_id(token) for token in END_OF_TEXT)
        self.end_of_text: int | None = next((number for number in found if number is not None), None)
        self._tokenizer = tokenizer
        self._dtype = np.uint16 if self.vocab_size <= 2**16 else np.uint32

    def encode(self, documents: Iterable[Document]) -> Iterator[np.ndarray]:
        """uint16 arrays, or uint32 for vocabularies beyond 65,536.

        Raises:
            UserError: a document is not UTF-8.
        """
        tail = np.array([] if self.end_of_text is None else [self.end_of_text], dtype=self._dtype)
        parts: list[np.ndarray] = []
        for pieces in _batches(_pieces(documents)):
            encodings = self._tokenizer.encode_batch_fast([t for t, _ in pieces], add_special_tokens=False)
            for encoding, (_, ends) in zip(encodings, pieces, strict=True):
                parts.append(np.array(encoding.ids, dtype=self._dtype))
                if ends:
                    yield np.concatenate([*parts, tail])
                    parts = []


def read_tokenizer(path: Path | None) -> Tokens:
    """The tokenizer in ``path``, a ``tokenizer.json`` or a folder that holds one; bytes for None.

    Raises:
        UserError: there is no such file, it is no ``tokenizer.json``, or ``tokenizers`` is not installed.
    """
    if path is None:
        return Bytes()
    file = path / "tokenizer.json" if path.is_dir() else path
    remedy = "give the tokenizer.json of a Hugging Face model"
    try:
        content = file.read_text(encoding="utf-8")
        described = json.loads(content)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"cannot read the tokenizer {str(file)!r} ({reason}): {remedy}") from None
    except (ValueError, RecursionError):
        raise UserError(f"the tokenizer {str(file)!r} is not JSON: {remedy}") from None
    if not (isinstance(described, dict) and isinstance(described.get("model"), dict)):
        raise UserError(f"{str(file)!r} is JSON but no tokenizer, it has no 'model': {remedy}")
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UserError(
            "reading a tokenizer.json needs the package tokenizers: pip install 'octavo[data]'"
        ) from None
    try:
        tokenizer = Tokenizer.from_str(content)
    except Exception as error:  # the library raises Exception itself for a description it does not know
        raise UserError(f"{str(file)!r} is no tokenizer that can be read ({error}): {remedy}") from None
    return TokenizerFile(tokenizer, str(file))


def tokenizer_files(path: Path | None) -> dict[str, Path]:
    """What a model takes along of the tokenizer in ``path``, by its name beside the model; none for bytes."""
    if path is None:
        return {}
    folder = path if path.is_dir() else path.parent
    beside = {name: folder / name for name in ("tokenizer_config.json", "special_tokens_map.json")}
    own = path / "tokenizer.json" if path.is_dir() else path
    return {"tokenizer.json": own} | {name: file for name, file in beside.items() if file.exists()}


def _pieces(documents: Iterable[Document]) -> Iterator[tuple[str, bool]]:
    """Text of every document in pieces, and whether a piece is a document's last."""
    for document in documents:
        try:
            text = document.text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{document.where} is not UTF-8 (at byte {error.start + 1}): convert it, or train on bytes "
                f"without a tokenizer"
            ) from None
        start = 0
        while start < len(text):
            end = _cut(text, start)
            yield text[start:end], end == len(text)
            start = end


def _cut(text: str, start: int) -> int:
    """Where the piece from ``start`` ends: after a line's end, else before a space, else in a word."""
    near, far = start + PIECE, start + 2 * PIECE
    if len(text) <= near:
        return len(text)
    line = text.find("\n", near, far) + 1
    space = text.find(" ", near, far)
    return line or (space if space > 0 else min(far, len(text)))


def _batches(pieces: Iterator[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    batch: list[tuple[str, bool]] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece[0])
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
