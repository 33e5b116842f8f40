"""SIGTERM, answered at the end of a step."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType


class StopRequest:
    """Between ``with`` and its end, SIGTERM asks for a stop instead of ending the process.

    The loop looks at ``asked``, agrees with the other ranks, saves and leaves with exit status 0. Further ones change nothing: schedulers
    signal whole process groups, and then torchrun hands its own SIGTERM on to ranks that have one already.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: signal.Handlers | object = None

    def __enter__(self) -> StopRequest:
        self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        signal.signal(signal.SIGTERM, self._before)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
