"""The routers' biases where several processes train on different tokens."""

from __future__ import annotations

import balance_ranks
import ranks


def test_biases_follow_the_tokens_of_all_processes() -> None:
    seen = ranks.run(2, balance_ranks.biases_of_own_tokens)
    assert seen[0] == seen[1] == balance_ranks.biases(balance_ranks.TOKENS)
    alone = [balance_ranks.biases(part) for part in balance_ranks.TOKENS.chunk(2)]
    assert alone[0] != alone[1]  # each by itself would have gone its own way
