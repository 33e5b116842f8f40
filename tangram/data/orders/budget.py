"""Micro-batches of so many tokens instead of so many rows."""

from __future__ import annotations

from tangram.data.orders.balance import DerivedOrder, balanced
from tangram.data.orders.packing import PACKERS, Strategy
from tangram.data.sampler import PADDING, MicroBatch, Order, Place
from tangram.data.sizes import SampleSizes
from tangram.errors import DataError


class BudgetOrder(DerivedOrder):
    """The global batches of another order, each cut into few micro-batches of at most ``token_budget`` tokens.

    Samples are taken longest first, as many to a micro-batch as rows times the longest, padding included, stay within the budget. With ``packing``
    a micro-batch is one row of several samples instead. The whole global batch is cut, not a rank's share, so the cut is the same at any
    data-parallel size; ``micro_batch_size`` has no part in it. Micro-batches are dealt out so that ranks have about as many tokens, and empty ones
    fill up where the numbers would be unequal. Places of ``PADDING`` fill no row here.

    Args:
        order: one sample a row.
        sizes: of all samples. One of 0 tokens cannot be used; it keeps its place and counts as the one token of a row without labels.
        token_budget: most tokens of a micro-batch.
        packing: True: samples share a row; False: each has its own, padded to the longest.
        strategy: how they are packed.
        pad_to_multiple_of: what rows, or the samples of packed rows, are padded to.
        micro_batches_multiple_of: each rank's number of micro-batches is a multiple of this.

    Raises:
        DataError: a sample larger than the budget, which stands for the memory there is.
    """

    def __init__(
        self,
        order: Order,
        sizes: SampleSizes,
        token_budget: int,
        *,
        packing: bool = False,
        strategy: Strategy = "knapsack",
        pad_to_multiple_of: int = 1,
        micro_batches_multiple_of: int = 1,
    ) -> None:
        super().__init__(order)
        self.packing = packing
        self.micro_batches_multiple_of = micro_batches_multiple_of
        self._packer = PACKERS[strategy]
        # Sizes and room in units of what is padded to.
        self._room = token_budget // pad_to_multiple_of
        self._units = -(-sizes.tokens.clip(min=1) // pad_to_multiple_of)
        largest = int(self._units.argmax())
        if self._units[largest] > self._room:
            padded = int(self._units[largest]) * pad_to_multiple_of
            raise DataError(
                f"sample {largest} has {sizes.tokens[largest]} tokens, {padded} with padding, more than token_budget {token_budget}; raise "
                f"token_budget to {padded} or lower cutoff_len"
            )

    def cut(self, number: int, micro_batch_size: int) -> list[MicroBatch]:
        places = [place for row in self.order.rows(number) for place in row if place[1] != PADDING]
        units = [int(self._units[sample]) for _, sample in places]
        if self.packing:
            return [[tuple(places[item] for item in row)] for row in self._packer(units, self._room)]
        micro_batches: list[MicroBatch] = []
        longest = 0
        for item in sorted(range(len(places)), key=lambda item: -units[item]):
            if not micro_batches or (len(micro_batches[-1]) + 1) * longest > self._room:
                micro_batches.append([])
                longest = units[item]
            micro_batches[-1].append((places[item],))
        return micro_batches

    def deal(self, micro_batches: list[MicroBatch], ranks: int) -> list[list[int]]:
        return balanced([self._cost(rows) for rows in micro_batches], ranks)

    def _cost(self, rows: MicroBatch) -> int:
        """Tokens of a micro-batch, padding included, in units of what is padded to."""

        def units(place: Place) -> int:
            return int(self._units[place[1]]) if place[1] != PADDING else 0

        return len(rows) * max(sum(units(place) for place in row) for row in rows)
