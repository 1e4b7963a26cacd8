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


@pytest.mark.case("B31")
@pytest.mark.parametrize(
    ("recipe", "hidden", "mixed", "count"),
    [
        ("tensorwise", 136, False, 14),
        ("tensorwise", 136, True, 14),
        ("rowwise_block_weight", 128, True, 14),
        ("blockwise", 128, True, 14),
        ("blockwise", 136, False, 10),  # joined blocks of gate and up straddle them: gathered in 32 bits
        ("rowwise", 136, False, 0),
    ],
)
def test_gathering_in_8_bits_changes_no_bit(recipe: str, hidden: int, mixed: bool, count: int) -> None:
    ranks.run(2, fsdp_ranks.gather_in_8_bits_is_bit_equal, recipe, hidden, mixed, count)


@pytest.mark.case("B30")
def test_uneven_and_empty_shards_gather_in_8_bits() -> None:
    ranks.run(3, fsdp_ranks.uneven_and_empty_shards, ["tensorwise", "blockwise"], True)


def test_gathering_in_8_bits_halves_the_bytes_and_joins_the_scales() -> None:
    plain = ranks.run(2, fsdp_ranks.gathered_bytes, "tensorwise", False)[0]
    prepared = ranks.run(2, fsdp_ranks.gathered_bytes, "tensorwise", True)[0]
    assert [name for name, _ in prepared].count("allreduce_") == 1
    assert [name for name, _ in plain].count("allreduce_") == 0
    saved = sum(n for name, n in plain if "allgather" in name) - sum(
        n for name, n in prepared if "allgather" in name
    )
    converted = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 136)
    assert saved == 2 * converted // 2  # a byte an element of a rank's half, forward and backward


def test_state_dicts_hold_plain_tensors() -> None:
    ranks.run(2, fsdp_ranks.state_dicts_hold_plain_tensors, "tensorwise")


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_scales_follow_every_write(recipe: str) -> None:
    ranks.run(2, fsdp_ranks.every_write_is_seen, recipe)
