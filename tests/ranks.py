"""Several ranks of a test, forked from a server that has torch and transformers imported already: a launch costs a second, not ten.

    results = on_ranks(2, Path(__file__).with_name("cases_x.py"), "function", *arguments)

calls ``function(*arguments)`` of that file on both ranks, in an environment as torchrun makes it (a run file's engine joins by itself), and
gives what each returned, in order. Arguments and results are pickled, so tensors travel as numpy arrays or files.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import select
import sys
import threading
import time
import traceback
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tangram.platform.ports import free_ports

PATIENCE = 240
"""Seconds after which ranks that should have ended are killed."""


@cache
def _server() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    return context


def on_ranks(world_size: int, file: Path, function: str, *arguments: Any, patience: float = PATIENCE) -> list[Any]:
    """What ``function`` returned on each rank.

    Raises:
        AssertionError: it failed on a rank, with the trace of the first that did, or ranks hung and were killed.
    """
    (port,) = free_ports(1)
    pipes, processes = [], []
    for rank in range(world_size):
        mine, theirs = _server().Pipe(duplex=False)
        process = _server().Process(target=_rank, args=(theirs, rank, world_size, port, str(file), function, arguments), daemon=True)
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
    try:
        return _collect(pipes, time.monotonic() + patience, f"{file.name}:{function}")
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collect(pipes: list[Connection], deadline: float, what: str) -> list[Any]:
    waiting, found = dict(enumerate(pipes)), {}
    while waiting:
        ready = multiprocessing.connection.wait(list(waiting.values()), max(0.0, deadline - time.monotonic()))
        assert ready, f"{what}: ranks {sorted(waiting)} hung"
        for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
            try:
                good, value = waiting.pop(rank).recv()
            except EOFError:
                good, value = False, "died"
            assert good, f"{what}, rank {rank}: {value}"
            found[rank] = value
    return [found[rank] for rank in sorted(found)]


def _end_with_the_test(pipe: Connection) -> None:
    """End this rank, whatever it waits for, when nobody reads its pipe any more: the test was killed, or has what it wanted."""
    hang_up = select.poll()
    hang_up.register(pipe.fileno(), 0)
    hang_up.poll()
    os._exit(1)


def _rank(pipe: Connection, rank: int, world_size: int, port: int, file: str, function: str, arguments: tuple[Any, ...]) -> None:
    import torch

    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # as with torchrun; else data workers come from a server of their own
    threading.Thread(target=_end_with_the_test, args=(pipe,), daemon=True).start()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    try:
        spec = importlib.util.spec_from_file_location(Path(file).stem, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        pipe.send((True, getattr(module, function)(*arguments)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    # Other ranks may still be in a collective with this one; its connections go with the process, which on_ranks ends.
    time.sleep(PATIENCE)
