"""The order of samples: a function of the seed, the epoch and the position in the epoch, never of ranks or workers.

Here are the contract and the plain order; the orders that group, pack, cut by tokens, balance or stream are in ``tangram.data.orders``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from typing import TYPE_CHECKING

from tangram.config.data import Tail
from tangram.errors import DataError

if TYPE_CHECKING:
    import numpy as np

Place = tuple[int, int]
"""Epoch and sample id."""
Row = tuple[Place, ...]
"""The samples of one row; more than one where samples are packed."""
MicroBatch = list[Row]

PADDING = -1
"""Sample id of a place that no sample fills; it becomes a row without labels, which adds nothing to loss or gradients."""


class Order(ABC):
    """Which rows make up each global batch, how it is cut into micro-batches, and which rank takes which of them.

    All of it is a function of the order's arguments and the number of the global batch. So the whole state of the data is the number of global
    batches consumed, ranks agree without talking, and a run resumes exactly at any data-parallel size. How a global batch is cut does not depend
    on the data-parallel size either: there are the same micro-batches at every size, and so the same loss, whatever it averages.
    """

    global_batch_size: int
    """Rows of one optimizer step."""
    seed: int
    num_batches: int | None
    """Global batches in all; None: endless, or not known yet."""
    samples_per_epoch: int | None
    """Samples that an epoch trains on; None: not known yet. Where epochs differ, the first one's; so too below."""
    dropped_per_epoch: int | None
    """Samples that an epoch leaves out since they fill no global batch; None: not known yet."""
    skipped_per_epoch: int = 0
    """Samples that stand in no row since they cannot be used."""
    micro_batches_multiple_of: int = 1
    """Each rank's number of micro-batches is a multiple of this; an interleaved pipeline needs that of its size."""

    @abstractmethod
    def rows(self, number: int) -> list[Row]:
        """The rows of global batch ``number``, ``PADDING`` where there is no sample; none beyond the end."""

    def cut(self, number: int, micro_batch_size: int) -> list[MicroBatch]:
        """The micro-batches of global batch ``number``: runs of ``micro_batch_size`` rows."""
        rows = self.rows(number)
        return [rows[start : start + micro_batch_size] for start in range(0, len(rows), micro_batch_size)]

    def deal(self, micro_batches: list[MicroBatch], ranks: int) -> list[list[int]]:
        """Numbers of the micro-batches that each rank takes, equally many: r, r + ranks, r + 2 ranks, ..."""
        return [list(range(rank, len(micro_batches), ranks)) for rank in range(ranks)]

    def step(self, number: int, micro_batch_size: int, data_parallel_rank: int, data_parallel_size: int) -> list[MicroBatch]:
        """The micro-batches that a rank takes of global batch ``number``; none beyond the end.

        All ranks take equally many. Where they cannot be dealt out evenly, empty ones (one row of ``PADDING``) fill up.
        """
        micro_batches = self.cut(number, micro_batch_size)
        short = -len(micro_batches) % (data_parallel_size * self.micro_batches_multiple_of)
        micro_batches += [[((0, PADDING),)] for _ in range(short)]
        return [micro_batches[index] for index in self.deal(micro_batches, data_parallel_size)[data_parallel_rank]]


