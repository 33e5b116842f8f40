"""Orders that put samples of one size together, so that less is padded and less waits.

Both begin with the permutation of ``GlobalOrder`` and rearrange it within windows of whole global batches, so every epoch still has every
sample once and its windows are random. The samples that fill no whole global batch are the permutation's last, whatever their size: what is
dropped is no matter of length.
"""

from __future__ import annotations

from abc import abstractmethod
from itertools import pairwise
from typing import TYPE_CHECKING

from tangram.config.data import Tail
from tangram.data.sampler import GlobalOrder, permutation, random_keys
from tangram.data.sizes import SampleSizes
from tangram.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

WINDOW = 50
"""Global batches of a window; fewer in a small dataset, so that an epoch has four windows at least. transformers' length grouping has the
same two numbers."""
SHUFFLE_WITHIN = 1
"""Stream of random numbers that windows are shuffled by."""


class _WindowedOrder(GlobalOrder):
    """Rearranges the order within windows of global batches.

    Args:
        sizes: of all samples.
        others: as ``GlobalOrder``.

    Raises:
        DataError: as ``GlobalOrder``.
    """

    def __init__(
        self, sizes: SampleSizes, global_batch_size: int, *, seed: int = 0, shuffle: bool = False, tail: Tail = "drop", endless: bool = True
    ) -> None:
        super().__init__(len(sizes.tokens), global_batch_size, seed=seed, shuffle=shuffle, tail=tail, endless=endless)
        self.sizes = sizes
        self.window = max(1, min(WINDOW, self.num_samples // (4 * global_batch_size)))
        """Global batches of a window."""

    def _permutation(self, epoch: int) -> np.ndarray:
        import numpy as np

        count, size = self.num_samples, self.global_batch_size
        ids = permutation(count, self.seed, epoch) if self.shuffle else np.arange(count)
        keys = random_keys(count, self.seed, epoch, SHUFFLE_WITHIN) if self.shuffle else np.arange(count)
        # An epoch that begins in the midst of a global batch first fills that up.
        lead = min(-epoch * count % size, count) if self.tail == "continue" else 0
        rest = count - (count - lead) % size
        edges = [*range(lead, rest, self.window * size), rest]
        windows = [self._arranged(ids[start:stop], keys[start:stop]) for start, stop in pairwise(edges)]
        whole = self._first(np.concatenate([ids[:0], *windows]))
        return np.concatenate([self._arranged(ids[:lead], keys[:lead]), whole, self._arranged(ids[rest:], keys[rest:])])

    @abstractmethod
    def _arranged(self, ids: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """The sample ids of a window in the order wanted; ``keys`` are ascending numbers or random ones to sort by."""

    def _first(self, ids: np.ndarray) -> np.ndarray:
        """The sample ids of all windows, with what should come first at the front."""
        return ids


class LengthGroupedOrder(_WindowedOrder):
    """Global batches of samples that are about equally long.

    A window is sorted by tokens, longest first, cut into global batches, and these are shuffled (without ``shuffle`` they stay sorted). Micro-batches
    are runs of the sorted samples. The global batch with the longest sample comes first in each epoch, so that a lack of memory shows at once.
    """

    def _arranged(self, ids: np.ndarray, keys: np.ndarray) -> np.ndarray:
        import numpy as np

        batch = self.global_batch_size
        ids = ids[np.argsort(-self.sizes.tokens[ids], kind="stable")]
        whole = len(ids) // batch
        batches = ids[: whole * batch].reshape(whole, batch)
        return np.concatenate([batches[np.argsort(keys[:whole], kind="stable")].ravel(), ids[whole * batch :]])

    def _first(self, ids: np.ndarray) -> np.ndarray:
        import numpy as np

        if not len(ids):
            return ids
        batches = ids.reshape(-1, self.global_batch_size)
        longest = int(np.argmax(self.sizes.tokens[batches[:, 0]]))
        return np.concatenate([batches[longest], batches[:longest].ravel(), batches[longest + 1 :].ravel()])


class BucketOrder(_WindowedOrder):
    """Micro-batches of samples whose largest picture or frame has the same grid.

    Within a window samples are sorted into buckets by shape and each bucket is cut into micro-batches, which are shuffled. What is left of the
    buckets is joined, neighbouring shapes together, at the end of the window. A global batch that two epochs share (``tail="continue"``) is
    sorted, but its micro-batches may hold two shapes.

    Args:
        micro_batch_size: the run's; ``step`` must be asked for the same.
        others: as ``GlobalOrder``.

    Raises:
        ConfigError: a global batch is no whole number of micro-batches.
        DataError: as ``GlobalOrder``.
    """

    def __init__(
        self,
        sizes: SampleSizes,
        global_batch_size: int,
        micro_batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = False,
        tail: Tail = "drop",
        endless: bool = True,
    ) -> None:
        super().__init__(sizes, global_batch_size, seed=seed, shuffle=shuffle, tail=tail, endless=endless)
        if global_batch_size % micro_batch_size:
            raise ConfigError(
                f"global_batch_size {global_batch_size} is not a multiple of micro_batch_size {micro_batch_size}, which BucketBatchSampler needs"
            )
        self.micro_batch_size = micro_batch_size

    def _arranged(self, ids: np.ndarray, keys: np.ndarray) -> np.ndarray:
        import numpy as np

        size = self.micro_batch_size
        shapes = self.sizes.shapes[ids]
        by_shape = np.argsort(shapes, kind="stable")
        _, starts, counts = np.unique(shapes[by_shape], return_index=True, return_counts=True)
        fills = np.arange(len(ids)) - np.repeat(starts, counts) < np.repeat(counts // size * size, counts)
        whole = by_shape[fills].reshape(-1, size)
        shuffled = whole[np.argsort(keys[whole[:, 0]], kind="stable")]
        return ids[np.concatenate([shuffled.ravel(), by_shape[~fills]])]
