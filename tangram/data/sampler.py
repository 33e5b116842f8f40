"""The order of samples: a function of the seed, the epoch and the position in the epoch, never of ranks or workers."""

from __future__ import annotations

from tangram.errors import DataError

Place = tuple[int, int]
"""Epoch and sample id."""
Row = tuple[Place, ...]
"""The samples of one row; more than one where samples are packed."""
MicroBatch = list[Row]

PADDING = -1
"""Sample id of a place that no sample fills; it becomes a row without labels, which adds nothing to loss or gradients."""


class GlobalOrder:
    """Which sample stands at each place of the endless sequence that training consumes.

    Global batch k holds the places ``[k * global_batch_size, (k + 1) * global_batch_size)``. The whole state is the number of places
    consumed, so a run resumes exactly at any data-parallel size. (It resumes exactly at another global batch size too if ``drop_last``
    is false; if it is true, the length of an epoch depends on that size.)

    Args:
        num_samples: samples in the dataset.
        global_batch_size: samples of one optimizer step.
        seed: of the permutations.
        shuffle: True: each epoch has its own permutation; False: file order.
        drop_last: True: the samples at the end of an epoch that do not fill a global batch are left out of that epoch (``dropped_per_epoch``
            of them); False: a global batch runs on into the next epoch.
        repeat: False: one epoch only (validation). A last short batch is filled with ``PADDING``, unless ``drop_last`` leaves it out.

    Raises:
        DataError: no samples, or fewer than a batch that may not be padded.
    """

    def __init__(
        self, num_samples: int, global_batch_size: int, *, seed: int = 0, shuffle: bool = False, drop_last: bool = True, repeat: bool = True
    ) -> None:
        if num_samples < 1:
            raise DataError("the dataset is empty: 0 samples")
        if num_samples < global_batch_size and (repeat or drop_last):
            raise DataError(
                f"the dataset has {num_samples} samples, too few for one global batch of {global_batch_size}; "
                f"add samples or lower global_batch_size to at most {num_samples}"
            )
        self.num_samples = num_samples
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.dropped_per_epoch = num_samples % global_batch_size if drop_last else 0
        self.samples_per_epoch = num_samples - self.dropped_per_epoch
        self.num_batches = None if repeat else -(-self.samples_per_epoch // global_batch_size)
        """Global batches in all; None: endless."""
        self._epoch = -1
        self._ids: list[int] | range = range(0)

    def step(self, number: int, micro_batch_size: int, data_parallel_rank: int, data_parallel_size: int) -> list[MicroBatch]:
        """The micro-batches that a rank takes of global batch ``number``.

        Runs of ``micro_batch_size`` places: r, r + DP, r + 2 DP, ... The set of micro-batches is thus the same at every data-parallel size.
        """
        places = self.batch(number * self.global_batch_size, self.global_batch_size)
        starts = range(data_parallel_rank * micro_batch_size, len(places), data_parallel_size * micro_batch_size)
        return [[(place,) for place in places[start : start + micro_batch_size]] for start in starts]

    def batch(self, start: int, count: int) -> list[Place]:
        """Epoch and sample id of the places ``[start, start + count)``."""
        places = []
        for place in range(start, start + count):
            epoch, index = divmod(place, self.samples_per_epoch)
            if self.num_batches is not None and epoch > 0:
                places.append((0, PADDING))
                continue
            if epoch != self._epoch:
                self._epoch, self._ids = epoch, self._permutation(epoch)
            places.append((epoch, self._ids[index]))
        return places

    def _permutation(self, epoch: int) -> list[int] | range:
        """All sample ids in the order of ``epoch``.

        Sorting the raw output of a counter-based generator, since numpy promises the same raw output in every version, which it does not
        for ``permutation``.
        """
        if not self.shuffle:
            return range(self.num_samples)
        import numpy as np

        keys = np.random.Philox(key=np.array([self.seed, epoch], dtype=np.uint64)).random_raw(self.num_samples)
        order: list[int] = np.argsort(keys, kind="stable").tolist()
        return order
