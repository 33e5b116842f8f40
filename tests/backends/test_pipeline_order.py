"""Shapes and order of what pipeline stages send each other, by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tangram.backends.megatron.communicator import backward_receives, forward_receives
from tangram.backends.megatron.parallel import data_parallel_size, embedding_ranks
from tangram.errors import ConfigError
from tangram.models.payload import activation_shapes
from tangram.placement.topology import Topology

sys.path.insert(0, str(Path(__file__).parents[1] / "workers"))

from toy_vlm import toy_config

# Vision 8 wide merges 2 x 2 patches into tokens 16 wide; two images of 4 x 6 and 2 x 2 patches; 3 rows of 17 tokens.
BATCH = {"input_ids": torch.zeros(3, 17), "image_grid_thw": torch.tensor([[1, 4, 6], [1, 2, 2]])}
TEXT_ONLY = {"input_ids": torch.zeros(2, 31)}


def four_stages() -> Topology:
    return Topology.build(vision_layers=2, text_layers=4, vit_pp_layers=[1, 1, 0, 0], llm_pp_layers=[0, 0, 1, 3])


def test_shape_changes_where_vision_ends_and_where_text_begins() -> None:
    model = toy_config(tied=True)
    shapes = [activation_shapes(four_stages(), model, position, BATCH) for position in range(3)]
    assert shapes == [((28, 1, 8),), ((7, 1, 16),), ((17, 3, 16),)]


def test_text_only_micro_batch_carries_one_blank_cell() -> None:
    model = toy_config(tied=True)
    empty = {**TEXT_ONLY, "image_grid_thw": torch.zeros(0, 3, dtype=torch.int64)}
    for batch in (TEXT_ONLY, empty):
        shapes = [activation_shapes(four_stages(), model, position, batch) for position in range(3)]
        assert shapes == [((4, 1, 8),), ((1, 1, 16),), ((31, 2, 16),)]


def test_video_patches_count_over_time() -> None:
    """3 x 2 x 4 = 24 patches of a video; with 4 x 6 and 2 x 2 of images 52, which are 13 tokens."""
    video = {"input_ids": torch.zeros(1, 9), "video_grid_thw": torch.tensor([[3, 2, 4]])}
    assert activation_shapes(four_stages(), toy_config(tied=True), 0, video) == ((24, 1, 8),)
    both = {**BATCH, **video}
    shapes = [activation_shapes(four_stages(), toy_config(tied=True), position, both) for position in (0, 1)]
    assert shapes == [((52, 1, 8),), ((13, 1, 16),)]


def test_one_forward_one_backward_receives_in_micro_batch_order() -> None:
    topology = four_stages()
    assert list(forward_receives(topology, 0, 3)) == []
    assert list(forward_receives(topology, 2, 3)) == [(1, 0), (1, 1), (1, 2)]
    assert list(backward_receives(topology, 2, 3)) == [(2, 0), (2, 1), (2, 2)]
    assert list(backward_receives(topology, 3, 3)) == []


def test_interleaved_order_of_two_ranks_with_two_chunks() -> None:
    """Each rank runs micro-batches 0 1 of its first chunk, 0 1 of its second, then 2 3 likewise; gradients the other way round."""
    topology = Topology.build(vision_layers=2, text_layers=4, vit_pp_layers=[[1, 1], [0, 0]], llm_pp_layers=[[0, 1], [1, 2]])
    assert list(forward_receives(topology, 0, 4)) == [(1, 0), (1, 1), (1, 2), (1, 3)]
    assert list(forward_receives(topology, 1, 4)) == [(0, 0), (0, 1), (2, 0), (2, 1), (0, 2), (0, 3), (2, 2), (2, 3)]
    assert list(backward_receives(topology, 0, 4)) == [(2, 0), (2, 1), (0, 0), (0, 1), (2, 2), (2, 3), (0, 2), (0, 3)]
    assert list(backward_receives(topology, 1, 4)) == [(1, 0), (1, 1), (1, 2), (1, 3)]


def test_embedding_group_follows_the_text_decoder() -> None:
    assert embedding_ranks(four_stages(), [3, 5, 7, 9]) == [7, 9]
    late = Topology.build(vision_layers=2, text_layers=4, vit_pp_layers=[[2, 0], [0, 0]], llm_pp_layers=[[0, 1], [1, 2]])
    assert embedding_ranks(late, [0, 1]) == [1]


def test_experts_are_divided_over_copies_and_the_ranks_that_share_a_micro_batch() -> None:
    """CP 2 with experts over 4: two copies of 2 ranks at least."""
    shared = Topology.build(vision_layers=0, text_layers=1, context=2, expert=4)
    assert data_parallel_size(4, shared) == 2
    assert data_parallel_size(8, shared) == 4
    with pytest.raises(ConfigError, match="world size 6 makes 3 data-parallel x 2 context-parallel ranks, .* start a multiple of 4 processes"):
        data_parallel_size(6, shared)
