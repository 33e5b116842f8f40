"""What records a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tangram.backends.engine import Batch, ForwardResult


class RunTrace(Protocol):
    """Records one ``forward_backward`` of an engine. Every rank of a run has one, and calls both methods."""

    def begin(self, micro_batches: Sequence[Batch]) -> None:
        """The next ``forward_backward`` is of these micro-batches of this rank."""

    def finish(self, result: ForwardResult) -> None:
        """Write parameters and their gradients, and end the trace. Before ``step``; collective."""
