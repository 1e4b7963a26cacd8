"""FSDP2 with converted models: sharded training computes what one process computes."""

from __future__ import annotations

import fsdp_ranks
import pytest
import ranks

import octavo

RECIPES = list(octavo.RECIPES)


def test_one_and_two_processes_are_bit_equal_in_every_recipe() -> None:
    ranks.run(2, fsdp_ranks.step_is_bit_equal, RECIPES, (2,))


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
def test_hybrid_sharding_is_bit_equal(sizes: tuple[int, int]) -> None:
    ranks.run(2, fsdp_ranks.step_is_bit_equal, ["tensorwise", "rowwise"], sizes)


def test_mixed_precision_is_bit_equal() -> None:
    ranks.run(2, fsdp_ranks.mixed_precision_is_bit_equal, RECIPES)


def test_twenty_steps_on_split_batches_stay_close() -> None:
    for recipe, gaps in ranks.run(2, fsdp_ranks.twenty_steps, ["tensorwise", "rowwise", "blockwise"])[
        0
    ].items():
        assert gaps[0] < 1e-3, (recipe, gaps)
        assert max(gaps) < 2e-2, (recipe, gaps)


@pytest.mark.case("B30")
def test_uneven_and_empty_shards_compute_what_one_process_computes() -> None:
    ranks.run(3, fsdp_ranks.uneven_and_empty_shards, RECIPES)


def test_accumulation_with_the_weight_cache_is_bit_equal() -> None:
    ranks.run(2, fsdp_ranks.accumulation_is_bit_equal, "rowwise")


def test_weights_that_stay_unsharded_are_quantized_once() -> None:
    for first, second in ranks.run(2, fsdp_ranks.unsharded_weights_are_quantized_once, "rowwise"):
        assert first == 28  # 14 layers, each direct and transposed
        assert second == 0
