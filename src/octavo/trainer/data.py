"""Text as byte tokens: where it comes from, and which batch belongs to which step.

Tokens are bytes (vocabulary 256), so any text trains any model and no tokenizer is needed. The default text
is the source of the Python standard library: real, over ten megabytes, on every machine."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from octavo.trainer.config import UserError

VOCAB_SIZE = 256
# Tests come and go with a distribution's packaging, and installed packages differ from machine to machine.
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})
MAX_BYTES = 8 * 2**30
VALIDATION_SHARE = 0.05
MAX_VALIDATION_BYTES = 2**20


@dataclass(frozen=True)
class Corpus:
    """Text in memory, cut into a head to train on and a held-out tail.

    ``train`` and ``validation`` are uint8 arrays, ``source`` names the text, and ``sha256`` is that of all
    its bytes.
    """

    train: np.ndarray
    validation: np.ndarray
    source: str
    files: int
    sha256: str


def standard_library() -> list[Path]:
    """The standard library's own ``.py`` files, sorted, without tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    return [path for path in _walk(root, SKIPPED_FOLDERS) if path.suffix == ".py"]


def _walk(root: Path, skip: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Files under ``root``, sorted, without hidden files and folders and those folders named in ``skip``."""
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in skip)
        yield from (Path(folder, name) for name in sorted(files) if not name.startswith("."))


def _is_text(data: bytes) -> bool:
    """Whether ``data`` looks like text: no zero byte near its start, the rule git uses."""
    return b"\0" not in data[:8192]


def read_text(data: Path | None) -> tuple[bytes, str, int]:
    """All bytes of ``data``, a name for it, and how many files it was read from.

    Raises:
        UserError: there is no such file or folder, it cannot be read, holds no text, or is larger than 8 GiB.
    """
    if data is None:
        paths, source = standard_library(), "the Python standard library's source"
        if not paths:
            raise UserError(
                "the Python standard library's source is not on this machine: give a text with --data"
            )
    elif data.is_dir():
        paths, source = list(_walk(data)), str(data)
    elif data.exists():
        paths, source = [data], str(data)
    else:
        raise UserError(f"--data {str(data)!r} does not exist: give a text file or a folder of them")
    texts: list[bytes] = []
    size = files = 0
    for path in paths:
        try:
            size += path.stat().st_size
            if size > MAX_BYTES:
                raise UserError(
                    f"--data {source!r} is larger than 8 GiB, which are kept in memory: give a part of it"
                )
            text = path.read_bytes() if path.is_file() else b""
        except OSError as error:
            reason = error.strerror or str(error)
            raise UserError(
                f"cannot read {str(path)!r} ({reason}): make it readable or give other --data"
            ) from None
        if text and _is_text(text):
            if texts and not texts[-1].endswith(b"\n"):
                texts.append(b"\n")  # files are joined, but not their last and first lines
            texts.append(text)
            files += 1
    if not texts:
        raise UserError(
            f"--data {source!r} holds no text: give a text file, or a folder with text files in it"
        )
    return b"".join(texts), source, files


def load(data: Path | None, seq_len: int) -> Corpus:
    """Reads ``data`` and holds out its tail: 5%, at most 1 MiB, at least one sequence.

    Raises:
        UserError: as ``read_text``, and for text shorter than two sequences.
    """
    text, source, files = read_text(data)
    tokens = np.frombuffer(text, dtype=np.uint8)
    window = seq_len + 1
    if len(tokens) < 2 * window:
        raise UserError(
            f"{source!r} has {len(tokens)} bytes but --seq-len {seq_len} needs at least {2 * window}, one "
            f"sequence to train on and one to validate with: give more text or a smaller --seq-len"
        )
    held_out = max(window, min(int(len(tokens) * VALIDATION_SHARE), MAX_VALIDATION_BYTES))
    return Corpus(tokens[:-held_out], tokens[-held_out:], source, files, hashlib.sha256(text).hexdigest())


class Batches:
    """Which sequences each step trains on: every one once before any comes again, in an order from ``seed``.

    A batch depends on the seed and its step alone, so a job can begin at any step.
    """

    def __init__(self, tokens: np.ndarray, seq_len: int, batch_size: int, seed: int) -> None:
        self.tokens, self.seq_len, self.batch_size, self.seed = tokens, seq_len, batch_size, seed
        self.count = (
            len(tokens) - 1
        ) // seq_len  # sequences an epoch; the target of the last token is one beyond
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of ``step`` (from 0), int64 [batch_size, seq_len]; targets are one token on."""
        first = step * self.batch_size
        return _sequences(
            self.tokens, [self._sequence(first + i) for i in range(self.batch_size)], self.seq_len
        )

    def _sequence(self, number: int) -> int:
        epoch, position = divmod(number, self.count)
        if epoch != self._epoch:
            self._epoch, self._order = (
                epoch,
                np.random.default_rng([self.seed, epoch]).permutation(self.count),
            )
        return int(self._order[position])


def validation_batches(
    tokens: np.ndarray, seq_len: int, batch_size: int, limit: int = 16_384
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of evenly spread held-out sequences, about ``limit`` tokens in all, the same for every run."""
    count = (len(tokens) - 1) // seq_len
    wanted = min(count, max(batch_size, limit // seq_len))
    chosen = [i * count // wanted for i in range(wanted)]
    for first in range(0, wanted, batch_size):
        yield _sequences(tokens, chosen[first : first + batch_size], seq_len)


def _sequences(tokens: np.ndarray, numbers: list[int], seq_len: int) -> tuple[Tensor, Tensor]:
    windows = np.stack([tokens[n * seq_len : n * seq_len + seq_len + 1] for n in numbers])
    both = torch.from_numpy(windows.astype(np.int64))
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()
