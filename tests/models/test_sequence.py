"""Sequences divided over context-parallel and tensor-parallel ranks, by hand-worked examples."""

from __future__ import annotations

import pytest
import torch

from tangram.models.sequence import SequenceSplit


def ranks(length: int, context: int = 1, ring: int = 1, tensor: int = 1, unit: int = 1) -> list[SequenceSplit]:
    return [SequenceSplit(length, context, c, ring, tensor, t, unit) for c in range(context) for t in range(tensor)]


EXAMPLES = {
    "one rank": (ranks(5), 5, [[0, 1, 2, 3, 4]]),
    "tensor": (ranks(5, tensor=2), 6, [[0, 1, 2], [3, 4, 5]]),
    "ulysses": (ranks(7, context=4), 8, [[0, 1], [2, 3], [4, 5], [6, 7]]),
    "ring of 2": (ranks(8, context=2, ring=2), 8, [[0, 1, 6, 7], [2, 3, 4, 5]]),
    "ring of 2, padded": (ranks(5, context=2, ring=2), 8, [[0, 1, 6, 7], [2, 3, 4, 5]]),
    "ring of 3": (ranks(12, context=3, ring=3), 12, [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]),
    "ring of 2, ulysses of 2": (ranks(16, context=4, ring=2), 16, [[0, 1, 2, 3], [12, 13, 14, 15], [4, 5, 6, 7], [8, 9, 10, 11]]),
    "ring of 2, ulysses of 3": (ranks(11, context=6, ring=2), 12, [[0, 1], [2, 9], [10, 11], [3, 4], [5, 6], [7, 8]]),
    "tensor inside a ring": (ranks(8, context=2, ring=2, tensor=2), 8, [[0, 1], [6, 7], [2, 3], [4, 5]]),
    "tensor, in units of 4": (ranks(12, tensor=2, unit=4), 16, [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]]),
    "tensor inside ulysses": (ranks(10, context=2, tensor=3), 12, [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]),
}


@pytest.mark.parametrize("example", EXAMPLES)
def test_each_rank_holds_its_positions(example: str):
    splits, padded, expected = EXAMPLES[example]
    assert [split.padded for split in splits] == [padded] * len(splits)
    assert [split.positions().tolist() for split in splits] == expected
    assert sorted(position for part in expected for position in part) == list(range(padded))
    for split, part in zip(splits, expected, strict=True):
        assert split.local_length == len(part)
        start = split.context_rank * split.tensor
        assert split.context_positions().tolist() == [p for parts in expected[start : start + split.tensor] for p in parts]
        whole = split.pad(torch.arange(split.length)[:, None] * torch.tensor([1, 10]), 0, value=-1)
        assert split.take(whole, 0).tolist() == [[p, 10 * p] if p < split.length else [-1, -1] for p in part]


@pytest.mark.parametrize("example", EXAMPLES)
def test_gathered_parts_come_back_in_order_without_padding(example: str):
    splits, padded, _ = EXAMPLES[example]
    x = torch.arange(3 * padded).view(3, padded)
    for split in splits:
        first = [each for each in splits if each.tensor_rank == 0]
        gathered = torch.cat([each.take_context(x, 1) for each in first], dim=1)
        assert split.restore(gathered, 1).tolist() == x[:, : split.length].tolist()


def test_tokens_are_found_where_they_are():
    first, second = ranks(7, context=2, ring=2)
    wanted = torch.tensor([6, 2, 0, 5])
    here, local = first.context_local_of(wanted)
    assert (here.tolist(), local.tolist()) == ([True, False, True, False], [2, 0])
    here, local = second.context_local_of(wanted)
    assert (here.tolist(), local.tolist()) == ([False, True, False, True], [0, 3])
    found = [split.local_of(wanted) for split in ranks(7, context=2, ring=2, tensor=2)]
    assert [here.tolist().index(True) for here, _ in found] == [2, 0, 1, 3]
    assert [local.tolist() for _, local in found] == [[0], [0], [0], [1]]


def test_padding_goes_along_the_axis_that_is_asked_for():
    (split,) = [split for split in ranks(3, tensor=2) if split.tensor_rank == 1]
    x = torch.arange(6).view(1, 3, 2)
    assert split.pad(x, 1, value=9).tolist() == [[[0, 1], [2, 3], [4, 5], [9, 9]]]
    assert split.take(split.pad(x, -2), -2).tolist() == [[[4, 5], [0, 0]]]
    with pytest.raises(AssertionError, match="axis 0"):
        split.pad(x, 0)


def test_ranks_out_of_range_are_our_own_mistake():
    with pytest.raises(AssertionError, match="do not make 2 ring ranks"):
        SequenceSplit(8, context=3, ring=2)
    with pytest.raises(AssertionError, match="context rank 2 of 2"):
        SequenceSplit(8, context=2, context_rank=2)


def test_positions_are_divided_along_the_sequence_and_not_along_time_height_and_width():
    """NVIDIA-NeMo/Automodel#1482 cut the first axis. [3, b, s] of 3 x 2 rows that each count from 10 times their number."""
    table = torch.arange(7) + 10 * torch.arange(6).view(3, 2, 1)
    for ring, expected in ((1, ([0, 1, 2, 3], [4, 5, 6])), (2, ([0, 1, 6], [2, 3, 4, 5]))):
        for split, places in zip(ranks(7, context=2, ring=ring), expected, strict=True):
            taken = split.take_context(split.pad(table, -1), -1)
            assert taken.shape == (3, 2, 4) and taken[2, 1, : len(places)].tolist() == [50 + place for place in places]
            assert taken[..., : len(places)].tolist() == table[..., places].tolist()
