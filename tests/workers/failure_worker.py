"""On each rank: rank 1 meets a fault while the others wait for it. Usage: failure_worker.py collective|asleep|killed (the fault is a SIGKILL)."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from tangram.errors import DataError
from tangram.guard import guarded
from tangram.training.failure import SharedFailure
from tangram.training.signals import StopRequest


def action() -> int:
    dist.init_process_group("gloo")
    with SharedFailure(), StopRequest():
        dist.barrier()
        if os.environ["RANK"] == "1":
            if sys.argv[1] == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise DataError("sample 7: broken picture; mend it")
        if sys.argv[1] != "asleep":
            dist.all_reduce(torch.ones(1))
        # As a collective that a lost connection does not end.
        time.sleep(3600)
    return 0


if __name__ == "__main__":
    sys.exit(guarded("worker", action))
