"""Stacked experts, worked by hand: 2 experts, hidden 2, expert width 2, tensor-parallel 2, expert-parallel 2."""

from __future__ import annotations

import pytest

from tangram.errors import PlacementError
from tangram.placement.blocks import Block, place
from tangram.placement.proof import distinct_elements, prove_table
from tangram.placement.table import PackedGatedSplit, Rule, Shape, Source, Split
from tangram.placement.topology import Topology

EXPERT = "layers.{i}.experts.{e}"
TABLE = [
    Rule(f"{EXPERT}.fc1", (Source("gate_up", (2, 2, 4), stacked=True),), PackedGatedSplit(), "text", "expert"),
    Rule(f"{EXPERT}.fc2", (Source("down", (2, 2, 2), stacked=True),), Split(1), "text", "expert"),
]
SPLIT = Topology.build(vision_layers=0, text_layers=1, tensor=2, expert=2)


def number(shape: Shape, index: tuple[int, ...]) -> int:
    """Position of an element in the row-major order of its tensor."""
    total = 0
    for size, at in zip(shape, index, strict=True):
        total = total * size + at
    return total


def elements(name: str, ep_rank: int, tp_rank: int) -> list[list[int]]:
    """A local parameter, each element given as the number of the canonical element that it equals."""
    layout = place(TABLE, SPLIT, tp_rank, SPLIT.chunk(0), ep_rank).tensors[f"layers.0.experts.0.{name}"]
    full = layout.sources[0].shape
    local = [[-1] * layout.shape[1] for _ in range(layout.shape[0])]
    for block in layout.blocks:
        expert, first_in, first_out = block.canonical_start
        for row in range(block.shape[0]):
            for column in range(block.shape[1]):
                local[block.local_start[0] + row][block.local_start[1] + column] = number(full, (expert, first_in + column, first_out + row))
    return local


def test_gate_and_up_of_every_rank() -> None:
    """Expert 0 is [[0 1 | 2 3], [4 5 | 6 7]], rows in, columns gate | up; expert 1 the same plus 8. A rank's rows are its gate, then its up."""
    assert elements("fc1", ep_rank=0, tp_rank=0) == [[0, 4], [2, 6]]
    assert elements("fc1", ep_rank=0, tp_rank=1) == [[1, 5], [3, 7]]
    assert elements("fc1", ep_rank=1, tp_rank=0) == [[8, 12], [10, 14]]
    assert elements("fc1", ep_rank=1, tp_rank=1) == [[9, 13], [11, 15]]


def test_down_of_every_rank() -> None:
    """Expert 0 is [[0 1], [2 3]], rows in, columns out; a rank holds its part of the rows in, as a column."""
    assert elements("fc2", ep_rank=0, tp_rank=0) == [[0], [1]]
    assert elements("fc2", ep_rank=0, tp_rank=1) == [[2], [3]]
    assert elements("fc2", ep_rank=1, tp_rank=0) == [[4], [5]]
    assert elements("fc2", ep_rank=1, tp_rank=1) == [[6], [7]]


def test_a_rank_numbers_its_experts_from_zero() -> None:
    whole = Topology.build(vision_layers=0, text_layers=1)
    names = [set(place(TABLE, split, 0, split.chunk(0), rank).tensors) for split, rank in ((SPLIT, 0), (SPLIT, 1), (whole, 0))]
    one = {"layers.0.experts.0.fc1", "layers.0.experts.0.fc2"}
    assert names == [one, one, one | {"layers.0.experts.1.fc1", "layers.0.experts.1.fc2"}]


def test_every_element_is_held_once() -> None:
    prove_table(TABLE, SPLIT)
    placements = [place(TABLE, SPLIT, tp, SPLIT.chunk(0), ep) for tp in range(2) for ep in range(2)]
    assert distinct_elements(placements) == sum(block.numel for placement in placements for block in placement.blocks) == 16 + 8


@pytest.mark.parametrize(
    ("block", "start", "shape", "canonical_start", "canonical_shape"),
    [
        # Rows 1..2 and columns 2..4 of a local [4, 6] that is expert 3 from (in 10, out 20) on: local rows are out, local columns in.
        (Block("w", (0, 0), "s", (3, 10, 20), (4, 6), True), (1, 2), (2, 3), (3, 12, 21), (1, 3, 2)),
        # The same block lower down in its parameter: only the distance to its own start counts.
        (Block("w", (8, 1), "s", (3, 10, 20), (4, 6), True), (9, 3), (2, 3), (3, 12, 21), (1, 3, 2)),
        (Block("w", (0, 0), "s", (10, 20), (4, 6)), (1, 2), (2, 3), (11, 22), (2, 3)),
    ],
)
def test_part_of_a_block(block: Block, start: Shape, shape: Shape, canonical_start: Shape, canonical_shape: Shape) -> None:
    part = block.part(start, shape)
    assert (part.local_start, part.shape) == (start, shape)
    assert (part.canonical_start, part.canonical_shape, part.stacked) == (canonical_start, canonical_shape, block.stacked)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ({"expert": 4}, "gate_up: 2 experts are not divisible by expert-parallel size 4; choose a size that divides it"),
        ({"tensor": 4}, "gate_up: feed-forward size 2 is not divisible by tensor-parallel size 4; choose a size that divides it"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(split: dict[str, int], message: str) -> None:
    topology = Topology.build(vision_layers=0, text_layers=1, **split)
    with pytest.raises(PlacementError, match=message):
        place(TABLE, topology, 0, topology.chunk(0))
