"""Drawn subsets, splits and interleaved datasets, against counts made by hand."""

from __future__ import annotations

from array import array
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram.data.mixing import BLOCK, interleave, read_shares, split, subset
from tangram.errors import DataError


def test_shares_hold_in_every_block() -> None:
    """70, 20 and 10 of each hundred, so the first is used up by the last of its 700 samples: in the tenth block."""
    numbers, indices = interleave([700, 1000, 1000], [0.7, 0.2, 0.1], 5, until_last=False)
    for start in range(0, 900, BLOCK):
        assert Counter(numbers[start : start + BLOCK]) == {0: 70, 1: 20, 2: 10}
    assert 900 < len(numbers) <= 1000 and numbers[-1] == 0 and indices[-1] == 699
    for number in range(3):
        mine = [index for index, drawn in zip(indices, numbers, strict=True) if drawn == number]
        assert mine == list(range(len(mine))), "a dataset's own order holds"


def test_over_ends_when_the_last_is_used_up_and_begins_the_others_again() -> None:
    """1,000 samples at a share of 0.1 take 10,000 in all, to a block; the 700 of the first are then seen 12 or 13 times."""
    numbers, indices = interleave([700, 1000], [0.9, 0.1], 5, until_last=True)
    assert 9_900 < len(numbers) <= 10_000 and (numbers[-1], indices[-1]) == (1, 999)
    counts = Counter(zip(numbers, indices, strict=True))
    assert {counts[1, index] for index in range(1000)} == {1}
    assert {counts[0, index] for index in range(700)} == {12, 13}
    assert abs(sum(counts[0, index] for index in range(700)) - 9000) <= BLOCK


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 400), st.integers(1, 50)), min_size=1, max_size=5), st.integers(0, 2**31), st.booleans())
def test_no_share_is_ever_off_by_more_than_a_block(datasets: list[tuple[int, int]], seed: int, until_last: bool) -> None:
    lengths, weights = [length for length, _ in datasets], [weight for _, weight in datasets]
    shares = [weight / sum(weights) for weight in weights]
    numbers, indices = interleave(lengths, shares, seed, until_last=until_last)
    counts = [0] * len(lengths)
    for place, number in enumerate(numbers, 1):
        assert indices[place - 1] == counts[number] % lengths[number]
        counts[number] += 1
        off = max(abs(count - share * place) for count, share in zip(counts, shares, strict=True))
        assert off <= BLOCK
        assert place % BLOCK or off < 2
    used_up = [count >= length for count, length in zip(counts, lengths, strict=True)]
    assert all(used_up) if until_last else sum(used_up) == 1


def test_the_order_is_shuffled_by_the_seed_and_recorded() -> None:
    """Recorded once: a change here would send every resumed run through its data in another order."""
    numbers = [list(interleave([50, 50], [0.5, 0.5], seed, until_last=False)[0][:20]) for seed in (1, 1, 2)]
    assert numbers[0] == numbers[1] != numbers[2]
    assert numbers[0] == [1, 0, 1, 1, 1, 1, 1, 0, 1, 0, 1, 0, 1, 0, 1, 1, 1, 0, 1, 0]
    assert split(8, 0.25, 42) == (array("q", [0, 2, 3, 4, 6, 7]), array("q", [1, 5]))
    assert list(subset(8, 3, 42, 0)) == [3, 5, 7] and list(subset(8, 3, 42, 1)) != [3, 5, 7]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0.7,0.2", "the shares must be above 0 and sum to 1, not to 0.9"),
        ("0.5", "1 shares but dataset names 2 datasets"),
        ("1.5,-0.5", "the shares must be above 0"),
        ("1,0", "the shares must be above 0"),
        ("nan,1", "the shares must be above 0"),
        ("half,half", "not numbers separated by commas"),
    ],
)
def test_shares_that_cannot_be_meant(text: str, message: str) -> None:
    with pytest.raises(DataError, match=f"basic_parameters.interleave_probs '{text}': .*{message}"):
        read_shares(text, 2)


def test_shares_are_equal_where_none_are_given() -> None:
    assert read_shares(None, 4) == [0.25] * 4
    assert read_shares("0.7, 0.3", 2) == [0.7, 0.3]


def test_mixtures_that_cannot_be_made() -> None:
    with pytest.raises(DataError, match="dataset 1 of 2 is empty: 0 samples"):
        interleave([3, 0], [0.5, 0.5], 0, until_last=True)
    with pytest.raises(DataError, match="to use up every dataset takes 1000000000000 samples; raise the smallest share"):
        interleave([10, 1_000_000], [1 - 1e-6, 1e-6], 0, until_last=True)


def test_the_part_set_aside_is_rounded_up_as_a_decimal() -> None:
    """0.07 * 100 is 7.000000000000001 in binary; 7 are meant."""
    for total, rate, count in ((100, 0.07, 7), (11, 0.1, 2), (2, 0.5, 1), (1000, 0.001, 1), (1001, 0.001, 2)):
        train, valid = split(total, rate, 3)
        assert len(valid) == count
        assert sorted([*train, *valid]) == list(range(total)) and list(train) == sorted(train) and list(valid) == sorted(valid)


def test_a_subset_is_drawn_from_all_of_the_dataset() -> None:
    drawn = subset(10_000, 100, 1, 0)
    assert list(drawn) == sorted(set(drawn)) and len(drawn) == 100
    assert 3 < sum(index < 1000 for index in drawn) < 25 and max(drawn) > 9000
