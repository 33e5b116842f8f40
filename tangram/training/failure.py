"""One rank's failure ends all ranks within seconds, whatever collective they wait in."""

from __future__ import annotations

import os
import sys
import threading
import time
from types import TracebackType

import torch.distributed as dist

from tangram.guard import GRACE_SECONDS, before_leaving

POLL_SECONDS = 0.25
LEAVE_SECONDS = GRACE_SECONDS + 0.5
"""From a failure to the exit of the other ranks: the failed one prints its line meanwhile, and stays until they have gone, since a closed
connection would make them fail too."""
FAILED = 1


class SharedFailure:
    """Between ``with`` and its end, an exception here ends the other processes of a torchrun launch.

    The first rank to fail raises on, and so prints; a rank that fails after it, or waits for it, leaves without a word. A collective that
    misses a rank can wait for many minutes, and torchrun's SIGTERM means "save and stop" to the loop, so ranks must hear of it by other ways:
    a key in the launch's store, watched by a thread. To be entered once the process group is there.
    """

    def __init__(self) -> None:
        self._key = f"tangram/failed/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._over = threading.Event()
        self._store: dist.TCPStore | None = None

    def __enter__(self) -> SharedFailure:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            self._store = _connect()
            threading.Thread(target=self._watch, args=(_connect(),), daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        if self._store is None or not isinstance(error, Exception):
            return
        try:
            first = self._store.add(self._key, 1) == 1
        except dist.DistError:
            # The store went with the process that held it: this failure only follows from another's.
            sys.stderr.write(f"[rank {os.environ.get('RANK', '0')}] leaves, since another process has ended\n")
            os._exit(FAILED)
        if not first:
            time.sleep(LEAVE_SECONDS)
            os._exit(FAILED)
        before_leaving.append(lambda: time.sleep(LEAVE_SECONDS))

    def _watch(self, store: dist.TCPStore) -> None:
        while not self._over.wait(POLL_SECONDS):
            try:
                failed = store.check([self._key])
            except dist.DistError:
                return
            if failed:
                time.sleep(LEAVE_SECONDS)
                os._exit(FAILED)


def _connect() -> dist.TCPStore:
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
