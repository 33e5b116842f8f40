"""Rows of several samples."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from tangram.config.data import Tail
from tangram.data.orders.packing import PACKERS, Strategy
from tangram.data.sampler import EpochOrder, Row, permutation
from tangram.data.sizes import SampleSizes
from tangram.errors import DataError

if TYPE_CHECKING:
    import numpy as np


class PackedOrder(EpochOrder):
    """Rows of up to ``cutoff`` tokens; a global batch is ``global_batch_size`` of them.

    Rows are filled from each epoch's own order, so epochs differ in how many there are. To find a global batch, the rows of the epochs before it
    are counted, from the sizes alone: about two seconds for each million samples. In a row samples stand in the epoch's order, and rows
    stand in the order of their first samples.

    Args:
        sizes: of all samples; those of 0 tokens stand in no row and are counted in ``skipped_per_epoch``.
        global_batch_size: rows of one optimizer step.
        cutoff: most tokens of a row, with the padding of each sample to ``pad_to_multiple_of``. A sample that only its padding takes beyond that
            has a row of its own.
        strategy: "knapsack": within windows the largest samples first; "sequential": in order, as long as they fit.
        window: samples of a window of the knapsack, ``preprocessing_batch_size``.
        pad_to_multiple_of: each sample of a row is padded to a multiple of this.
        shuffle: as ``GlobalOrder``.
        seed, tail, endless: as ``EpochOrder``; "drop" leaves out rows, and ``dropped_per_epoch`` counts their samples in the first epoch.

    Raises:
        DataError: no sample that can be used, one longer than ``cutoff``, or an epoch with ``tail="drop"`` that fills fewer rows than a global
            batch has.
    """

    def __init__(
        self,
        sizes: SampleSizes,
        global_batch_size: int,
        cutoff: int,
        *,
        strategy: Strategy = "knapsack",
        window: int = 1000,
        pad_to_multiple_of: int = 1,
        seed: int = 0,
        shuffle: bool = False,
        tail: Tail = "drop",
        endless: bool = True,
    ) -> None:
        super().__init__(global_batch_size, seed=seed, tail=tail, endless=endless)
        self.sizes = sizes
        self.cutoff = cutoff
        self.shuffle = shuffle
        self.num_samples = len(sizes.tokens)
        self._check(sizes.tokens)
        # Sizes and room in units of what a sample is padded to.
        self._room = cutoff // pad_to_multiple_of
        self._units = -(-sizes.tokens // pad_to_multiple_of)
        self._window = window if strategy == "knapsack" else self.num_samples
        self._packer = PACKERS[strategy]
        self._counts: dict[int, int] = {}
        self._packed: tuple[int, np.ndarray, np.ndarray] | None = None
        places = self._places(0)
        ids, ends = self._pack(0)
        trained = ids[: ends[min(places, len(ends) - 1)]]
        self.samples_per_epoch = len(trained)
        self.dropped_per_epoch = len(ids) - len(trained)
        self.skipped_per_epoch = self.num_samples - len(ids)
        self.num_batches = None if endless else places // global_batch_size
        self.efficiency = float(sizes.tokens[trained].sum()) / (min(places, len(ends) - 1) * cutoff)
        """Tokens of the first epoch's rows, divided by what the rows could hold."""

    def _check(self, tokens: np.ndarray) -> None:
        if not tokens.any():
            raise DataError(f"the dataset has no sample that can be used: {len(tokens)} samples, all of them of 0 tokens")
        longest = int(tokens.argmax())
        if tokens[longest] > self.cutoff:
            length = int(tokens[longest])
            raise DataError(f"sample {longest} has {length} tokens, a packed row holds {self.cutoff}; raise cutoff_len or remove the sample")

    def _too_few(self, epoch: int, count: int) -> DataError:
        return DataError(
            f"epoch {epoch}: the dataset's {self.num_samples} samples fill {count} rows of {self.cutoff} tokens, too few for one global batch of "
            f"{self.global_batch_size} rows; add samples, lower global_batch_size, or set dataloader_param.tail to pad or continue"
        )

    def _count(self, epoch: int) -> int:
        if epoch not in self._counts:
            self._counts[epoch] = len(self._pack(epoch)[1]) - 1
        return self._counts[epoch]

    def _slice(self, epoch: int, start: int, stop: int) -> list[Row]:
        ids, ends = self._pack(epoch)
        stop = min(stop, len(ends) - 1)
        return [tuple((epoch, int(sample)) for sample in ids[ends[row] : ends[row + 1]]) for row in range(start, stop)]

    def _pack(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The sample ids of an epoch row after row, int64 ``[samples]``, and where rows begin and end among them, int64 ``[rows + 1]``."""
        import numpy as np

        if not self.shuffle:
            epoch = 0  # All are alike.
        if self._packed is None or self._packed[0] != epoch:
            order = permutation(self.num_samples, self.seed, epoch) if self.shuffle else np.arange(self.num_samples)
            order = order[self._units[order] > 0]
            units = self._units[order].tolist()
            items, lengths = [], []
            for start in range(0, len(order), self._window):
                rows = self._packer(units[start : start + self._window], self._room)
                lengths.append(np.fromiter(map(len, rows), dtype=np.int64, count=len(rows)))
                items.append(start + np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=int(lengths[-1].sum())))
            ends = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
            self._packed = epoch, order[np.concatenate(items)], ends
        return self._packed[1:]
