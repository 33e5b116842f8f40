"""Worker processes that read: what each is at, which of them died, and their random state."""

from __future__ import annotations

import logging
import multiprocessing
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_int64
from typing import TYPE_CHECKING, Any

from tangram.data.sampler import PADDING, Row
from tangram.data.source import MicroBatchSource, Reading
from tangram.errors import DataError, TangramError

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

logger = logging.getLogger(__name__)

Describe = Callable[[int], str]
POLL_SECONDS = 0.2
LEAVE_SECONDS = 10.0
"""How long the thread that waits for workers may take to leave."""
DEATH_SECONDS = 5.0
"""How long a killed worker may take to die; one that waits for a file system that does not answer never does."""
NAMED = 16
"""Samples of a micro-batch that the board has room for."""
PID, SINCE, SAMPLE, COUNT, IDS = range(5)
WIDTH = IDS + NAMED


class Board:
    """What each worker is reading, in memory that all processes share.

    A worker that is killed can say nothing any more, and one that hangs does not; so each notes what it begins.

    Args:
        workers: number of slots; 1 where the main process reads.
        start_method: as that of the workers.
    """

    def __init__(self, workers: int, start_method: str | None = None) -> None:
        self.workers = workers
        self._cells: Any = multiprocessing.get_context(start_method).RawArray(c_int64, workers * WIDTH)

    def begin(self, slot: int, pid: int, samples: Sequence[int]) -> None:
        """Note the micro-batch that a worker has got."""
        at = slot * WIDTH
        self._cells[at + PID] = pid
        self._cells[at + COUNT] = len(samples)
        for i, sample in enumerate(samples[:NAMED]):
            self._cells[at + IDS + i] = sample
        self.note(slot, PADDING)

    def note(self, slot: int, sample: int) -> None:
        """Note the sample that a worker begins to read; ``PADDING``: it collates."""
        at = slot * WIDTH
        self._cells[at + SAMPLE] = sample
        self._cells[at + SINCE] = time.monotonic_ns()

    def end(self, slot: int) -> None:
        """Note that a worker has handed its micro-batch over."""
        self._cells[slot * WIDTH + SINCE] = 0

    def busy(self, slot: int) -> tuple[int, float, int] | None:
        """The sample that a worker is at, for how many seconds, and the moment it began; None: it waits."""
        at = slot * WIDTH
        since, sample = self._cells[at + SINCE], self._cells[at + SAMPLE]
        return (sample, (time.monotonic_ns() - since) / 1e9, since) if since else None

    def slot_of(self, pid: int) -> int | None:
        """The slot of a process; None: it has begun nothing yet."""
        return next((slot for slot in range(self.workers) if self._cells[slot * WIDTH + PID] == pid), None)

    def doing(self, slot: int | None, describe: Describe) -> str:
        """In words, what the worker of a slot is at."""
        busy = None if slot is None else self.busy(slot)
        if slot is None or busy is None:
            return "while it waited for work"
        at = slot * WIDTH
        samples = list(self._cells[at + IDS : at + IDS + min(NAMED, self._cells[at + COUNT])])
        more = f" and {self._cells[at + COUNT] - NAMED} more" if self._cells[at + COUNT] > NAMED else ""
        if busy[0] == PADDING:
            return f"while it put samples {samples}{more} together"
        return f"while it read {describe(busy[0])}, of the micro-batch with samples {samples}{more}"


class NotedSource:
    """The source as a DataLoader's dataset: keeps the board, hands faults back as values, and seeds the worker's random state.

    Torch's own way with a fault buries the one line of a DataError in a worker's stack trace.

    Args:
        seeds: the run's seed and the data-parallel rank.
    """

    def __init__(self, source: MicroBatchSource, board: Board, seeds: tuple[int, int]) -> None:
        self.source = source
        self.board = board
        self.seeds = seeds
        self._epoch: int | None = None

    def __getitem__(self, rows: Sequence[Row]) -> Reading | TangramError:
        import os

        from torch.utils.data import get_worker_info

        info = get_worker_info()
        slot = 0 if info is None else info.id
        epoch = rows[0][0][0]
        if info is not None and epoch != self._epoch:
            seed_worker(*self.seeds, slot, epoch)
            self._epoch = epoch
        self.board.begin(slot, os.getpid(), [sample for row in rows for _, sample in row])
        try:
            return self.source.read(rows, lambda sample: self.board.note(slot, sample))
        except TangramError as fault:
            return fault
        finally:
            self.board.end(slot)


