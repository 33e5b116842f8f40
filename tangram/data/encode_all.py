"""Every sample of a dataset through the encoder once, without pixels, by several processes."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from tangram.data.bad_samples import Skip
from tangram.data.dataset import ConversationDataset
from tangram.data.encode import EncodedSample, SampleEncoder
from tangram.data.packed_sample import pack, pack_fault
from tangram.errors import DataError

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger(__name__)

CHUNK = 32
"""Samples that a process takes at a time."""
AHEAD = 4
"""Chunks in work or waiting, per process."""
REPORT_SECONDS = 10.0
Progress = Callable[[int, int], object]
"""``progress(done, total)``, called after each chunk."""


class Chunk(NamedTuple):
    """What became of some samples in a row."""

    packed: list[bytes]
    """One per sample; without ``wants_bytes`` empty."""
    sizes: np.ndarray
    """int64 ``[samples, 3]``: tokens, patches and shape as ``SampleSizes`` has them."""
    faults: list[Skip]


def size_of(encoded: EncodedSample) -> tuple[int, int, int]:
    """Tokens, patches and shape of a sample, as ``SampleSizes`` has them."""
    grids = [medium.grid for medium in (*encoded.images, *encoded.videos)]
    largest = max(grids, key=math.prod, default=(0, 0, 0))
    return len(encoded.input_ids), sum(map(math.prod, grids)), largest[1] * 65536 + largest[2]


def encode_all(
    dataset: ConversationDataset, encoder: SampleEncoder, workers: int, *, wants_bytes: bool, progress: Progress | None = None
) -> Iterator[Chunk]:
    """All samples in order.

    Args:
        workers: processes; 0: this one.

    Raises:
        DataError: a process was killed. Samples that cannot be used are no error here but faults of their chunk.
    """
    total = len(dataset)
    told, done = time.monotonic(), 0
    for chunk in _chunks(dataset, encoder, workers, wants_bytes):
        done += len(chunk.sizes)
        if progress is not None:
            progress(done, total)
        if time.monotonic() - told > REPORT_SECONDS:
            told = time.monotonic()
            logger.info("tokenised %d of %d samples", done, total)
        yield chunk


def _chunks(dataset: ConversationDataset, encoder: SampleEncoder, workers: int, wants_bytes: bool) -> Iterator[Chunk]:
    ranges = [range(start, min(start + CHUNK, len(dataset))) for start in range(0, len(dataset), CHUNK)]
    if workers == 0:
        for samples in ranges:
            yield _encode(dataset, encoder, samples, wants_bytes)
        return
    from concurrent.futures import Future, ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    waiting: deque[tuple[range, Future[Chunk]]] = deque()
    with ProcessPoolExecutor(min(workers, len(ranges)), initializer=_take_up, initargs=(dataset, encoder)) as pool:
        try:
            for samples in ranges:
                waiting.append((samples, pool.submit(_encode_here, samples, wants_bytes)))
                if len(waiting) >= AHEAD * workers:
                    yield waiting[0][1].result()
                    waiting.popleft()
            while waiting:
                yield waiting[0][1].result()
                waiting.popleft()
        except BrokenProcessPool:
            first, last = waiting[0][0][0], waiting[-1][0][-1]
            raise DataError(
                f"a process that tokenises was killed while samples {first} to {last} were in work; out of memory? lower "
                "preprocessing_num_workers, or look at those samples"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


_here: tuple[ConversationDataset, SampleEncoder] | None = None
"""What a process of the pool works with."""


def _take_up(dataset: ConversationDataset, encoder: SampleEncoder) -> None:
    global _here
    _here = (dataset, encoder)


def _encode_here(samples: range, wants_bytes: bool) -> Chunk:
    assert _here is not None
    return _encode(*_here, samples, wants_bytes)


def _encode(dataset: ConversationDataset, encoder: SampleEncoder, samples: range, wants_bytes: bool) -> Chunk:
    import numpy as np

    packed, faults = [], []
    sizes = np.zeros((len(samples), 3), dtype=np.int64)
    for row, sample in enumerate(samples):
        where = f"sample {sample}"
        try:
            conversation = dataset[sample]
            where = conversation.where
            encoded = encoder.tokens(conversation)
        except DataError as fault:
            faults.append(Skip(sample, where, str(fault)))
            raw = pack_fault(str(fault)) if wants_bytes else b""
        else:
            sizes[row] = size_of(encoded)
            raw = pack(encoded) if wants_bytes else b""
        if wants_bytes:
            packed.append(raw)
    return Chunk(packed, sizes, faults)
