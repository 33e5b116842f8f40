"""What one rank makes for all."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from tangram.training.failure import POLL_SECONDS, connect

T = TypeVar("T")
_calls = itertools.count()


def from_first_rank(make: Callable[[], T]) -> T:
    """What ``make`` gives on rank 0, on all ranks; all must call it, in the same order.

    ``make`` may take longer than a collective would wait: the others look for a key in the launch's store. If rank 0 fails meanwhile they end with it
    (``SharedFailure``), and if it is killed the store goes with it or torchrun ends them.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return make()
    store = connect()
    key = f"tangram/made/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_calls)}"
    made: list[T | None] = [None]
    if dist.get_rank() == 0:
        made = [make()]
        store.set(key, "1")
    else:
        while not store.check([key]):
            time.sleep(POLL_SECONDS)
    dist.broadcast_object_list(made)
    return made[0]  # type: ignore[return-value]
