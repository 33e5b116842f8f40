"""Global batches as one data-parallel rank sees them, read by worker processes."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from tangram.data.bad_samples import BadSampleReport
from tangram.data.sampler import MicroBatch, Order
from tangram.data.source import MicroBatchSource, Reading
from tangram.data.workers import Board, NotedSource, from_workers, slow_samples_named
from tangram.errors import ConfigError, DataError, TangramError

logger = logging.getLogger(__name__)

Batch = Mapping[str, Any]


class StepLoader:
    """Iterates over optimizer steps; each is the list of this rank's micro-batches, in order.

    The content is a function of the order alone: the same for any number of workers, and the set of micro-batches of a step the same for any
    data-parallel size. Torch's global random state is neither read nor moved.

    Args:
        source: makes micro-batches.
        order: which samples; also the global batch size.
        consumed: places consumed before, by all ranks: where to resume.
        num_workers: 0: read in this process.
        prefetch_factor: micro-batches that each worker reads ahead.
        pin_memory: as torch's.
        start_method: "fork", "spawn" or None for the platform's default.
        slow_sample_seconds: a sample that takes longer is named in the log.
        patience: seconds after which a worker that is still at one sample is given up.
        report: lists skipped samples; None: another rank with the same samples does.

    Raises:
        ConfigError: the global batch size is not a multiple of micro-batch size times data-parallel size.
        DataError: ``consumed`` is no multiple of the global batch size; while iterating, a sample that cannot be used, or a worker that died.
    """

    def __init__(
        self,
        source: MicroBatchSource,
        order: Order,
        *,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        micro_batch_size: int = 1,
        consumed: int = 0,
        num_workers: int = 0,
        prefetch_factor: int = 4,
        pin_memory: bool = False,
        start_method: str | None = None,
        slow_sample_seconds: float = 60.0,
        patience: float = 600.0,
        report: BadSampleReport | None = None,
    ) -> None:
        step = micro_batch_size * data_parallel_size
        if order.global_batch_size % step:
            raise ConfigError(
                f"global_batch_size {order.global_batch_size} is not a multiple of micro_batch_size {micro_batch_size} times the data-parallel size "
                f"{data_parallel_size} = {step}"
            )
        if consumed % order.global_batch_size:
            raise DataError(
                f"the run to resume has consumed {consumed} samples, no multiple of global_batch_size {order.global_batch_size}; "
                "resume with the global_batch_size it had"
            )
        self.source = source
        self.order = order
        self.consumed = consumed
        """Places consumed by the steps handed out so far, by all ranks: the state to save."""
        self.turns_dropped = 0
        """Turns that this rank left out so far because their sample was longer than the cutoff."""
        self.skipped = 0
        """Places of this rank that stayed empty so far because their sample cannot be used."""
        self._rank, self._size, self._micro = data_parallel_rank, data_parallel_size, micro_batch_size
        self._num_workers, self._prefetch_factor, self._pin_memory, self._start_method = num_workers, prefetch_factor, pin_memory, start_method
        self._slow, self._patience, self._report = slow_sample_seconds, patience, report

    def __iter__(self) -> Iterator[list[Batch]]:
        """Steps from ``consumed`` on; ends only where the order does."""
        board = Board(max(1, self._num_workers), self._start_method)
        counts: deque[int] = deque()
        describe = self.source.describe
        loader = self._torch_loader(board, counts)
        readings: Any = from_workers(loader, board, describe, self._patience) if self._num_workers else iter(loader)
        step: list[Batch] = []
        with slow_samples_named(board, describe, self._slow):
            try:
                for reading in readings:
                    if isinstance(reading, TangramError):
                        raise reading
                    batch = reading.tensors()
                    self._count(reading, batch)
                    step.append(batch)
                    if len(step) == counts[0]:
                        counts.popleft()
                        self.consumed += self.order.global_batch_size
                        yield step
                        step = []
            finally:
                if self._num_workers:
                    readings.close()

    def _torch_loader(self, board: Board, counts: deque[int]) -> Any:
        import torch
        from torch.utils.data import DataLoader

        workers: dict[str, Any] = {}
        if self._num_workers:
            workers = {"prefetch_factor": self._prefetch_factor, "multiprocessing_context": self._start_method}
        return DataLoader(
            NotedSource(self.source, board, (self.order.seed, self._rank)),  # type: ignore[arg-type]
            sampler=self._micro_batches(counts),
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=self._num_workers,
            pin_memory=self._pin_memory,
            generator=torch.Generator().manual_seed(self.order.seed),
            **workers,
        )

    def _count(self, reading: Reading, batch: Batch) -> None:
        if reading.turns_dropped and not self.turns_dropped:
            logger.warning("samples %s: turns beyond the cutoff are left out; this is said once, and counted", batch["sample_ids"])
        self.turns_dropped += reading.turns_dropped
        self.skipped += len(reading.skips)
        for skip in reading.skips:
            if self._report is not None and self._report.add(skip):
                logger.warning("sample %d is skipped: %s", skip.sample, skip.reason)

    def _micro_batches(self, counts: deque[int]) -> Iterator[MicroBatch]:
        """This rank's micro-batches from ``consumed`` on; how many each step has goes to ``counts``."""
        number = self.consumed // self.order.global_batch_size
        while self.order.num_batches is None or number < self.order.num_batches:
            micro_batches = self.order.step(number, self._micro, self._rank, self._size)
            if not micro_batches:
                return
            counts.append(len(micro_batches))
            yield from micro_batches
            number += 1


def _as_it_is(batch: Any) -> Any:
    return batch
