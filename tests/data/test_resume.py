"""What a resumed run reads is what the uninterrupted one would have read: sample by sample, at any data-parallel size, with and without workers."""

from __future__ import annotations

import random
from itertools import islice
from typing import Any

import pytest

from tangram.config.data import Tail
from tangram.data.loader import StepLoader
from tangram.data.sampler import GlobalOrder
from tests.data.test_workers import Numbers

BATCH, MICRO = 12, 1
Ids = list[list[int]]


def steps_of(order: GlobalOrder, consumed: int, size: int, count: int, workers: int) -> tuple[Ids, int]:
    """Sample ids of ``count`` global batches, micro-batches in the order of their places, and the position that all ranks then save."""
    loaders = [
        StepLoader(Numbers(), order, data_parallel_rank=rank, data_parallel_size=size, micro_batch_size=MICRO, consumed=consumed, num_workers=workers)
        for rank in range(size)
    ]
    ranks: list[Any] = []
    for loader in loaders:
        iterator = iter(loader)
        ranks.append(list(islice(iterator, count)))
        iterator.close()  # type: ignore[attr-defined]
    (position,) = {loader.consumed for loader in loaders}
    batches: Ids = []
    for step in range(count):
        dealt = [[batch["sample_ids"] for batch in rank[step]] for rank in ranks]
        batches.append([sample for turn in zip(*dealt, strict=True) for ids in turn for sample in ids])
    return batches, position


@pytest.mark.parametrize(("workers", "tail"), [(0, "drop"), (0, "pad"), (0, "continue"), (2, "continue")])
def test_stopped_at_random_points_and_resumed_at_other_sizes(workers: int, tail: Tail) -> None:
    """40 samples and batches of 12: epochs end within batches, drop 4, or are filled up by 8; the run goes through a dozen of them."""
    draw = random.Random(f"{workers} {tail}")
    lengths = [draw.randint(1, 3) for _ in range(20)]

    def order() -> GlobalOrder:
        return GlobalOrder(40, BATCH, seed=5, shuffle=True, tail=tail)

    whole, end = steps_of(order(), 0, 1, sum(lengths), 0)
    pieces: Ids = []
    position = 0
    for length in lengths:
        size = draw.choice([1, 2, 3, 4] if workers == 0 else [1, 2])
        piece, position = steps_of(order(), position, size, length, workers)
        pieces += piece
    assert pieces == whole and position == end == BATCH * sum(lengths)
    per_epoch = [sample for batch in whole for sample in batch][: 40 - 40 % BATCH if tail == "drop" else 40]
    assert len(set(per_epoch)) == len(per_epoch), "no sample twice in an epoch"


def test_a_loader_can_be_gone_on_with_twice_in_a_row() -> None:
    """The second resume starts from what the first one saved, not from where its workers had read to."""
    order = GlobalOrder(40, BATCH, seed=5, shuffle=True)
    whole, _ = steps_of(order, 0, 1, 6, 0)
    loader = StepLoader(Numbers(), order, num_workers=1, prefetch_factor=4)
    seen: Ids = []
    for count in (1, 2, 3):
        steps = iter(loader)
        seen += [[sample for batch in step for sample in batch["sample_ids"]] for step in islice(steps, count)]
        steps.close()  # type: ignore[attr-defined]
    assert seen == whole
