"""Worker processes that die, hang or are slow, and their random state. The samples are numbers; reading one does what its number says."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from tangram.data.loader import StepLoader
from tangram.data.sampler import GlobalOrder, MicroBatch, Row
from tangram.data.source import MicroBatchSource, Reading
from tangram.errors import DataError

SAMPLES = 24


class Numbers(MicroBatchSource):
    """Micro-batches of numbers. ``acts[n]`` is called in the process that reads sample n."""

    def __init__(self, acts: dict[int, Callable[[], object]] | None = None) -> None:
        self.acts = acts or {}

    def read(self, rows: Sequence[Row], note: Callable[[int], object] = lambda sample: None) -> Reading:
        samples = [sample for row in rows for _, sample in row]
        for sample in samples:
            note(sample)
            self.acts.get(sample, lambda: None)()
        return Reading({"sample_ids": samples, "process": os.getpid(), "draws": draws()}, 0)

    def describe(self, sample: int) -> str:
        return f"sample {sample} (numbers.json, record {sample}: {sample}.png)"


def draws() -> list[float]:
    return [random.random(), float(np.random.random()), float(torch.rand(()))]


def loader(acts: dict[int, Callable[[], object]] | None = None, **others: Any) -> StepLoader:
    settings = {"micro_batch_size": 2, "num_workers": 2, "prefetch_factor": 1, **others}
    order = GlobalOrder(SAMPLES, 4, seed=settings.pop("seed", 0))
    return StepLoader(Numbers(acts), order, **settings)


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("during_step", [False, True], ids=["while it is waited for", "while the step runs"])
def test_a_killed_worker_is_told_with_the_samples_that_it_read(during_step: bool) -> None:
    """Torch's own report is a stack trace, raised wherever the main process happens to be, that knows no sample."""
    steps = iter(loader({9: kill_self}))
    seen = [next(steps)]
    if during_step:
        time.sleep(1.5)  # the worker reads ahead and dies meanwhile: nothing may be raised here
    with pytest.raises(DataError) as caught:
        while True:
            seen.append(next(steps))
    message = str(caught.value)
    assert (
        "was killed by SIGKILL while it read sample 9 (numbers.json, record 9: 9.png), of the micro-batch with samples [8, 9]; out of memory?"
        in message
    )
    assert "\n" not in message
    got = [batch["sample_ids"] for step in seen for batch in step]
    assert got == [[0, 1], [2, 3], [4, 5], [6, 7]][: len(got)]
    assert multiprocessing.active_children() == []


class Bulky(Numbers):
    def __init__(self) -> None:
        super().__init__()
        self.reading = multiprocessing.Semaphore(0)

    def read(self, rows: Sequence[Row], note: Callable[[int], object] = lambda sample: None) -> Reading:
        reading = super().read(rows, note)
        self.reading.release()
        return reading._replace(batch={**reading.tensors(), "bulk": np.zeros(1 << 22, dtype=np.uint8)})


def test_a_worker_killed_half_way_through_a_message_ends_the_run() -> None:
    """A pipe holds 64 KiB, so both workers are at theirs while nobody reads; the half of it that lies in the pipe never becomes whole."""
    source = Bulky()
    steps = iter(StepLoader(source, GlobalOrder(SAMPLES, 4, seed=0), micro_batch_size=2, num_workers=2))
    next(steps)
    while source.reading.acquire(timeout=2.0):
        pass
    victim = multiprocessing.active_children()[0]
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    with pytest.raises(DataError, match=r"data worker \d \(process \d+\) was killed by SIGKILL while it waited for work; out of memory?"):
        list(steps)
    assert multiprocessing.active_children() == []


def test_a_worker_that_ends_by_itself_is_told_too() -> None:
    with pytest.raises(DataError, match=r"data worker 1 \(process \d+\) ended with status 3 while it read sample 2 "):
        list(loader({2: lambda: os._exit(3)}))


