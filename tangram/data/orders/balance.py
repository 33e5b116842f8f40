"""Dealing micro-batches out so that no data-parallel rank has much more to do than the others."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tangram.data.sampler import PADDING, MicroBatch, Order, Row

if TYPE_CHECKING:
    import numpy as np


def balanced(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Deal items to ranks, equally many to each, so that the largest sum of costs is small.

    The dearest item first, each to the rank with the smallest sum that still takes one (longest processing time first, Graham 1969); of equal items
    and ranks the first. Where dealing in turn does as well, that is done.

    Args:
        costs: of the items; their number is a multiple of ``ranks``.

    Returns:
        The items of each rank by number, ascending.
    """
    plain = [list(range(rank, len(costs), ranks)) for rank in range(ranks)]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    sums = [(0, rank) for rank in range(ranks)]
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        total, rank = heapq.heappop(sums)
        shares[rank].append(item)
        if len(shares[rank]) < len(costs) // ranks:
            heapq.heappush(sums, (total + costs[item], rank))

    def largest(shares: list[list[int]]) -> int:
        return max(sum(costs[item] for item in share) for share in shares)

    return [sorted(share) for share in shares] if largest(shares) < largest(plain) else plain


class DerivedOrder(Order):
    """Another order's global batches, cut or dealt out otherwise."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.global_batch_size, self.seed, self.num_batches = order.global_batch_size, order.seed, order.num_batches
        self.samples_per_epoch, self.dropped_per_epoch = order.samples_per_epoch, order.dropped_per_epoch
        self.skipped_per_epoch, self.micro_batches_multiple_of = order.skipped_per_epoch, order.micro_batches_multiple_of

    def rows(self, number: int) -> list[Row]:
        return self.order.rows(number)

    def cut(self, number: int, micro_batch_size: int) -> list[MicroBatch]:
        return self.order.cut(number, micro_batch_size)


class BalancedOrder(DerivedOrder):
    """The micro-batches of another order, dealt out so that all ranks have about as many patches.

    Only who takes a micro-batch changes, never which samples it has; so the loss stays what it is.

    Args:
        order: any whose length is known.
        patches: of all samples, ``SampleSizes.patches``.
    """

    def __init__(self, order: Order, patches: np.ndarray) -> None:
        super().__init__(order)
        self.patches = patches

    def deal(self, micro_batches: list[MicroBatch], ranks: int) -> list[list[int]]:
        costs = [sum(int(self.patches[sample]) for row in rows for _, sample in row if sample != PADDING) for rows in micro_batches]
        return balanced(costs, ranks)
