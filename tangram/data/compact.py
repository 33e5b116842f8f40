"""A micro-batch on its way from the process that reads to the one that trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tangram.data.patches import PixelBytes


@dataclass(frozen=True)
class CompactBatch:
    """A micro-batch before it becomes tensors: arrays, pixels as bytes, and what is neither.

    Between processes all of it goes through one pipe. Torch would open a file of shared memory for every tensor, however small, and fetch each over a
    socket of its own, which takes longer than to copy the bytes.

    Args:
        entries: the micro-batch, with a numpy array or ``PixelBytes`` where it has a tensor in the end.
    """

    entries: dict[str, Any]

    def tensors(self) -> dict[str, Any]:
        """The micro-batch as a model takes it; the tensors are its own."""
        import numpy as np
        import torch

        def tensor(entry: Any) -> Any:
            if isinstance(entry, PixelBytes):
                return torch.from_numpy(entry.expand())
            return torch.from_numpy(entry) if isinstance(entry, np.ndarray) else entry

        return {name: tensor(entry) for name, entry in self.entries.items()}

    def pin_memory(self) -> dict[str, Any]:
        """The same in page-locked memory; torch's loader calls this, in a thread of its own, where it is asked to pin."""
        import torch

        return {name: entry.pin_memory() if isinstance(entry, torch.Tensor) else entry for name, entry in self.tensors().items()}
