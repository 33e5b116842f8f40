"""Orders that group, pack, cut by tokens, balance and stream."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from tangram.config.data import Tail
from tangram.config.run import ParallelConfig, RunConfig
from tangram.data.orders.balance import BalancedOrder
from tangram.data.orders.budget import BudgetOrder
from tangram.data.orders.choice import streaming_order, training_order, validation_order
from tangram.data.orders.grouped import BucketOrder, LengthGroupedOrder
from tangram.data.orders.packed import PackedOrder
from tangram.data.orders.streaming import StreamingOrder
from tangram.data.sampler import PADDING, GlobalOrder, MicroBatch, Order, Place, Row
from tangram.data.sizes import SampleSizes
from tangram.errors import ConfigError, DataError


def sizes_of(tokens: list[int], patches: list[int] | None = None, shapes: list[int] | None = None) -> SampleSizes:
    nothing = [0] * len(tokens)
    return SampleSizes(np.array(tokens, dtype=np.int32), np.array(patches or nothing, dtype=np.int32), np.array(shapes or nothing, dtype=np.int64))


@cache
def random_sizes(count: int, seed: int, cutoff: int = 100, unusable: float = 0.0) -> SampleSizes:
    draw = random.Random(seed)
    tokens = [0 if draw.random() < unusable else draw.randint(1, cutoff) for _ in range(count)]
    return sizes_of(tokens, [draw.randint(0, 500) for _ in tokens], [draw.choice([0, 65537, 65538, 131073]) for _ in tokens])


def ids(rows: list[Row]) -> list[list[int]]:
    return [[sample for _, sample in row] for row in rows]


def flat(micro_batches: list[MicroBatch]) -> list[Place]:
    return [place for rows in micro_batches for row in rows for place in row]


# Grouped


def test_length_groups_are_sorted_within_a_window() -> None:
    """By hand: 8 batches of 2 are windows of two batches; in file order, samples 0 to 3 are the first, and the longest of all comes first."""
    tokens = [3, 9, 1, 7, 2, 8, 4, 6, 5, 5, 99, 1, 2, 2, 3, 3]
    order = LengthGroupedOrder(sizes_of(tokens), 2)
    assert order.window == 2
    assert [ids(order.rows(number)) for number in range(8)] == [
        [[10], [8]], [[1], [3]], [[0], [2]], [[5], [7]], [[6], [4]], [[9], [11]], [[14], [15]], [[12], [13]],
    ]  # fmt: skip


def test_length_groups_begin_where_the_next_epochs_global_batches_do() -> None:
    """By hand: the third global batch takes two samples of either epoch, and the fourth is sorted whole."""
    order = LengthGroupedOrder(sizes_of(list(range(1, 11))), 4, tail="continue")
    assert [[sample for (sample,) in ids(order.rows(number))] for number in range(5)] == [
        [7, 6, 5, 4], [3, 2, 1, 0], [9, 8, 1, 0], [9, 8, 7, 6], [5, 4, 3, 2],
    ]  # fmt: skip
    assert [row[0][0] for row in order.rows(2)] == [0, 0, 1, 1]


def test_shuffled_length_groups_pad_no_more_than_those_of_transformers() -> None:
    import torch
    from transformers.trainer_pt_utils import get_length_grouped_indices

    draw = random.Random(4)
    tokens = [int(min(2048, draw.lognormvariate(5.8, 0.6))) for _ in range(4000)]
    order = LengthGroupedOrder(sizes_of(tokens), 16, seed=1, shuffle=True)
    ours = [sample for number in range(250) for (sample,) in ids(order.rows(number))]
    theirs = get_length_grouped_indices(tokens, 16, generator=torch.Generator().manual_seed(1))
    plain = [sample for number in range(250) for (sample,) in ids(GlobalOrder(4000, 16, seed=1, shuffle=True).rows(number))]

    def padded(order: list[int], rows: int = 4) -> int:
        return sum(rows * max(tokens[sample] for sample in order[start : start + rows]) for start in range(0, len(order), rows))

    print(f"tokens with padding, of 1 needed: in turn {padded(plain) / sum(tokens):.3f}, grouped {padded(ours) / sum(tokens):.3f}")
    assert sorted(ours) == list(range(4000)) and tokens[ours[0]] == max(tokens)
    assert padded(ours) <= 1.01 * padded(theirs) < 0.8 * padded(plain)


def test_length_groups_differ_from_epoch_to_epoch_and_do_not_run_from_long_to_short() -> None:
    tokens = list(range(1, 401))
    order = LengthGroupedOrder(sizes_of(tokens), 4, seed=2, shuffle=True)
    first, second = ([frozenset(sample for (sample,) in ids(order.rows(100 * epoch + batch))) for batch in range(100)] for epoch in (0, 1))
    assert len(set(first) & set(second)) < 10
    # The last windows, which do not hold the longest sample: neither sorted nor shuffled alike.
    last = [[max(batch) for batch in epoch[-25:]] for epoch in (first, second)]
    ranks = [[sorted(longest).index(value) for value in longest] for longest in last]
    assert 399 not in last[0] + last[1] and ranks[0] != ranks[1] and list(range(24, -1, -1)) not in ranks


def test_buckets_hold_one_shape_and_join_what_is_left() -> None:
    """By hand: of 5 samples of shape 7 and 3 of shape 8, micro-batches of 2 are 7 7, 7 7, 8 8 and what is left of both."""
    order = BucketOrder(sizes_of([1] * 8, shapes=[7, 8, 7, 7, 8, 8, 7, 7]), 8, 2)
    assert order.step(0, 2, 0, 1) == [[((0, a),), ((0, b),)] for a, b in [(0, 2), (1, 4), (3, 6), (7, 5)]]
    with pytest.raises(ConfigError, match="global_batch_size 8 is not a multiple of micro_batch_size 3"):
        BucketOrder(sizes_of([1] * 8), 8, 3)


def test_most_micro_batches_of_buckets_hold_one_shape() -> None:
    sizes = random_sizes(4000, 5)
    order = BucketOrder(sizes, 16, 4, seed=1, shuffle=True)
    cut = [rows for number in range(250) for rows in order.cut(number, 4)]
    mixed = [number for number, rows in enumerate(cut) if len({int(sizes.shapes[row[0][1]]) for row in rows}) > 1]
    assert order.window == 50 and len(mixed) <= 5 * 3, "four shapes leave at most three mixed micro-batches in each of five windows"
    assert all(number % 200 >= 197 for number in mixed), "at the end of their window"
    alone = [int(sizes.shapes[rows[0][0][1]]) for rows in cut[:190]]
    assert alone != sorted(alone), "shapes alternate"


# Packed


def test_packed_rows_of_a_window_by_hand() -> None:
    """Windows of 4 samples, rows of 10 tokens: {6, 4} {7, 3} | {9} {2, 5, 3}; with the unusable sample 4 left out of its window."""
    order = PackedOrder(sizes_of([6, 7, 3, 4, 0, 9, 2, 5, 3]), 2, 10, window=4)
    assert [ids(order.rows(number)) for number in range(2)] == [[[0, 3], [1, 2]], [[5], [6, 7, 8]]]
    assert (order.samples_per_epoch, order.dropped_per_epoch, order.skipped_per_epoch) == (8, 0, 1)
    assert order.efficiency == 39 / 40
    assert order.rows(2) == [((1, 0), (1, 3)), ((1, 1), (1, 2))]


def test_rows_filled_in_order_know_no_window() -> None:
    order = PackedOrder(sizes_of([6, 3, 4, 5, 1, 9, 2]), 2, 10, strategy="sequential", window=1, tail="pad")
    assert [ids(order.rows(number)) for number in range(2)] == [[[0, 1], [2, 3, 4]], [[5], [6]]]


def test_every_epoch_packs_its_own_permutation() -> None:
    """The samples of rows filled in order are those of the plain order, one after another, in both epochs."""
    sizes = random_sizes(40, 1)
    packed, plain = PackedOrder(sizes, 1, 100, strategy="sequential", seed=6, shuffle=True), GlobalOrder(40, 1, seed=6, shuffle=True)
    want = [place for number in range(80) for row in plain.rows(number) for place in row]
    got = [place for number in range(80) for row in packed.rows(number) for place in row]
    assert got[:80] == want


def test_packed_tails() -> None:
    """Five rows of one sample each, three rows a step."""
    sizes = sizes_of([8, 9, 8, 9, 7])
    drop, pad, runs_on = (PackedOrder(sizes, 3, 10, tail=tail) for tail in ("drop", "pad", "continue"))
    assert (drop.samples_per_epoch, drop.dropped_per_epoch, drop.rows(1)) == (3, 2, [((1, 0),), ((1, 1),), ((1, 2),)])
    assert pad.rows(1) == [((0, 3),), ((0, 4),), ((0, PADDING),)]
    assert runs_on.rows(1) == [((0, 3),), ((0, 4),), ((1, 0),)]
    one_pass = PackedOrder(sizes, 3, 10, tail="pad", endless=False)
    assert (one_pass.num_batches, one_pass.rows(2)) == (2, [])


def test_padding_of_each_sample_takes_room_in_its_row() -> None:
    """Padded to multiples of 4, 5 + 5 tokens are 16 and do not share a row of 14, which holds 12 of them; a sample of 13 fills one."""
    order = PackedOrder(sizes_of([5, 5, 4, 13]), 3, 14, pad_to_multiple_of=4)
    assert ids(order.rows(0)) == [[0, 2], [1], [3]]


def test_what_cannot_be_packed_is_named() -> None:
    with pytest.raises(DataError, match="sample 1 has 11 tokens, a packed row holds 10; raise cutoff_len"):
        PackedOrder(sizes_of([3, 11]), 1, 10)
    with pytest.raises(DataError, match="no sample that can be used: 2 samples, all of them of 0 tokens"):
        PackedOrder(sizes_of([0, 0]), 1, 10)
    with pytest.raises(DataError, match="epoch 0: the dataset.s 3 samples fill 2 rows of 10 tokens, too few for one global batch of 4 rows"):
        PackedOrder(sizes_of([5, 5, 5]), 4, 10)


# Token budget


def test_a_budget_counts_rows_times_the_longest() -> None:
    """By hand: 10 | 6 6 | 4 4 3 | 1 within 12."""
    order = BudgetOrder(GlobalOrder(7, 7), sizes_of([4, 6, 10, 3, 4, 6, 1]), 12)
    assert [[sample for _, sample in flat([rows])] for rows in order.cut(0, 1)] == [[2], [1, 5], [0, 4, 3], [6]]
    packed = BudgetOrder(GlobalOrder(7, 7), sizes_of([4, 6, 10, 3, 4, 6, 1]), 12, packing=True)
    assert [ids(rows) for rows in packed.cut(0, 1)] == [[[0, 3, 4, 6]], [[1, 5]], [[2]]]


@pytest.mark.parametrize("packing", [False, True])
def test_a_budget_counts_padding(packing: bool) -> None:
    """Five tokens are eight: two of them would be ten but take sixteen."""
    five = GlobalOrder(2, 2)
    assert len(BudgetOrder(five, sizes_of([5, 5]), 12, packing=packing).cut(0, 1)) == 1
    assert len(BudgetOrder(five, sizes_of([5, 5]), 12, packing=packing, pad_to_multiple_of=8).cut(0, 1)) == 2
    with pytest.raises(DataError, match="sample 1 has 9 tokens, 16 with padding, more than token_budget 12; raise token_budget to 16"):
        BudgetOrder(five, sizes_of([5, 9]), 12, packing=packing, pad_to_multiple_of=8)


def test_ranks_and_pipeline_stages_get_equal_numbers_of_micro_batches() -> None:
    """Three micro-batches for two ranks that need a multiple of two each: one empty one fills up. A single rank takes four as well."""
    order = BudgetOrder(GlobalOrder(3, 3), sizes_of([10, 8, 6]), 12, micro_batches_multiple_of=2)
    assert [order.step(0, 1, rank, 2) for rank in range(2)] == [[[((0, 0),)], [((0, PADDING),)]], [[((0, 1),)], [((0, 2),)]]]
    assert len(BalancedOrder(order, np.zeros(3)).step(0, 1, 0, 1)) == 4


def test_an_unusable_sample_keeps_its_place_and_padding_does_not() -> None:
    order = BudgetOrder(GlobalOrder(3, 4, tail="pad"), sizes_of([5, 0, 5]), 12)
    assert order.cut(0, 1) == [[((0, 0),), ((0, 2),)], [((0, 1),)]]


# Balance


def test_ranks_get_as_many_patches_as_they_can() -> None:
    order = GlobalOrder(4, 4)
    patches = np.array([900, 700, 200, 800])
    assert [[sample for _, sample in flat(order.step(0, 1, rank, 2))] for rank in range(2)] == [[0, 2], [1, 3]]
    patches = np.array([900, 100, 800, 200])
    assert [[sample for _, sample in flat(BalancedOrder(order, patches).step(0, 1, rank, 2))] for rank in range(2)] == [[0, 1], [2, 3]]


# Streaming


class Stream:
    """A dataset whose records are found as they are asked for."""

    def __init__(self, count: int) -> None:
        self.count, self.looked_at = count, 0

    def has(self, index: int) -> bool:
        self.looked_at = max(self.looked_at, min(index + 1, self.count))
        return index < self.count


@pytest.mark.parametrize("tail", ["drop", "pad", "continue"])
@pytest.mark.parametrize("count", [1, 7, 8, 9, 11, 12])
def test_a_stream_is_the_file_order_and_looks_no_further_than_it_must(tail: Tail, count: int) -> None:
    if tail == "drop" and count < 4:
        with pytest.raises(DataError, match="has 1 samples, too few for one global batch of 4"):
            StreamingOrder(Stream(count).has, 4).rows(0)
        return
    stream = Stream(count)
    order, known = StreamingOrder(stream.has, 4, tail=tail), GlobalOrder(count, 4, tail=tail)
    for number in range(9):
        assert order.rows(number) == known.rows(number)
        assert stream.looked_at <= (number + 1) * 4
    assert StreamingOrder(Stream(count).has, 4, tail=tail).rows(7) == known.rows(7), "resumed beyond the end"
    assert (order.samples_per_epoch, order.dropped_per_epoch) == (known.samples_per_epoch, known.dropped_per_epoch)


@pytest.mark.parametrize(("count", "tail", "batches"), [(8, "drop", 2), (8, "pad", 2), (9, "drop", 2), (9, "pad", 3)])
def test_one_pass_over_a_stream_ends(count: int, tail: Tail, batches: int) -> None:
    order = StreamingOrder(Stream(count).has, 4, tail=tail, endless=False)
    steps = [order.step(number, 2, 0, 1) for number in range(4)]
    assert [len(step) for step in steps] == [2] * batches + [0] * (4 - batches)
    assert order.num_batches == batches


def test_an_empty_stream_is_refused_at_once() -> None:
    with pytest.raises(DataError, match="0 samples"):
        StreamingOrder(Stream(0).has, 4)


# Chosen by data.json


@pytest.mark.parametrize(
    ("basic", "loading", "want"),
    [
        ({}, {}, lambda sizes: GlobalOrder(11, 4, seed=9, shuffle=True)),
        ({}, {"tail": "continue"}, lambda sizes: GlobalOrder(11, 4, seed=9, shuffle=True, tail="continue")),
        ({}, {"drop_last": False}, lambda sizes: GlobalOrder(11, 4, seed=9, shuffle=True, tail="pad")),
        ({}, {"sampler_type": "LengthGroupedSampler"}, lambda sizes: LengthGroupedOrder(sizes, 4, seed=9, shuffle=True)),
        ({}, {"sampler_type": "BucketBatchSampler"}, lambda sizes: BucketOrder(sizes, 4, 2, seed=9, shuffle=True)),
        ({}, {"balance_vision": True}, lambda sizes: BalancedOrder(GlobalOrder(11, 4, seed=9, shuffle=True), sizes.patches)),
        ({}, {"token_budget": 120}, lambda sizes: BudgetOrder(GlobalOrder(11, 4, seed=9, shuffle=True), sizes, 120)),
        (
            {"packing": True},
            {"token_budget": 120, "pad_to_multiple_of": 8},
            lambda sizes: BudgetOrder(GlobalOrder(11, 4, seed=9, shuffle=True), sizes, 120, packing=True, pad_to_multiple_of=8),
        ),
        (
            {"packing": True, "packing_strategy": "sequential"},
            {"token_budget": 120},
            lambda sizes: BudgetOrder(GlobalOrder(11, 4, seed=9, shuffle=True), sizes, 120, packing=True, strategy="sequential"),
        ),
        (
            {"packing": True, "packing_strategy": "sequential"},
            {"tail": "pad"},
            lambda sizes: PackedOrder(sizes, 4, 100, strategy="sequential", seed=9, shuffle=True, tail="pad"),
        ),
        (
            {"packing": True, "preprocessing_batch_size": 5},
            {"tail": "pad", "pad_to_multiple_of": 8, "balance_vision": True},
            lambda sizes: BalancedOrder(PackedOrder(sizes, 4, 100, window=5, pad_to_multiple_of=8, seed=9, shuffle=True, tail="pad"), sizes.patches),
        ),
    ],
)
def test_data_json_chooses_the_order(
    make_run: Callable[..., RunConfig], basic: dict[str, Any], loading: dict[str, Any], want: Callable[[SampleSizes], Order]
) -> None:
    run = make_run("any.json", basic=basic, loading={"shuffle": True, **loading}, micro_batch_size=2, seed=9)
    sizes = random_sizes(11, 2)
    needed = bool(basic) or any(key in loading for key in ("sampler_type", "token_budget", "balance_vision"))
    order, same = training_order(run, 4, 11, 100, sizes if needed else None), want(sizes)
    assert type(order) is type(same)
    assert [order.step(number, 2, 0, 1) for number in range(12)] == [same.step(number, 2, 0, 1) for number in range(12)]


def test_interleaved_pipelines_get_their_multiple_of_micro_batches(make_run: Callable[..., RunConfig]) -> None:
    run = make_run("any.json", loading={"token_budget": 120}, seed=9)
    for virtual, multiple in ((None, 1), (2, 4)):
        parallel = ParallelConfig(pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=virtual)
        interleaved = run.model_copy(update={"parallel": parallel})
        for order in (training_order(interleaved, 1, 11, 100, random_sizes(11, 2)), validation_order(interleaved, 1, 11)):
            assert len(order.step(0, 1, 0, 1)) == multiple


@pytest.mark.parametrize("tail", ["drop", "pad", "continue"])
def test_a_streamed_dataset_keeps_its_tail(make_run: Callable[..., RunConfig], tail: Tail) -> None:
    order = streaming_order(make_run("any.json", loading={"tail": tail}), 4, Stream(11).has)
    assert [order.rows(number) for number in range(9)] == [GlobalOrder(11, 4, tail=tail).rows(number) for number in range(9)]
