"""The plain order and its tails."""

from __future__ import annotations

import pytest

from tangram.data.sampler import PADDING, GlobalOrder, Order, Place
from tangram.errors import DataError


def places(order: Order, batches: int) -> list[Place]:
    return [place for number in range(batches) for row in order.rows(number) for place in row]


def ids(order: Order, batches: int) -> list[int]:
    return [sample for _, sample in places(order, batches)]


def test_file_order_without_shuffling() -> None:
    assert places(GlobalOrder(4, 2), 3) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]


def test_each_epoch_is_its_own_permutation_of_all_samples() -> None:
    epochs = ids(GlobalOrder(10, 2, seed=3, shuffle=True), 10)
    first, second = epochs[:10], epochs[10:]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second and first != list(range(10))


def test_the_seed_decides_the_order_and_nothing_else() -> None:
    import random

    import numpy as np
    import torch

    want = ids(GlobalOrder(50, 5, seed=1, shuffle=True), 20)
    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    state = torch.get_rng_state()
    assert ids(GlobalOrder(50, 5, seed=1, shuffle=True), 20) == want
    assert torch.equal(torch.get_rng_state(), state)
    assert ids(GlobalOrder(50, 5, seed=2, shuffle=True), 20) != want


def test_the_order_of_a_seed_never_changes() -> None:
    """Recorded once: a change here would send every resumed run through its data in another order."""
    assert ids(GlobalOrder(8, 1, seed=42, shuffle=True), 16) == [7, 1, 6, 4, 3, 5, 0, 2, 4, 5, 3, 0, 2, 7, 1, 6]


@pytest.mark.parametrize("shuffle", [False, True])
def test_data_parallel_ranks_take_disjoint_slices_of_the_same_step(shuffle: bool) -> None:
    order = GlobalOrder(10, 4, seed=0, shuffle=shuffle, tail="continue")
    for step in range(6):
        one = order.step(step, 1, 0, 1)
        two = [order.step(step, 1, rank, 2) for rank in range(2)]
        assert sorted(m[0] for m in one) == sorted(m[0] for rank in two for m in rank)
        assert two[0] == one[0::2] and two[1] == one[1::2]


def test_union_over_ranks_covers_every_sample_once_per_epoch() -> None:
    """karpathy/llm.c 792: 10 samples, two ranks, global batch 2."""
    order = GlobalOrder(10, 2, seed=5, shuffle=True)
    seen = [sample for step in range(5) for rank in range(2) for m in order.step(step, 1, rank, 2) for row in m for _, sample in row]
    assert sorted(seen) == list(range(10))


def test_a_run_on_two_ranks_goes_on_at_one() -> None:
    """NVIDIA-NeMo/Megatron-Bridge PR 5637: saved at step 2 of global batch 4, the next ids are 8, 9, ... and none is repeated or missing."""
    first = [sample for step in range(2) for rank in range(2) for m in GlobalOrder(12, 4).step(step, 1, rank, 2) for row in m for _, sample in row]
    then = [sample for m in GlobalOrder(12, 4).step(2, 1, 0, 1) for row in m for _, sample in row]
    assert sorted(first) == list(range(8)) and then == [8, 9, 10, 11]


def test_tail_drop_leaves_out_the_tail_and_counts_it() -> None:
    """NVIDIA-NeMo/Megatron-Bridge PR 4926: 11 samples at global batch 4 are two steps, and 3 samples are dropped."""
    order = GlobalOrder(11, 4, endless=False)
    assert (order.num_batches, order.samples_per_epoch, order.dropped_per_epoch) == (2, 8, 3)
    assert ids(GlobalOrder(11, 4), 3) == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]


@pytest.mark.parametrize("endless", [False, True])
def test_tail_pad_is_a_step_of_its_own(endless: bool) -> None:
    """The same report: without dropping, three steps. PR 4943: the empty place is no real sample."""
    order = GlobalOrder(11, 4, tail="pad", endless=endless)
    assert (order.num_batches, order.samples_per_epoch, order.dropped_per_epoch) == (None if endless else 3, 11, 0)
    assert places(order, 3) == [(0, sample) for sample in range(11)] + [(0, PADDING)]
    assert order.rows(3) == ([((1, 0),), ((1, 1),), ((1, 2),), ((1, 3),)] if endless else [])
    assert ids(GlobalOrder(3, 4, tail="pad", endless=endless), 1) == [0, 1, 2, PADDING]


def test_tail_continue_runs_on_into_the_next_epochs() -> None:
    assert GlobalOrder(11, 4, tail="continue").rows(2) == [((0, 8),), ((0, 9),), ((0, 10),), ((1, 0),)]
    tiny = GlobalOrder(3, 8, tail="continue")
    assert places(tiny, 1) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1)]
    assert places(tiny, 2)[8:] == [(2, 2), (3, 0), (3, 1), (3, 2), (4, 0), (4, 1), (4, 2), (5, 0)]
    assert (tiny.num_batches, tiny.samples_per_epoch, tiny.dropped_per_epoch) == (None, 3, 0)


def test_tail_continue_is_the_same_sequence_at_any_global_batch_size() -> None:
    by_four, by_three = (GlobalOrder(10, size, seed=7, shuffle=True, tail="continue") for size in (4, 3))
    assert places(by_four, 9) == places(by_three, 12)


def test_too_few_samples_are_an_error_with_both_numbers() -> None:
    with pytest.raises(DataError, match="has 3 samples, too few for one global batch of 4.*at most 3, or set dataloader_param.tail to pad"):
        GlobalOrder(3, 4)
    with pytest.raises(DataError, match="0 samples"):
        GlobalOrder(0, 1, tail="pad")


def test_unequal_numbers_of_micro_batches_are_filled_up_with_empty_ones() -> None:
    steps = [GlobalOrder(8, 6).step(0, 4, rank, 4) for rank in range(4)]
    assert [[[sample for row in m for _, sample in row] for m in step] for step in steps] == [[[0, 1, 2, 3]], [[4, 5]], [[PADDING]], [[PADDING]]]
