"""What one rank makes for all, and what all must have alike."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from tangram.errors import DataError
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


def same_everywhere(what: str, value: object) -> None:
    """Compare a value over ranks; all must call it, in the same order.

    Args:
        value: of a dict, the error names the first entry that differs.

    Raises:
        DataError: on every rank, if two hold different ones.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    held: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(held, value)
    for rank, other in enumerate(held):
        if other != held[0]:
            first = held[0]
            if isinstance(first, dict) and isinstance(other, dict):
                key = next(key for key in [*first, *other] if first.get(key) != other.get(key))
                what, first, other = f"{what}, {key}", first.get(key, "none"), other.get(key, "none")
            raise DataError(f"{what}: {first} on rank 0, {other} on rank {rank}; give every node the same files")
