"""File order of a dataset whose length is not known beforehand."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from tangram.config.data import Tail
from tangram.data.sampler import GlobalOrder, Order, Row
from tangram.errors import DataError


class StreamingOrder(Order):
    """As ``GlobalOrder`` without ``shuffle``, for a dataset that is looked through only as far as it is needed.

    The first epoch's full global batches need no length. At the first one that the dataset does not fill the length is found, and from there on,
    at any later start too, this is a ``GlobalOrder``. ``num_batches``, ``samples_per_epoch`` and ``dropped_per_epoch`` are known from then on.

    Args:
        has: whether the dataset has a sample of that index; looks through the dataset up to there.
        global_batch_size, seed, tail, endless: as ``EpochOrder``.

    Raises:
        DataError: no samples; when the end is found, ``tail="drop"`` with fewer than a global batch.
    """

    def __init__(self, has: Callable[[int], bool], global_batch_size: int, *, seed: int = 0, tail: Tail = "drop", endless: bool = True) -> None:
        assert endless or tail != "continue", "one pass has no next epoch to continue with"
        if not has(0):
            raise DataError("the dataset is empty: 0 samples")
        self.global_batch_size, self.seed, self.tail, self.endless = global_batch_size, seed, tail, endless
        self.num_batches = self.samples_per_epoch = self.dropped_per_epoch = None
        self._has = has
        self._whole: GlobalOrder | None = None

    def rows(self, number: int) -> list[Row]:
        start, stop = number * self.global_batch_size, (number + 1) * self.global_batch_size
        if self._whole is None and self._has(stop - 1):
            return [((0, sample),) for sample in range(start, stop)]
        if self._whole is None:
            self._end(bisect_left(range(stop), True, key=lambda index: not self._has(index)))
        assert self._whole is not None
        return self._whole.rows(number)

    def _end(self, num_samples: int) -> None:
        self._whole = GlobalOrder(num_samples, self.global_batch_size, seed=self.seed, tail=self.tail, endless=self.endless)
        self.num_samples, self.num_batches = num_samples, self._whole.num_batches
        self.samples_per_epoch, self.dropped_per_epoch = self._whole.samples_per_epoch, self._whole.dropped_per_epoch
