"""Starts this machine's processes of a run through torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType

import psutil


def launch(processes: int, module: str, arguments: Sequence[str]) -> int:
    """Run ``python -m module arguments`` in ``processes`` processes of this machine and wait.

    SIGTERM is handed to the processes themselves: torchrun would count it as its own failure, and kill them half a minute later. Threads are
    shared out over the processes unless OMP_NUM_THREADS is set.

    Returns:
        Exit status of torchrun: 0, or 1 where a process failed.
    """
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m", module, *arguments]
    child = subprocess.Popen(command, env=environment)

    def hand_on(number: int, frame: FrameType | None) -> None:
        for process in psutil.Process(child.pid).children():
            process.send_signal(number)

    before = signal.signal(signal.SIGTERM, hand_on)
    try:
        return child.wait()
    finally:
        signal.signal(signal.SIGTERM, before)