class EpochOrder(Order):
    """Rows epoch after epoch, and what happens to those at an epoch's end that fill no global batch.

    Args:
        global_batch_size: rows of one optimizer step.
        seed: of the permutations.
        tail: "drop": they are left out of that epoch; "pad": rows without samples fill up the epoch's last global batch; "continue": the
            global batch runs on into the next epoch.
        endless: True: epoch follows upon epoch (training); False: one pass (validation), whose tail cannot be "continue".
    """

    def __init__(self, global_batch_size: int, *, seed: int, tail: Tail, endless: bool) -> None:
        assert endless or tail != "continue", "one pass has no next epoch to continue with"
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.tail: Tail = tail
        self.endless = endless
        self._starts = [0]

    @abstractmethod
    def _count(self, epoch: int) -> int:
        """Rows that the samples of ``epoch`` fill."""

    @abstractmethod
    def _slice(self, epoch: int, start: int, stop: int) -> list[Row]:
        """The rows ``[start, stop)`` of ``epoch``, as far as there are any."""

    def rows(self, number: int) -> list[Row]:
        rows: list[Row] = []
        if self.num_batches is not None and number >= self.num_batches:
            return rows
        while len(rows) < self.global_batch_size:
            epoch, index = self._locate(number * self.global_batch_size + len(rows))
            wanted = min(self.global_batch_size - len(rows), self._places(epoch) - index)
            real = self._slice(epoch, index, index + wanted)
            rows += real
            rows += [((epoch, PADDING),)] * (wanted - len(real))
        return rows

    def _places(self, epoch: int) -> int:
        """Places of ``epoch`` in the endless sequence of rows that global batches are cut from.

        Raises:
            DataError: none, so that training would never get on.
        """
        count, size = self._count(epoch), self.global_batch_size
        places = {"drop": count // size * size, "pad": -(-count // size) * size, "continue": count}[self.tail]
        if places == 0:
            raise self._too_few(epoch, count)
        return places

    def _too_few(self, epoch: int, count: int) -> DataError:
        return DataError(
            f"the dataset has {count} samples, too few for one global batch of {self.global_batch_size}; add samples, make the batch "
            f"at most {count}, or set dataloader_param.tail to pad or continue"
        )

    def _locate(self, place: int) -> tuple[int, int]:
        """Epoch of a place in the endless sequence, and which place of the epoch it is."""
        while self._starts[-1] <= place:
            self._starts.append(self._starts[-1] + self._places(len(self._starts) - 1))
        epoch = bisect_right(self._starts, place) - 1
        return epoch, place - self._starts[epoch]


class GlobalOrder(EpochOrder):
    """One sample a row, in file order or in a permutation of its own for each epoch.

    With ``tail="continue"`` a run also resumes exactly at another global batch size; otherwise the length of an epoch depends on that size.

    Args:
        num_samples: samples in the dataset.
        shuffle: True: each epoch has its own permutation; False: file order.
        global_batch_size, seed, tail, endless: as ``EpochOrder``.

    Raises:
        DataError: no samples, or ``tail="drop"`` with fewer than a global batch.
    """

    def __init__(
        self, num_samples: int, global_batch_size: int, *, seed: int = 0, shuffle: bool = False, tail: Tail = "drop", endless: bool = True
    ) -> None:
        super().__init__(global_batch_size, seed=seed, tail=tail, endless=endless)
        if num_samples < 1:
            raise DataError("the dataset is empty: 0 samples")
        self.num_samples = num_samples
        self.shuffle = shuffle
        self._places_per_epoch = self._places(0)
        self.samples_per_epoch = min(num_samples, self._places_per_epoch)
        self.dropped_per_epoch = num_samples - self.samples_per_epoch
        self.num_batches = None if endless else self._places_per_epoch // global_batch_size
        self._epoch = -1
        self._ids: np.ndarray | range = range(0)

    def _count(self, epoch: int) -> int:
        return self.num_samples

    def _locate(self, place: int) -> tuple[int, int]:
        return divmod(place, self._places_per_epoch)

    def _slice(self, epoch: int, start: int, stop: int) -> list[Row]:
        if epoch != self._epoch:
            self._epoch, self._ids = epoch, self._permutation(epoch)
        return [((epoch, int(sample)),) for sample in self._ids[start:stop]]

    def _permutation(self, epoch: int) -> np.ndarray | range:
        """All sample ids in the order of ``epoch``."""
        return permutation(self.num_samples, self.seed, epoch) if self.shuffle else range(self.num_samples)


def permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    """The numbers below ``count`` in an order of the seed's and the epoch's own, int64 ``[count]``."""
    import numpy as np

    return np.argsort(random_keys(count, seed, epoch), kind="stable")


def random_keys(count: int, seed: int, epoch: int, stream: int = 0) -> np.ndarray:
    """Random numbers to sort by, uint64 ``[count]``; each ``stream`` of an epoch has its own.

    The raw output of a counter-based generator, since numpy promises the same raw output in every version, which it does not for ``permutation``.
    """
    import numpy as np

    counter, key = (np.array(words, dtype=np.uint64) for words in ([0, 0, 0, stream], [seed, epoch]))
    return np.random.Philox(counter=counter, key=key).random_raw(count)
