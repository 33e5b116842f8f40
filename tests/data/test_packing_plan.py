"""Which samples share a row, and which ranks take a micro-batch."""

from __future__ import annotations

import random
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram.data.orders.balance import balanced
from tangram.data.orders.packing import knapsack, sequential


def test_the_example_of_trls_best_fit_decreasing() -> None:
    """tests/test_data_utils.py of huggingface/trl, TestPackDatasetBfd.test_simple: lengths 3, 4, 1 in rows of 4 are {4} and {3, 1}."""
    assert sorted(knapsack([3, 4, 1], 4)) == [[0, 2], [1]]


def test_the_largest_go_first_each_into_the_fullest_row_that_holds_it() -> None:
    """By hand: 7, 6 and 5 open rows; 4 goes to 6 (fullest with room), the first 3 to 7, the second to 5."""
    assert knapsack([3, 5, 7, 4, 6, 3], 10) == [[0, 2], [1, 5], [3, 4]]


def test_ties_go_to_the_earlier_item_and_the_older_row() -> None:
    assert knapsack([5, 5, 5, 5], 10) == [[0, 1], [2, 3]]
    assert knapsack([6, 6, 2, 2, 2], 10) == [[0, 2, 3], [1, 4]]


def test_in_order_a_sample_that_does_not_fit_begins_the_next_row() -> None:
    """By hand: 3 + 4, then 5 does not fit, although 2 would have."""
    assert sequential([3, 4, 5, 2, 3, 1], 8) == [[0, 1], [2, 3], [4, 5]]
    assert sequential([8, 8], 8) == [[0], [1]]
    assert sequential([], 8) == knapsack([], 8) == []


SIZES = st.lists(st.integers(1, 50), max_size=60)


@settings(max_examples=150, deadline=None)
@given(SIZES, st.integers(50, 120), st.sampled_from([knapsack, sequential]))
def test_every_item_stands_in_one_row_and_no_row_overflows(sizes: list[int], capacity: int, packer: object) -> None:
    rows = packer(sizes, capacity)  # type: ignore[operator]
    assert sorted(item for row in rows for item in row) == list(range(len(sizes)))
    assert all(row == sorted(row) and 1 <= sum(sizes[item] for item in row) <= capacity for row in rows)
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.integers(0, 2**32))
def test_the_knapsack_stays_within_the_known_bound(full: int, seed: int) -> None:
    """Best fit decreasing takes at most 11/9 of the fewest rows possible, plus 4 (Johnson et al., SIAM J. Comput. 3, 1974). Cutting ``full`` whole
    rows into pieces gives a problem whose fewest rows are known."""
    draw, sizes = random.Random(seed), []
    for _ in range(full):
        cuts = sorted(draw.sample(range(1, 100), draw.randint(0, 6)))
        sizes += [end - start for start, end in zip([0, *cuts], [*cuts, 100], strict=True)]
    draw.shuffle(sizes)
    assert full <= len(knapsack(sizes, 100)) <= 11 / 9 * full + 4


def test_dealing_puts_the_dearest_first_on_the_least_loaded_rank() -> None:
    """By hand: 9 | 8, then 7 to the second, 2 to the first, which is full at two each."""
    assert balanced([9, 7, 2, 8], 2) == [[0, 2], [1, 3]]
    assert balanced([9, 8, 7, 6, 3, 1], 2) == [[0, 3, 4], [1, 2, 5]], "18 and 16, in turn 19 and 15"


def test_where_that_is_worse_than_dealing_in_turn_it_is_not_done() -> None:
    """By hand: 3, 3, 2, 2, 2 dearest first is 7 and 5, in turn 3 + 3 and 2 + 2 + 2."""
    assert balanced([3, 2, 3, 2, 0, 2], 2) == [[0, 2, 4], [1, 3, 5]]


def largest_over_mean(costs: list[int], shares: list[list[int]]) -> float:
    return max(sum(costs[item] for item in share) for share in shares) * len(shares) / sum(costs)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 2**32))
def test_dealing_by_cost_is_never_worse_than_in_turn(ranks: int, each: int, seed: int) -> None:
    costs = [random.Random(seed + item).randint(1, 4096) for item in range(ranks * each)]
    shares = balanced(costs, ranks)
    assert sorted(item for share in shares for item in share) == list(range(len(costs)))
    assert all(len(share) == each and share == sorted(share) for share in shares)
    in_turn = [list(range(rank, len(costs), ranks)) for rank in range(ranks)]
    assert largest_over_mean(costs, shares) <= largest_over_mean(costs, in_turn)


@pytest.mark.parametrize(("ranks", "in_turn", "dealt"), [(4, 1.5, 1.06), (8, 1.8, 1.06)])
def test_dealing_by_cost_evens_out_a_skewed_batch(ranks: int, in_turn: float, dealt: float) -> None:
    """A sample in ten is a video of 20 times the patches of a picture, as in a mixture of both; 16 micro-batches for each rank. The numbers are the
    largest rank's patches over the mean, averaged over 50 global batches."""
    draw = random.Random(0)
    before, after = [], []
    for _ in range(50):
        costs = [draw.randint(200, 1000) * (20 if draw.random() < 0.1 else 1) for _ in range(ranks * 16)]
        before.append(largest_over_mean(costs, [list(range(rank, len(costs), ranks)) for rank in range(ranks)]))
        after.append(largest_over_mean(costs, balanced(costs, ranks)))
    print(f"{ranks} ranks: in turn {mean(before):.3f}, at most {max(before):.3f}; dealt {mean(after):.3f}, at most {max(after):.3f}")
    assert mean(before) > in_turn and mean(after) < dealt
