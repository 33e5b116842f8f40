"""Whether a test and its processes still do something: a busy machine makes them slow, but only a hang makes them still."""

from __future__ import annotations

import os
import time
from pathlib import Path

LEAST = 0.25
"""Processor seconds, for each process that there is, that count as work. Ranks that wait for each other take 0.1 in a minute."""


def processes() -> dict[int, tuple[int, float]]:
    """Parent and processor seconds of every process of the machine; none where there is no /proc."""
    found, tick = {}, os.sysconf("SC_CLK_TCK")
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        found[int(path.parent.name)] = int(fields[1]), (int(fields[11]) + int(fields[12])) / tick
    return found


class Watch:
    """Look now and then; ``still`` says for how long nothing has been done.

    Args:
        least: processor seconds, for each process that there is, that count as work.
    """

    def __init__(self, least: float = LEAST) -> None:
        self.least = least
        self._own, self._others = time.process_time(), _descendants()
        self._worked = 0.0
        self._since = time.monotonic()

    def still(self) -> float:
        """Seconds since this process and those that it started, and they, last did some work."""
        own, others = time.process_time(), _descendants()
        self._worked += own - self._own + sum(max(0.0, seconds - self._others.get(pid, 0.0)) for pid, seconds in others.items())
        if self._worked >= self.least * (1 + len(others)):
            self._worked, self._since = 0.0, time.monotonic()
        # What looking costs is no work.
        self._own, self._others = time.process_time(), others
        return time.monotonic() - self._since


def _descendants() -> dict[int, float]:
    """Processor seconds of each process that this one, or one of them, started."""
    known, ours = processes(), {os.getpid()}
    grown = True
    while grown:
        more = {pid for pid, (parent, _) in known.items() if parent in ours} - ours
        ours |= more
        grown = bool(more)
    return {pid: seconds for pid, (_, seconds) in known.items() if pid in ours and pid != os.getpid()}
