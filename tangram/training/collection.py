"""When Python looks for cycles of garbage: when it likes, or after so many steps on all ranks together."""

from __future__ import annotations

import gc
from types import TracebackType


class GarbageCollection:
    """Ranks that collect each at its own time make each other wait; with an interval all do so after the same steps.

    Args:
        interval: steps; 0: Python decides.
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval

    def __enter__(self) -> GarbageCollection:
        if self.interval:
            gc.collect()
            gc.disable()
        return self

    def collect(self) -> None:
        """At a moment when all ranks can, such as before and after a validation."""
        if self.interval:
            gc.collect()

    def step(self, completed: int) -> None:
        """After each step, with their number."""
        if self.interval and completed % self.interval == 0:
            gc.collect()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.interval:
            gc.enable()
