"""From the places of an order to a micro-batch: read, encode, collate, and what becomes of samples that cannot be used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tangram.data.bad_samples import Skip
from tangram.data.cache import StaleCacheError, TokenCache
from tangram.data.collate import Collator
from tangram.data.compact import CompactBatch
from tangram.data.conversation import Conversation
from tangram.data.dataset import ConversationDataset
from tangram.data.encode import EncodedSample, SampleEncoder
from tangram.data.sampler import PADDING, Row
from tangram.errors import DataError

SKIPPED = "skipped_samples"
"""Key of a micro-batch: ids of the samples whose places are empty since they cannot be used. Missing where there are none."""


class Reading(NamedTuple):
    """A micro-batch and what there is to say of how it was made."""

    batch: CompactBatch | dict[str, Any]
    """Compact as it is read; of tensors once it has come over, or been pinned."""
    turns_dropped: int
    skips: tuple[Skip, ...] = ()

    def tensors(self) -> dict[str, Any]:
        """The micro-batch as a model takes it."""
        return self.batch.tensors() if isinstance(self.batch, CompactBatch) else self.batch


class MicroBatchSource:
    """What a worker process holds: ``source[rows]`` is the micro-batch of those rows.

    Args:
        skip_bad: a sample that cannot be used leaves its place empty; False: it is an error.
        keep_pixels: False: pixels that the encoder read are dropped again. Ranks that need none still have to decode them where bad samples
            are skipped, since all ranks must skip the same ones.
        cache: samples as the encoder made them before; None: they are encoded here.
    """

    def __init__(
        self,
        dataset: ConversationDataset,
        encoder: SampleEncoder,
        collator: Collator,
        *,
        skip_bad: bool = False,
        keep_pixels: bool = True,
        cache: TokenCache | None = None,
    ) -> None:
        self.dataset = dataset
        self.encoder = encoder
        self.collator = collator
        self.skip_bad = skip_bad
        self.keep_pixels = keep_pixels
        self.cache = cache

    def __getitem__(self, rows: Sequence[Row]) -> dict[str, Any]:
        return self.read(rows).tensors()

    def read(self, rows: Sequence[Row], note: Callable[[int], object] = lambda sample: None) -> Reading:
        """The micro-batch of ``rows``, compact.

        Args:
            note: called with the id of each sample before it is read, and with ``PADDING`` before all are collated.

        Raises:
            DataError: a sample that cannot be used.
        """
        skips: list[Skip] = []
        read: list[list[EncodedSample]] = []
        for row in rows:
            read.append([])
            for _, sample in row:
                if sample != PADDING:
                    note(sample)
                read[-1].append(self._sample(sample, skips))
        note(PADDING)
        batch = self.collator.compact(read)
        if skips:
            batch.entries[SKIPPED] = [skip.sample for skip in skips]
        return Reading(batch, sum(sample.turns_dropped for row in read for sample in row), tuple(skips))

    def known_length(self) -> int | None:
        """Number of samples; None: the end of a streamed dataset has not been seen."""
        return self.dataset.known_length()

    def describe(self, sample: int) -> str:
        """A sample for messages: its id, file, record and media."""
        try:
            conversation = self.dataset[sample]
        except DataError as fault:
            return f"sample {sample} ({fault})"
        media = conversation.media_paths()
        files = f": {', '.join(media[:3])}{f' and {len(media) - 3} more' if len(media) > 3 else ''}" if media else ""
        return f"sample {sample} ({conversation.where}{files})"

    def _sample(self, sample: int, skips: list[Skip]) -> EncodedSample:
        if sample == PADDING:
            return self._without_pixels(self.encoder.blank())
        where = f"sample {sample}"
        try:
            conversation = self.dataset[sample]
            where = conversation.where
            encoded = self._encode(sample, conversation)
        except StaleCacheError:
            raise
        except DataError as fault:
            if not self.skip_bad:
                raise
            skips.append(Skip(sample, where, str(fault)))
            encoded = self.encoder.blank()
        return self._without_pixels(encoded)

    def _encode(self, sample: int, conversation: Conversation) -> EncodedSample:
        if self.cache is None:
            return self.encoder(conversation)
        encoded = self.cache[sample]
        if self.encoder.media is not None:
            self.cache.compare(encoded, conversation, self.encoder.media)
        self.encoder.add_pixels(encoded, conversation)
        return encoded

    def _without_pixels(self, encoded: EncodedSample) -> EncodedSample:
        if not self.keep_pixels:
            encoded.image_pixels = encoded.video_pixels = None
        return encoded
