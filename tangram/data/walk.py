"""Walk over the samples of a dataset in several processes, of which one may die."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

from tangram.errors import DataError

R = TypeVar("R")

CHUNK = 64
"""Samples that a process takes at a time."""
IDLE_SECONDS = 5.0
"""A process that waits looks this often whether its parent is still there."""
DEATHS_BETWEEN_SAMPLES = 3
"""So many may die without a sample in hand; then it is no sample's fault."""


@dataclass(frozen=True)
class Died:
    """What is known of a process that ended while it looked at a sample."""

    exit_code: int

    def __str__(self) -> str:
        if self.exit_code < 0:
            return f"the process that read it was ended by {signal.Signals(-self.exit_code).name}"
        return f"the process that read it ended with status {self.exit_code}"


def walk(examine: Callable[[int], R], length: int, workers: int) -> Iterator[tuple[int, R | Died]]:
    """Call ``examine`` with every index below ``length``, once each, and yield index and result as they come.

    Where a process dies, the sample it had in hand gets ``Died`` and the others are walked all the same.

    Args:
        examine: need not be picklable, its results must; its exceptions end the walk.
        workers: processes; 0: this one.

    Raises:
        DataError: processes die without a sample in hand.
    """
    if workers == 0:
        for index in range(length):
            yield index, examine(index)
        return
    yield from _Pool(examine, length, workers).run()


class _Worker(Generic[R]):
    """One process, its end of the pipe, and what it has in hand."""

    def __init__(self, examine: Callable[[int], R]) -> None:
        # Forked: the dataset's index and the tokenizer are shared, not sent.
        context = multiprocessing.get_context("fork")
        self.connection, theirs = context.Pipe()
        self.current = context.Value("q", -1, lock=False)
        self.chunk: range | None = None
        self.process = context.Process(target=_serve, args=(theirs, self.current, examine, os.getpid()), daemon=True)
        self.process.start()
        theirs.close()

    def give(self, chunk: range | None) -> None:
        self.chunk = chunk
        # One that has died meanwhile shows when its results are read.
        with suppress(OSError):
            self.connection.send(chunk)


def _serve(connection: Connection, current: Any, examine: Callable[[int], Any], parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        while not connection.poll(IDLE_SECONDS):
            if os.getppid() != parent:
                return
        chunk: range | None = connection.recv()
        if chunk is None:
            return
        results: list[Any] = []
        try:
            for index in chunk:
                current.value = index
                results.append(examine(index))
        except Exception as fault:
            connection.send(fault)
            return
        connection.send(results)
        current.value = -1


class _Pool(Generic[R]):
    def __init__(self, examine: Callable[[int], R], length: int, workers: int) -> None:
        self._examine = examine
        self._chunks = [range(start, min(start + CHUNK, length)) for start in range(0, length, CHUNK)][::-1]
        """What is still to be walked, from behind."""
        self._workers = [_Worker(examine) for _ in range(min(workers, len(self._chunks)))]
        self._idle_deaths = 0

    def run(self) -> Iterator[tuple[int, R | Died]]:
        try:
            for worker in self._workers:
                worker.give(self._chunks.pop())
            while self._workers:
                ready = wait([worker.connection for worker in self._workers])
                for worker in [w for w in self._workers if w.connection in ready]:
                    yield from self._take(worker)
        finally:
            for worker in self._workers:
                worker.process.terminate()
                worker.process.join()

    def _take(self, worker: _Worker[R]) -> Iterator[tuple[int, R | Died]]:
        assert worker.chunk is not None
        try:
            results = worker.connection.recv()
        except (EOFError, OSError):  # the pipe has no other end any more
            yield from self._bury(worker, worker.chunk)
            return
        if isinstance(results, Exception):
            raise results
        yield from zip(worker.chunk, results, strict=True)
        if self._chunks:
            worker.give(self._chunks.pop())
        else:
            worker.give(None)
            worker.process.join()
            self._workers.remove(worker)

    def _bury(self, worker: _Worker[R], chunk: range) -> Iterator[tuple[int, Died]]:
        worker.process.join()
        self._workers.remove(worker)
        died, index = Died(worker.process.exitcode or 0), worker.current.value
        if index in chunk:
            yield index, died
            left = [range(chunk.start, index), range(index + 1, chunk.stop)]
        else:
            self._idle_deaths += 1
            if self._idle_deaths > DEATHS_BETWEEN_SAMPLES:
                raise DataError(f"worker processes end without a sample in hand (status {died.exit_code}); use fewer, or --workers 0")
            left = [chunk]
        self._chunks += [part for part in left if part][::-1]
        if self._chunks:
            replacement = _Worker(self._examine)
            self._workers.append(replacement)
            replacement.give(self._chunks.pop())
