"""How large the samples of a dataset are: what orders that group, pack or balance need to know beforehand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tangram.data.bad_samples import Skip
from tangram.data.dataset import ConversationDataset
from tangram.data.encode import SampleEncoder
from tangram.data.encode_all import encode_all

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class SampleSizes:
    """One number per sample and kind, ``[samples]`` each."""

    tokens: np.ndarray
    """int32; 0: the sample cannot be used and is skipped."""
    patches: np.ndarray
    """int32, over all its media, before merging."""
    shapes: np.ndarray
    """int64: grid height * 65536 + grid width of its largest medium; 0: it has none."""

    @classmethod
    def of_columns(cls, columns: np.ndarray) -> SampleSizes:
        """Args:
        columns: ``[samples, 3]``: tokens, patches, shape.
        """
        import numpy as np

        return cls(columns[:, 0].astype(np.int32), columns[:, 1].astype(np.int32), columns[:, 2].astype(np.int64))


def compute_sizes(dataset: ConversationDataset, encoder: SampleEncoder, workers: int) -> tuple[SampleSizes, list[Skip]]:
    """The sizes of all samples, and those that cannot be used, by encoding them.

    Args:
        workers: processes; 0: this one.

    Raises:
        DataError: as ``encode_all``.
    """
    import numpy as np

    columns, faults = [], []
    for chunk in encode_all(dataset, encoder, workers, wants_bytes=False):
        columns.append(chunk.sizes)
        faults += chunk.faults
    return SampleSizes.of_columns(np.concatenate(columns)), faults
