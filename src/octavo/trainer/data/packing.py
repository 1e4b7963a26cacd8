"""Which sequences each step trains on, and those to validate with.

Tokens are packed: documents follow one another and are cut every ``seq_len`` tokens, so no token is padding and
a sequence may begin in the middle of a document. Attention crosses documents within a sequence, as in most
pretraining; a tokenizer's end-of-text token tells them apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor


class Batches:
    """Which sequences each step trains on: every one once before any comes again, in an order from ``seed``.

    A batch depends on the seed and its step alone, so a job can begin at any step and needs no saved position.
    In an epoch every token but the first is a target once; fewer than ``seq_len`` tokens at the end of the
    text, which fill no sequence, are left out.

    Args:
        tokens: one-dimensional array of unsigned integers, in memory or memory-mapped, longer than ``seq_len``.
    """

    def __init__(self, tokens: np.ndarray, seq_len: int, batch_size: int, seed: int) -> None:
        self.tokens, self.seq_len, self.batch_size, self.seed = tokens, seq_len, batch_size, seed
        self.count = (len(tokens) - 1) // seq_len
        """Sequences in an epoch; the target of the last token is one beyond."""
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
            order = np.random.default_rng([self.seed, epoch]).permutation(self.count)
            self._epoch, self._order = epoch, order
        return int(self._order[position])


def validation_batches(
    tokens: np.ndarray, seq_len: int, batch_size: int, limit: int | None = 16_384
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of held-out sequences, the same ones for every run and every ``batch_size``.

    Yields inputs and targets, int64 [rows, length]. Rows are ``batch_size`` but for the last batches, so the
    loss of the text is the batches' losses weighted by their tokens.

    Args:
        limit: about so many tokens in all, in whole sequences spread evenly over the text, one at least. With
            None, or where the text is not longer, every token but the first is a target once: a last batch
            holds the tokens that fill no sequence.
    """
    count = (len(tokens) - 1) // seq_len
    wanted = count if limit is None else min(count, max(1, limit // seq_len))
    chosen = [i * count // wanted for i in range(wanted)]
    for first in range(0, wanted, batch_size):
        yield _sequences(tokens, chosen[first : first + batch_size], seq_len)
    rest = tokens[count * seq_len :]
    if wanted == count and len(rest) > 1:
        yield _pairs(rest[None])


def _sequences(tokens: np.ndarray, numbers: Sequence[int], seq_len: int) -> tuple[Tensor, Tensor]:
    return _pairs(np.stack([tokens[n * seq_len : n * seq_len + seq_len + 1] for n in numbers]))


def _pairs(windows: np.ndarray) -> tuple[Tensor, Tensor]:
    """Inputs and targets [rows, length] of windows [rows, length + 1]."""
    both = torch.from_numpy(windows.astype(np.int64))
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()
