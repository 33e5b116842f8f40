"""What writing a checkpoint takes, before and while it is done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class WriteSettings:
    """How files are written.

    Args:
        workers: tensors copied at the same time.
        progress: called with bytes written so far and bytes in all; from any thread.
    """

    workers: int = 2
    progress: Callable[[int, int], None] | None = None


@dataclass(frozen=True)
class WritePlan:
    """Which files will be written, known before the first byte is."""

    files: tuple[tuple[str, int], ...]
    """Path inside the output directory, and size in bytes."""
    peak_memory: int
    """Upper bound of the anonymous memory that copying takes, bytes."""

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(size for _, size in self.files)
