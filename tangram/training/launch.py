"""Starts this machine's processes of a run through torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType


def launch(processes: int, module: str, arguments: Sequence[str], threads: int | None = None) -> int:
    """Run ``python -m module arguments`` in ``processes`` processes of this machine and wait.

    SIGTERM and SIGINT go on to torchrun, which hands them to its processes.

    Args:
        threads: of each process; None: this machine's cores shared out, unless OMP_NUM_THREADS is set.

    Returns:
        Exit status: the first failed process's own, as torchrun tells it, or 0.
    """
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", str(threads or max(1, (os.cpu_count() or 1) // processes)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m", module, *arguments]
    child = subprocess.Popen(command, env=environment)

    def hand_on(number: int, frame: FrameType | None) -> None:
        child.send_signal(number)

    before = {number: signal.signal(number, hand_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
