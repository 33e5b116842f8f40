"""Python's garbage collector by the step, so that no rank stops to collect while the others wait for it."""

from __future__ import annotations

import gc
from types import TracebackType


class Collector:
    """Collects every ``interval`` steps and around validation, on all ranks at once; between them never.

    Args:
        manual: False leaves it to Python.
        interval: steps; 0: at validation alone.
    """

    def __init__(self, manual: bool, interval: int) -> None:
        self._manual, self._interval = manual, interval

    def __enter__(self) -> Collector:
        self._was_on = gc.isenabled()
        if self._manual:
            gc.disable()
            gc.collect()
        return self

    def step(self, step: int) -> None:
        """After step ``step``."""
        if self._manual and self._interval and step % self._interval == 0:
            gc.collect()

    def validation(self) -> None:
        """Before and after a validation."""
        if self._manual:
            gc.collect()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._manual and self._was_on:
            gc.enable()