def seed_worker(seed: int, data_parallel_rank: int, worker: int, epoch: int) -> None:
    """Seed a worker's global generators (``random``, numpy, torch) with what tells it from every other worker, rank and epoch.

    Copies of a model with the same data-parallel rank draw the same numbers. Nothing here draws any; datasets of plug-ins may.
    """
    import random

    import numpy as np
    import torch

    first, second, third = np.random.SeedSequence([seed, data_parallel_rank, worker, epoch]).generate_state(3)
    random.seed(int(first))
    np.random.seed(int(second))
    torch.manual_seed(int(third))


@contextmanager
def slow_samples_named(board: Board, describe: Describe, seconds: float) -> Iterator[None]:
    """While the block runs, a sample that takes longer than ``seconds`` is named in the log, once, while it is still being read."""
    over = threading.Event()
    named: dict[int, int] = {}

    def look() -> None:
        while not over.wait(min(1.0, seconds / 4)):
            for slot in range(board.workers):
                busy = board.busy(slot)
                if busy is None or busy[1] < seconds or busy[0] == PADDING or named.get(slot) == busy[2]:
                    continue
                named[slot] = busy[2]
                logger.warning("%s has been read for %.1f s and is not done yet (slow_sample_seconds is %g)", describe(busy[0]), busy[1], seconds)

    thread = threading.Thread(target=look, daemon=True, name="slow samples")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class _End(Exception):
    """The order has come to its end."""


def from_workers(loader: DataLoader[Any], board: Board, describe: Describe, patience: float) -> Iterator[Any]:
    """What the loader's worker processes read, in order.

    A thread waits for torch, so that this one can look after the workers meanwhile: torch tells the death of a worker without the samples
    it was at, through an exception that its handler of SIGCHLD raises wherever the main thread happens to be, and waits for a worker
    that hangs without end.

    Args:
        patience: seconds after which a worker that is still at one sample is given up.

    Raises:
        DataError: a worker died or hangs; the message names the samples that it was at.
    """
    before = set(multiprocessing.active_children())
    handler = signal.getsignal(signal.SIGCHLD)
    readings = iter(loader)
    if signal.getsignal(signal.SIGCHLD) is not handler:
        signal.signal(signal.SIGCHLD, handler)
    workers = [child for child in multiprocessing.active_children() if child not in before]
    ready: queue.Queue[Any] = queue.Queue(1)
    over = threading.Event()
    # The thread holds the only reference to torch's iterator: the workers are shut down where it ends.
    thread = threading.Thread(target=_hand_over, args=(readings, ready, over), daemon=True, name="data workers")
    thread.start()
    del readings
    failed = True
    try:
        while True:
            try:
                reading = ready.get(timeout=POLL_SECONDS)
            except queue.Empty:
                _look_after(workers, board, describe, patience)
                continue
            if isinstance(reading, _End):
                break
            if isinstance(reading, BaseException) and not isinstance(reading, TangramError):
                _look_after(workers, board, describe, patience)
                raise reading
            yield reading
        failed = False
    except GeneratorExit:
        failed = False
        raise
    finally:
        over.set()
        if not failed:
            thread.join(LEAVE_SECONDS)
        if failed or thread.is_alive():
            for worker in workers:
                worker.kill()
            for worker in workers:
                worker.join(DEATH_SECONDS)


def _hand_over(readings: Iterator[Any], ready: queue.Queue[Any], over: threading.Event) -> None:
    """Take readings from torch and put them where the main thread waits.

    Bytes become values here, beside that thread, which trains meanwhile.
    """

    def put(item: Any) -> None:
        while not over.is_set():
            try:
                ready.put(item, timeout=POLL_SECONDS)
                return
            except queue.Full:
                continue

    try:
        while not over.is_set():
            reading = next(readings)
            put(reading._replace(batch=reading.tensors()) if isinstance(reading, Reading) else reading)
    except StopIteration:
        put(_End())
    except BaseException as error:  # raised again where the readings are taken
        put(error)


def _look_after(workers: Sequence[Any], board: Board, describe: Describe, patience: float) -> None:
    for worker in workers:
        # A worker that ended by itself has seen the end of the order.
        if worker.exitcode:
            slot, code = board.slot_of(worker.pid), worker.exitcode
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
            raise DataError(
                f"data worker{'' if slot is None else f' {slot}'} (process {worker.pid}) {how} {board.doing(slot, describe)}; out of memory? "
                "lower num_workers or prefetch_factor, or look at what it was reading"
            )
    for slot in range(board.workers):
        busy = board.busy(slot)
        if busy is not None and busy[1] > patience:
            raise DataError(
                f"data worker {slot} has not come back for {busy[1]:.0f} s {board.doing(slot, describe)}; look at that file and its file system, "
                "or raise distributed_timeout_minutes"
            )
