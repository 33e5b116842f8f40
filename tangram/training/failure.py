"""One rank's failure ends all ranks within seconds, whatever collective they wait in."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from datetime import timedelta
from types import TracebackType

import torch.distributed as dist

from tangram.errors import ConfigError
from tangram.guard import GRACE_SECONDS, before_leaving

POLL_SECONDS = 0.25
LEAVE_SECONDS = GRACE_SECONDS + 0.5
"""From a failure to the exit of the other ranks: the failed one prints its line meanwhile, and stays until they have gone, since a closed
connection would make them fail too."""
FAILED = 1
PATIENCE = timedelta(minutes=30)
"""For the process that holds the store, which starts where and when the launcher likes."""


class SharedFailure:
    """Between ``with`` and its end, an exception here ends the other processes of a torchrun launch.

    The first rank to fail raises on, and so prints; a rank that fails after it, or waits for it, leaves without a word. One that was killed
    says nothing, so the first that misses it says so, in place of the trace of its own collective. A collective that
    misses a rank can wait for many minutes, and torchrun's SIGTERM means "save and stop" to the loop, so ranks must hear of it by other ways:
    a key in the launch's store, watched by a thread. To be entered before anything that can fail on one rank alone: it needs no process group.
    """

    def __init__(self) -> None:
        self._key = f"tangram/failed/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._over = threading.Event()
        self._store: dist.TCPStore | None = None

    def __enter__(self) -> SharedFailure:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            self._store = connect()
            threading.Thread(target=self._watch, args=(connect(),), daemon=True).start()
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
        if lost_connection(error):
            reason = " ".join(str(error).split()).partition(". ")[0][:200]
            sys.stderr.write(
                f"tangram: error: [rank {os.environ.get('RANK', '0')}] lost the connection to another process, which has ended (killed, or out of "
                f"memory?); see its log, and load the newest checkpoint to go on ({reason})\n"
            )
            sys.stderr.flush()
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


def lost_connection(error: BaseException) -> bool:
    """Whether an exception says that the other end of a connection between ranks is gone. Gloo has no class of its own for that."""
    if isinstance(error, dist.DistNetworkError):
        return True
    return isinstance(error, RuntimeError) and bool(re.search(r"Connection (closed|reset) by peer|Broken pipe", str(error)))


def connect() -> dist.TCPStore:
    """A connection of its own to the launch's store, which rank 0 holds where torchrun has none; nobody need have joined the process group.

    Raises:
        ConfigError: there is none.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    holds = os.environ["RANK"] == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        return dist.TCPStore(host, port, is_master=holds, wait_for_workers=False, multi_tenant=True, timeout=PATIENCE)
    except dist.DistError as error:
        reason = " ".join(str(error).split()).partition(". ")[0][:200]
        raise ConfigError(f"MASTER_ADDR {host}, MASTER_PORT {port}: ranks cannot meet there ({reason}); correct them, or take another port") from None
