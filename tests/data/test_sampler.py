from __future__ import annotations

import pytest

from tangram.data.sampler import PADDING, GlobalOrder
from tangram.errors import DataError


def ids(order: GlobalOrder, start: int, count: int) -> list[int]:
    return [sample for _, sample in order.batch(start, count)]


def test_file_order_without_shuffling() -> None:
    assert GlobalOrder(5, 2, shuffle=False, drop_last=False).batch(0, 7) == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 0), (1, 1)]


def test_each_epoch_is_its_own_permutation_of_all_samples() -> None:
    order = GlobalOrder(10, 2, seed=3, shuffle=True)
    first, second = ids(order, 0, 10), ids(order, 10, 10)
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second and first != list(range(10))


def test_the_seed_decides_the_order_and_nothing_else() -> None:
    import random

    import numpy as np
    import torch

    want = ids(GlobalOrder(50, 5, seed=1, shuffle=True), 0, 100)
    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    state = torch.get_rng_state()
    assert ids(GlobalOrder(50, 5, seed=1, shuffle=True), 0, 100) == want
    assert torch.equal(torch.get_rng_state(), state)
    assert ids(GlobalOrder(50, 5, seed=2, shuffle=True), 0, 100) != want


def test_the_order_of_a_seed_never_changes() -> None:
    """Recorded once: a change here would send every resumed run through its data in another order."""
    assert ids(GlobalOrder(8, 1, seed=42, shuffle=True), 0, 16) == [7, 1, 6, 4, 3, 5, 0, 2, 4, 5, 3, 0, 2, 7, 1, 6]


@pytest.mark.parametrize("shuffle", [False, True])
def test_data_parallel_ranks_take_disjoint_slices_of_the_same_step(shuffle: bool) -> None:
    order = GlobalOrder(10, 4, seed=0, shuffle=shuffle, drop_last=False)
    for step in range(6):
        one = order.step(step, 1, 0, 1)
        two = [order.step(step, 1, rank, 2) for rank in range(2)]
        assert sorted(m[0] for m in one) == sorted(m[0] for rank in two for m in rank)
        assert two[0] == one[0::2] and two[1] == one[1::2]


def test_union_over_ranks_covers_every_sample_once_per_epoch() -> None:
    order = GlobalOrder(10, 2, seed=5, shuffle=True)
    seen = [sample for step in range(5) for rank in range(2) for m in order.step(step, 1, rank, 2) for row in m for _, sample in row]
    assert sorted(seen) == list(range(10))


def test_resume_at_another_data_parallel_size_repeats_and_skips_nothing() -> None:
    whole = GlobalOrder(10, 4, seed=11, shuffle=True, drop_last=False)
    straight = [whole.batch(4 * step, 4) for step in range(5)]
    resumed = GlobalOrder(10, 4, seed=11, shuffle=True, drop_last=False)
    assert [resumed.batch(4 * step, 4) for step in range(2, 5)] == straight[2:]
    assert ids(GlobalOrder(12, 4, shuffle=False), 8, 4) == [8, 9, 10, 11]


def test_drop_last_leaves_out_the_tail_and_counts_it() -> None:
    order = GlobalOrder(11, 4, drop_last=True, repeat=False)
    assert (order.num_batches, order.dropped_per_epoch) == (2, 3)
    endless = GlobalOrder(11, 4, drop_last=True)
    assert ids(endless, 0, 12) == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]


def test_without_drop_last_the_tail_is_a_step_of_its_own_or_runs_on() -> None:
    one_pass = GlobalOrder(11, 4, drop_last=False, repeat=False)
    assert (one_pass.num_batches, one_pass.dropped_per_epoch) == (3, 0)
    assert ids(one_pass, 8, 4) == [8, 9, 10, PADDING]
    assert GlobalOrder(11, 4, drop_last=False).batch(8, 4) == [(0, 8), (0, 9), (0, 10), (1, 0)]


def test_too_few_samples_are_an_error_with_both_numbers() -> None:
    with pytest.raises(DataError, match="has 3 samples, too few for one global batch of 4.*at most 3"):
        GlobalOrder(3, 4)
    assert GlobalOrder(3, 4, drop_last=False, repeat=False).num_batches == 1
    with pytest.raises(DataError, match="0 samples"):
        GlobalOrder(0, 1)
