"""Starts this machine's processes of a run through torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

import psutil

from tangram.guard import INTERRUPTED

TERMINAL_SECONDS = 3.0
"""After Ctrl-C the processes, which have it from the terminal too, get this long to end by themselves."""


def launch(processes: int, module: str, arguments: Sequence[str]) -> int:
    """Run ``python -m module arguments`` in ``processes`` processes of this machine and wait.

    SIGTERM is handed to the processes themselves: torchrun would count it as its own failure, and kill them half a minute later. Ctrl-C
    reaches all of them from the terminal; a SIGINT that was sent to this process alone is handed to torchrun. Threads are shared out over
    the processes unless OMP_NUM_THREADS is set.

    Returns:
        Exit status of torchrun: 0, or 1 where a process failed. 130 after Ctrl-C.
    """
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m", module, *arguments]
    child = subprocess.Popen(command, env=environment)

    def hand_on(number: int, frame: FrameType | None) -> None:
        with suppress(psutil.NoSuchProcess):
            # Before it has started any, torchrun is the one to end.
            for process in psutil.Process(child.pid).children() or [child]:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)

    interrupted = threading.Event()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not interrupted.is_set():
            interrupted.set()
            late = threading.Timer(TERMINAL_SECONDS, child.send_signal, (number,))
            late.daemon = True
            late.start()

    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, hand_on), signal.SIGINT: signal.signal(signal.SIGINT, interrupt)}
    try:
        status = child.wait()
        return INTERRUPTED if interrupted.is_set() and status else status
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
