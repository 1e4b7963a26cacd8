"""Tensor and pipeline parallelism of converted models."""

from __future__ import annotations

import parallel_ranks
import pytest
import ranks
from small_models import batch

RECIPES = ["bf16", "tensorwise", "rowwise", "blockwise", "mxfp8"]


@pytest.mark.parametrize("sequence", [False, True])
def test_tensor_parallel_decoder_is_close_to_one_process(sequence: bool) -> None:
    seen = ranks.run(2, parallel_ranks.decoder_is_close, RECIPES, sequence)[0]
    for recipe, (distance, quality) in seen.items():
        assert distance < (1e-6 if recipe == "bf16" else 1e-3), (recipe, distance)
        assert quality > (90 if recipe == "bf16" else 12), (recipe, quality)


@pytest.mark.parametrize("recipe", ["bf16", "rowwise", "blockwise"])
def test_every_placement_of_a_layer(recipe: str) -> None:
    ranks.run(2, parallel_ranks.layer_placements, recipe)


def test_uneven_shards_of_a_layer() -> None:
    ranks.run(3, parallel_ranks.layer_placements, "bf16")


def test_a_plain_input_to_a_sharded_layer_is_refused() -> None:
    message = ranks.run(2, parallel_ranks.layers_refuse_mixtures)[0]
    assert "parallelize_module" in message


def test_pending_sums_are_reduced_before_they_are_quantized() -> None:
    ranks.run(2, parallel_ranks.pending_sums_are_reduced_first)


def test_tensor_parallel_within_fsdp_gathers_in_8_bits() -> None:
    ranks.run(4, parallel_ranks.with_sharded_data, "tensorwise")


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_a_pipeline_of_two_stages_trains_as_none(recipe: str) -> None:
    ranks.run(2, parallel_ranks.pipeline_is_equal, recipe, batch)
