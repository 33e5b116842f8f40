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
PATIENCE = timedelta(minutes=10)
"""For the process that holds the store, which starts where and when the launcher likes."""
MEETING_SECONDS = 30.0
"""That a rank which fails before it has met the others waits, to tell them."""


class SharedFailure:
    """Between ``with`` and its end, an exception here ends the other processes of a torchrun launch.

    The first rank to fail raises on, and so prints; a rank that fails after it, or waits for it, leaves without a word. One that was killed
    says nothing, so the first that misses it says so, in place of the trace of its own collective. A collective that
    misses a rank can wait for many minutes, and torchrun's SIGTERM means "save and stop" to the loop, so ranks must hear of it by other ways:
    a key in the launch's store, watched by a thread. To be entered before anything that can fail on one rank alone: it needs no process group.
    """

    def __init__(self) -> None:
        self._key = f"tangram/failed/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._over, self._met = threading.Event(), threading.Event()
        self._store: dist.Store | None = None

    def __enter__(self) -> SharedFailure:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            if holds_store():
                self._meet()
            threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        if int(os.environ.get("WORLD_SIZE", "1")) == 1 or not isinstance(error, Exception) or not self._met.wait(MEETING_SECONDS):
            return
        assert self._store is not None
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
        # The others look for the key now and then, and want the store until they leave.
        before_leaving.append(lambda: time.sleep(LEAVE_SECONDS + 4 * POLL_SECONDS))

    def _meet(self) -> None:
        self._store = connect()
        self._met.set()

    def _watch(self) -> None:
        try:
            if self._store is None:
                # Its holder may come late, or have failed and gone; what this rank has to say does not wait for that.
                self._meet()
            assert self._store is not None
            while not self._over.wait(POLL_SECONDS):
                # Asked after the key: whoever adds it has ended its own watch before, and is not to be taken for another rank.
                if self._store.check([self._key]) and not self._over.is_set():
                    time.sleep(LEAVE_SECONDS)
                    os._exit(FAILED)
        except (dist.DistError, ConfigError):
            return


def lost_connection(error: BaseException) -> bool:
    """Whether an exception says that the other end of a connection between ranks is gone. Gloo has no class of its own for that."""
    if isinstance(error, dist.DistNetworkError):
        return True
    return isinstance(error, RuntimeError) and bool(re.search(r"Connection (closed|reset) by peer|Broken pipe", str(error)))


def holds_store() -> bool:
    """Whether the launch's store is this process's: rank 0 holds it where torchrun has none."""
    return os.environ["RANK"] == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def connect() -> dist.TCPStore:
    """A connection of its own to the launch's store; nobody need have joined the process group.

    Raises:
        ConfigError: there is none.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        return dist.TCPStore(host, port, is_master=holds_store(), wait_for_workers=False, multi_tenant=True, timeout=PATIENCE)
    except dist.DistError as error:
        reason = " ".join(str(error).split()).partition(". ")[0][:200]
        raise ConfigError(f"MASTER_ADDR {host}, MASTER_PORT {port}: ranks cannot meet there ({reason}); correct them, or take another port") from None
