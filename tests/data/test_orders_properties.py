"""What holds of all orders, whatever data.json asks for: same at any data-parallel size, whole epochs, exact resume, no overflow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tangram.config.data import Tail
from tangram.data.orders.balance import BalancedOrder
from tangram.data.orders.budget import BudgetOrder
from tangram.data.orders.grouped import BucketOrder, LengthGroupedOrder
from tangram.data.orders.packed import PackedOrder
from tangram.data.orders.streaming import StreamingOrder
from tangram.data.sampler import PADDING, GlobalOrder, MicroBatch, Order
from tangram.data.sizes import SampleSizes
from tangram.errors import DataError
from tests.data.test_orders import Stream, flat, random_sizes


@dataclass(frozen=True)
class Setting:
    samples: int
    global_batch_size: int
    micro_batch_size: int
    seed: int
    shuffle: bool
    tail: Tail
    unusable: float = 0.0

    @property
    def sizes(self) -> SampleSizes:
        return random_sizes(self.samples, self.seed, CUTOFF, self.unusable)


CUTOFF, BUDGET = 100, 150
Make = Callable[[Setting], Order]


def plain(setting: Setting) -> Order:
    return GlobalOrder(setting.samples, setting.global_batch_size, seed=setting.seed, shuffle=setting.shuffle, tail=setting.tail)


def grouped(setting: Setting) -> Order:
    return LengthGroupedOrder(setting.sizes, setting.global_batch_size, seed=setting.seed, shuffle=setting.shuffle, tail=setting.tail)


def bucketed(setting: Setting) -> Order:
    return BucketOrder(
        setting.sizes,
        setting.global_batch_size,
        setting.micro_batch_size,
        seed=setting.seed,
        shuffle=setting.shuffle,
        tail=setting.tail,
    )


def packed(setting: Setting, strategy: str = "knapsack") -> Order:
    return PackedOrder(
        setting.sizes,
        setting.global_batch_size,
        CUTOFF,
        strategy=strategy,  # type: ignore[arg-type]
        window=7,
        seed=setting.seed,
        shuffle=setting.shuffle,
        tail=setting.tail,
    )


ORDERS: dict[str, Make] = {
    "plain": plain,
    "grouped": grouped,
    "bucketed": bucketed,
    "packed by knapsack": packed,
    "packed in order": lambda setting: packed(setting, "sequential"),
    "budget": lambda setting: BudgetOrder(grouped(setting), setting.sizes, BUDGET),
    "budget, packed": lambda setting: BudgetOrder(plain(setting), setting.sizes, BUDGET, packing=True, micro_batches_multiple_of=2),
    "balanced": lambda setting: BalancedOrder(plain(setting), setting.sizes.patches),
    "balanced and packed": lambda setting: BalancedOrder(packed(setting), setting.sizes.patches),
    "balanced budget": lambda setting: BalancedOrder(BudgetOrder(plain(setting), setting.sizes, BUDGET), setting.sizes.patches),
    "streaming": lambda setting: StreamingOrder(Stream(setting.samples).has, setting.global_batch_size, tail=setting.tail),
}
SETTINGS = st.builds(
    Setting,
    samples=st.integers(1, 60),
    global_batch_size=st.sampled_from([4, 8, 12]),
    micro_batch_size=st.sampled_from([1, 2]),
    seed=st.integers(0, 2**32 - 1),
    shuffle=st.booleans(),
    tail=st.sampled_from(["drop", "pad", "continue"]),
    unusable=st.sampled_from([0.0, 0.2]),
)
properties = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
every_order = pytest.mark.parametrize("make", ORDERS.values(), ids=ORDERS.keys())


def made(make: Make, setting: Setting) -> Order | None:
    """The order, or None where it is refused for want of samples."""
    try:
        order = make(setting)
        order.rows(0)
    except DataError as fault:
        assert "too few for one global batch" in str(fault) or "no sample that can be used" in str(fault)
        assert setting.tail == "drop" or setting.unusable
        return None
    return order


def real(micro_batches: list[MicroBatch]) -> list[MicroBatch]:
    """Those that are not there only to fill up."""
    return [rows for rows in micro_batches if any(sample != PADDING for _, sample in flat([rows]))]


def step_of_all_ranks(order: Order, number: int, micro_batch_size: int, ranks: int) -> list[MicroBatch]:
    shares = [order.step(number, micro_batch_size, rank, ranks) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1, "equally many micro-batches on every rank"
    assert len(shares[0]) % order.micro_batches_multiple_of == 0
    return [rows for share in shares for rows in share]


@every_order
@properties
@given(setting=SETTINGS, number=st.integers(0, 40))
def test_ranks_share_out_the_same_micro_batches_at_every_data_parallel_size(make: Make, setting: Setting, number: int) -> None:
    order = made(make, setting)
    if order is None:
        return
    try:
        rows = order.rows(number)
    except DataError as fault:
        assert "epoch " in str(fault) and "too few for one global batch" in str(fault)
        return
    want = Counter(place for row in rows for place in row if place[1] != PADDING)
    cut = sorted(real(step_of_all_ranks(order, number, setting.micro_batch_size, 1)))
    assert len(rows) == setting.global_batch_size and max(want.values()) == 1
    for ranks in (1, 2, 4):
        if setting.global_batch_size % (ranks * setting.micro_batch_size) == 0:
            together = step_of_all_ranks(order, number, setting.micro_batch_size, ranks)
            assert Counter(place for place in flat(together) if place[1] != PADDING) == want
            assert sorted(real(together)) == cut


@every_order
@properties
@given(setting=SETTINGS)
def test_every_epoch_has_every_sample_once(make: Make, setting: Setting) -> None:
    order = made(make, setting)
    if order is None:
        return
    seen: dict[int, list[int]] = {}
    number = 0
    while max(seen, default=0) < 3:
        try:
            step = step_of_all_ranks(order, number, setting.micro_batch_size, 1)
        except DataError as fault:
            assert f"epoch {max(seen) + 1}: " in str(fault) and "too few for one global batch" in str(fault)
            return
        for epoch, sample in flat(step):
            if sample != PADDING:
                seen.setdefault(epoch, []).append(sample)
        number += 1
    left_out = set(np.flatnonzero(setting.sizes.tokens == 0).tolist()) if order.skipped_per_epoch else set()
    assert len(left_out) == order.skipped_per_epoch
    usable = sorted(set(range(setting.samples)) - left_out)
    for epoch in range(3):
        if setting.tail == "drop":
            assert len(set(seen[epoch])) == len(seen[epoch]) and set(seen[epoch]) <= set(usable)
        else:
            assert sorted(seen[epoch]) == usable
    assert len(seen[0]) == order.samples_per_epoch == len(usable) - (order.dropped_per_epoch or 0)


@every_order
@settings(properties, max_examples=8)
@given(setting=SETTINGS, data=st.data())
def test_stopped_and_resumed_at_twenty_places_with_other_ranks_each_time(make: Make, setting: Setting, data: st.DataObject) -> None:
    straight = made(make, setting)
    if straight is None:
        return
    ranks = [size for size in (1, 2, 4) if setting.global_batch_size % (size * setting.micro_batch_size) == 0]
    stops = [0, *sorted(data.draw(st.lists(st.integers(0, 60), min_size=20, max_size=20))), 60]
    want, got = [], []
    try:
        for number in range(60):
            want.append(sorted(sample for _, sample in flat(real(step_of_all_ranks(straight, number, setting.micro_batch_size, 1)))))
    except DataError as fault:
        assert "epoch " in str(fault) and "too few for one global batch" in str(fault)
        return
    for start, stop in pairwise(stops):
        resumed, size = make(setting), data.draw(st.sampled_from(ranks))
        for number in range(start, stop):
            got.append(sorted(sample for _, sample in flat(real(step_of_all_ranks(resumed, number, setting.micro_batch_size, size)))))
    assert got == want


@properties
@given(setting=SETTINGS, strategy=st.sampled_from(["knapsack", "sequential"]))
def test_packed_rows_never_exceed_the_cutoff(setting: Setting, strategy: str) -> None:
    order = made(lambda setting: packed(setting, strategy), setting)
    if order is None:
        return
    tokens = setting.sizes.tokens
    for number in range(3):
        for row in order.rows(number):
            assert sum(int(tokens[sample]) for _, sample in row if sample != PADDING) <= CUTOFF
            assert all(tokens[sample] for _, sample in row if sample != PADDING)


@properties
@given(setting=SETTINGS, packing=st.booleans(), multiple=st.sampled_from([1, 8]))
def test_micro_batches_never_exceed_the_budget(setting: Setting, packing: bool, multiple: int) -> None:
    order = made(lambda setting: BudgetOrder(plain(setting), setting.sizes, BUDGET, packing=packing, pad_to_multiple_of=multiple), setting)
    if order is None:
        return
    tokens = setting.sizes.tokens
    for number in range(3):
        for rows in order.cut(number, setting.micro_batch_size):
            lengths = [sum(-(-max(int(tokens[sample]), 1) // multiple) * multiple for _, sample in row) for row in rows]
            assert len(rows) * max(lengths) <= BUDGET and (len(rows) == 1 or not packing)