def test_a_worker_that_never_returns_ends_the_run() -> None:
    with pytest.raises(DataError, match=r"data worker 1 has not come back for \d s while it read sample 3 \(numbers.json, record 3: 3.png\), of the"):
        list(loader({3: lambda: time.sleep(3600)}, patience=3.0))
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("workers", [0, 2])
def test_a_slow_sample_is_named_while_it_is_read(workers: int, caplog: pytest.LogCaptureFixture) -> None:
    named = multiprocessing.Event()

    class Bell(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "sample 5 " in record.getMessage():
                named.set()

    def read_until_named() -> None:
        assert named.wait(200)

    handler = Bell()
    logging.getLogger("tangram.data.workers").addHandler(handler)
    try:
        steps = iter(loader({5: read_until_named}, num_workers=workers, slow_sample_seconds=0.4))
        list(islice(steps, 2))
        steps.close()  # type: ignore[attr-defined]
    finally:
        logging.getLogger("tangram.data.workers").removeHandler(handler)
    assert caplog.text.count("sample 5 (numbers.json, record 5: 5.png) has been read for") == 1
    assert "slow_sample_seconds is 0.4" in caplog.text


def test_a_fault_of_our_own_keeps_its_trace() -> None:
    with pytest.raises(ZeroDivisionError, match="in DataLoader worker process"):
        list(loader({2: lambda: 1 / 0}))


def test_the_handler_of_child_signals_is_left_as_it_was() -> None:
    before = signal.getsignal(signal.SIGCHLD)
    steps = iter(loader())
    next(steps)
    assert signal.getsignal(signal.SIGCHLD) is before
    steps.close()  # type: ignore[attr-defined]
    assert multiprocessing.active_children() == []


def drawn(**others: Any) -> dict[tuple[int, ...], list[float]]:
    """The random draws beside the samples of a step and a half of epochs."""
    steps = iter(loader(**others))
    found = {}
    for number, step in enumerate(islice(steps, 9)):
        for batch in step:
            found[(number >= 6, *batch["sample_ids"])] = batch["draws"]
    steps.close()  # type: ignore[attr-defined]
    return found


def test_random_draws_tell_ranks_workers_and_epochs_apart_and_come_again() -> None:
    """huggingface/transformers 37932: worker k draws the same on every rank."""
    state = (random.getstate(), torch.get_rng_state())
    first, second = (drawn(data_parallel_size=2, data_parallel_rank=rank) for rank in (0, 1))
    again = drawn(data_parallel_size=2, data_parallel_rank=0)
    assert first == again, "reproducible, and the same on all copies of a data-parallel rank"
    every = [value for part in (first, second) for values in part.values() for value in values]
    assert len(set(every)) == len(every), "no two micro-batches draw the same, whatever worker, rank or epoch"
    assert drawn(data_parallel_size=2, data_parallel_rank=0, seed=1) != first
    assert (random.getstate(), torch.get_rng_state().tolist()) == (state[0], state[1].tolist())


class Drying(GlobalOrder):
    """Ends when it has nothing more, as an order of a stream does whose length nobody knows."""

    def __init__(self, counts: list[int]) -> None:
        super().__init__(100, 4)
        self.counts = counts

    def step(self, number: int, micro_batch_size: int, data_parallel_rank: int, data_parallel_size: int) -> list[MicroBatch]:
        if number >= len(self.counts):
            return []
        return [[((0, 10 * number + i),)] for i in range(self.counts[number])]


@pytest.mark.parametrize("workers", [0, 2])
def test_steps_may_have_different_numbers_of_micro_batches(workers: int) -> None:
    found = list(StepLoader(Numbers(), Drying([2, 1, 3]), num_workers=workers))
    assert [[batch["sample_ids"] for batch in step] for step in found] == [[[0], [1]], [[10]], [[20], [21], [22]]]


def test_each_worker_reads_so_many_micro_batches_ahead() -> None:
    read = multiprocessing.Value("i", 0)

    def count() -> None:
        with read.get_lock():
            read.value += 1

    for ahead in (1, 3):
        read.value = 0
        steps = iter(loader(dict.fromkeys(range(0, SAMPLES, 2), count), prefetch_factor=ahead, num_workers=1))
        next(steps)
        before = -1
        while before != read.value or before < 2 + ahead:  # until it stands still
            before = read.value
            time.sleep(0.7)
        # Two of the step, those read ahead, and one in the hand of the thread that takes them from torch.
        assert read.value <= 2 + ahead + 2, ahead
        steps.close()  # type: ignore[attr-defined]
