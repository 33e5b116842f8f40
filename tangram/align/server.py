"""A process that has imported what a rank needs and forks ranks from itself: a launch costs a second, not ten for each rank.

``python -m tangram.align.server`` reads requests from the standard input, each a line of JSON, and answers with the exit status, a line each, once
the ranks have ended. The end of the input ends it and every rank, so that who started it leaves none behind, even when killed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, BinaryIO

from tangram.platform.ports import free_ports

Request = dict[str, Any]
"""``module``, whose ``main(arguments)`` a rank runs; ``arguments``; ``processes``; ``preload``: modules to import before forking; ``log``: file for
all output; ``environment`` and ``folder`` of the caller."""


def main() -> None:
    """Serve until the input ends."""
    with os.fdopen(os.dup(1), "wb", buffering=0) as replies:
        woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(wake)
        while line := sys.stdin.buffer.readline():
            request = json.loads(line)
            _write_to(request["log"])
            _preload(request["preload"])
            status = _watch(_fork_all(request, replies), woken)
            replies.write(b"%d\n" % status)


def _write_to(path: str) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)


def _preload(modules: Sequence[str]) -> None:
    for name in modules:
        try:
            module, _, function = name.partition(":")
            found = importlib.import_module(module)
            if function:
                getattr(found, function)()
        except Exception:  # the ranks meet it again, and tell it
            traceback.print_exc()
    # A rank that collects garbage leaves alone what it was forked with: half a million objects, whose pages it would also copy.
    gc.collect()
    gc.freeze()


def _fork_all(request: Request, replies: BinaryIO) -> set[int]:
    (port,) = free_ports(1)
    size = str(request["processes"])
    shared = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    ranks = set()
    for rank in range(request["processes"]):
        sys.stdout.flush()
        if (process := os.fork()) == 0:
            place = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            _end_with(partial(_be_a_rank, request, place, replies))
        ranks.add(process)
    return ranks


def _end_with(work: Callable[[], int]) -> None:
    """End this process with the status that ``work`` returns, without what the server would do at its end."""
    status = 1
    try:
        status = work()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(status)


def _be_a_rank(request: Request, place: dict[str, str], replies: BinaryIO) -> int:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    replies.close()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.environ.clear()
    os.environ.update({**request["environment"], **place})
    os.chdir(request["folder"])
    return int(importlib.import_module(request["module"]).main(request["arguments"]))


def _watch(ranks: set[int], woken: int) -> int:
    """Wait for the ranks; one that fails ends the others.

    Returns:
        0, or the status of the first that failed; of one that a signal killed, its negative number.
    """
    status = 0
    while ranks:
        ready, _, _ = select.select([0, woken], [], [])
        if 0 in ready:  # nobody asks while ranks are at work: this is the end
            _kill(ranks)
            os._exit(1)
        os.read(woken, 4096)
        while ranks and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            ranks.discard(ended[0])
            code = os.waitstatus_to_exitcode(ended[1])
            if code and not status:
                status = code
                _kill(ranks)
    return status


def _kill(ranks: set[int]) -> None:
    for process in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


if __name__ == "__main__":
    main()
