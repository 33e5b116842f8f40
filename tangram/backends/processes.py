"""The process group of a run."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist


def join_processes(backend: str, timeout: timedelta) -> None:
    """Join the processes of torchrun's environment, or be one alone; nothing where that was done before."""
    if dist.is_initialized():
        return
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
