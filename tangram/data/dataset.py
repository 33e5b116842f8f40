"""The samples of a run: conversations with images and videos, whatever files and formats they come from.

``tangram.data.files`` finds the files, ``records`` and ``parquet`` read them, ``formats`` makes conversations of the records, ``stored`` numbers
them through, ``mixing`` chooses among them. Here they become one dataset with ids from 0.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Container, Iterator, Sequence
from itertools import count, islice
from pathlib import Path

from tangram.config.data import BasicParameters, DatasetAttr
from tangram.data import mixing
from tangram.data.conversation import Conversation, Video
from tangram.data.files import Source, find_sources
from tangram.data.media import Media
from tangram.data.stored import StoredSamples
from tangram.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

CHECKED_OF_STREAM = 1000
"""Samples of a streamed dataset that ``check`` looks at."""
KINDS = ("image", "video")
"""Kinds of media that samples hold."""


class ConversationDataset:
    """Random access to the samples of a run.

    Args:
        samples: as they lie in their files.
        selection: which of them, in which order; None: all in the order of the files.
        max_samples: use only so many, from the beginning.

    Raises:
        DataError: fewer samples than ``max_samples``; where the dataset is streamed, when its end is reached.
    """

    def __init__(self, samples: StoredSamples, selection: Sequence[int] | None = None, max_samples: int | None = None) -> None:
        self.samples = samples
        self.selection = selection
        self.max_samples = max_samples
        if max_samples is not None and not samples.streaming:
            self.has(max_samples - 1)

    @classmethod
    def of_files(
        cls, paths: Sequence[str], attr: DatasetAttr, media_dir: str = ".", max_samples: int | None = None, *, streaming: bool = False
    ) -> ConversationDataset:
        """The samples of files, one after another.

        Raises:
            DataError: as ``StoredSamples`` and the class.
        """
        return cls(StoredSamples([Source(path, (path,), attr) for path in paths], media_dir, streaming), max_samples=max_samples)

    @classmethod
    def from_config(cls, basic: BasicParameters, attr: DatasetAttr, split: str, seed: int) -> ConversationDataset:
        """The training set of data.json (``split="train"``) or its validation set ("valid").

        The validation set is ``val_dataset``, its datasets one after another; or what ``val_rate`` sets aside of ``dataset``, whatever
        ``max_samples`` is: that limits what is left for training, ``val_max_samples`` what was set aside. It is never streamed.

        Args:
            seed: of the run.

        Raises:
            ConfigError: streaming with a key that needs to know all samples.
            DataError: as the parts, and where data.json names no validation set.
        """
        is_train = split == "train"
        key = "dataset" if is_train or basic.val_rate is not None else "val_dataset"
        sources = find_sources(getattr(basic, key), basic.dataset_dir, attr, key)
        streaming = basic.streaming and key == "dataset"
        if streaming:
            _check_streaming(basic, sources)
        samples = StoredSamples(sources, basic.dataset_dir, streaming)
        limit = basic.max_samples if is_train else basic.val_max_samples
        return cls(samples, None if streaming else _select(samples, basic, is_train, seed), limit)

    def __len__(self) -> int:
        """Number of samples.

        Raises:
            TypeError: it is not known yet, since the dataset is streamed.
        """
        length = self.known_length()
        if length is None:
            raise TypeError("the length of a streamed dataset is known at its end")
        return length

    def known_length(self) -> int | None:
        """Number of samples; None: the end of a streamed dataset has not been seen."""
        length = len(self.selection) if self.selection is not None else self.samples.known_length()
        if length is None or self.max_samples is None:
            return length
        self._check_enough(length)
        return min(length, self.max_samples)

    def has(self, index: int) -> bool:
        """Whether there is a sample ``index``, from 0; a streamed dataset is looked through as far as this needs.

        Raises:
            DataError: a damaged file on the way, or the end before ``max_samples``.
        """
        if self.max_samples is not None and index >= self.max_samples:
            return False
        found = index < len(self.selection) if self.selection is not None else self.samples.has(index)
        if not found and self.max_samples is not None:
            self.known_length()
        return found

    def __getitem__(self, index: int) -> Conversation:
        """Sample ``index``, from 0.

        Raises:
            DataError: the record breaks the format; the message names file, record and what is wrong.
        """
        if index < 0 or not self.has(index):
            raise IndexError(index)
        return self.samples.read(index, self.selection[index] if self.selection is not None else index)

    def __iter__(self) -> Iterator[Conversation]:
        """All samples in order; raises DataError at the first fault."""
        for content in self._walk():
            if isinstance(content, DataError):
                raise content
            yield content

    def faults(self, media: Media | None = None, *, files: bool = True, kinds: Container[str] = KINDS) -> Iterator[tuple[int, DataError]]:
        """Index and fault of every sample that cannot be used, one each.

        Args:
            media: given: the header of every file is read too, which finds what is no image or video, or too thin.
            files: whether media files must be there.
            kinds: what the model takes, of "image" and "video".

        Raises:
            DataError: a streamed file that is damaged, where the damage is reached: behind it no record can be told from the next.
        """
        seen = _MediaFiles(media, kinds)
        for index, content in enumerate(self._walk()):
            fault = content if isinstance(content, DataError) else seen.fault(content) if files else None
            if fault is not None:
                yield index, fault

    def check(self, media: Media | None = None, kinds: Container[str] = KINDS) -> None:
        """Check the format of every record, its placeholders against its media, and that the media files are there; nothing is decoded.

        Of a streamed dataset the first 1,000 samples are checked.

        Args:
            media, kinds: as in ``faults``.

        Raises:
            DataError: the first fault, with how many media files are missing in all where that is the fault.
        """
        seen = _MediaFiles(media, kinds)
        for content in islice(self._walk(), CHECKED_OF_STREAM if self.samples.streaming else None):
            fault = content if isinstance(content, DataError) else seen.fault(content)
            if fault is not None and not isinstance(fault, MissingFile):
                raise fault
        if seen.first_missing is not None:
            raise DataError(
                f"{seen.first_missing}; {seen.missing} of {len(seen.there)} media files are missing; "
                f"check basic_parameters.dataset_dir ({self.samples.media_dir})"
            )

    def _walk(self) -> Iterator[Conversation | DataError]:
        numbers = count() if self.selection is None else iter(self.selection)
        walked = self.samples.walk(islice(numbers, self.max_samples))
        length = 0
        for content in walked:
            yield content
            length += 1
        self._check_enough(length)

    def _check_enough(self, length: int) -> None:
        if self.max_samples is not None and length < self.max_samples:
            names = ", ".join(source.name for source in self.samples.sources)
            raise DataError(f"{names}: max_samples is {self.max_samples} but the dataset has {length} samples; lower max_samples or remove it")


class MissingFile(DataError):
    """A media file that is not there."""


class _MediaFiles:
    """Looks for media files, once each."""

    def __init__(self, media: Media | None, kinds: Container[str]) -> None:
        self._media = media
        self._kinds = kinds
        self.there: dict[str, bool] = {}
        self._good: set[str | Video] = set()
        """Images and videos whose headers have been read."""
        self.first_missing: MissingFile | None = None

    @property
    def missing(self) -> int:
        return sum(not there for there in self.there.values())

    def fault(self, sample: Conversation) -> DataError | None:
        """What is wrong with the media of a sample, if anything."""
        for kind, given in (("image", sample.images), ("video", sample.videos)):
            if given and kind not in self._kinds:
                return DataError(f"{sample.where}: holds {len(given)} {kind}s but this model takes no {kind}s; remove the sample")
        found: DataError | None = None
        for kind, path in [*(("image", path) for path in sample.images), *(("video", path) for video in sample.videos for path in video.paths)]:
            if path not in self.there:
                self.there[path] = _is_file(path)
            if not self.there[path]:
                fault = MissingFile(f"{path}: no such {kind} file, in {sample.where}")
                self.first_missing = self.first_missing or fault
                found = found or fault
        if self._media is None:
            return found
        media: list[str | Video] = [*sample.images, *sample.videos]
        for medium in media:
            if found is None and medium not in self._good:
                found = self._header_fault(self._media, medium, sample.where)
        return found

    def _header_fault(self, media: Media, medium: str | Video, where: str) -> DataError | None:
        try:
            media.video(medium, where) if isinstance(medium, Video) else media.image(medium, where)
        except DataError as fault:
            return fault
        self._good.add(medium)
        return None


def _is_file(path: str) -> bool:
    try:
        return Path(path).is_file()
    except OSError:  # a name longer than the file system takes
        return False


def _check_streaming(basic: BasicParameters, sources: Sequence[Source]) -> None:
    """Raises ConfigError for what needs to know all samples before the first."""
    limited = next((source.name for source in sources if source.num_samples is not None), None)
    keys = {
        f"val_rate {basic.val_rate}": basic.val_rate is not None,
        f"mix_strategy {basic.mix_strategy}": basic.mix_strategy != "concat",
        f"num_samples of dataset {limited!r}": limited is not None,
    }
    for key, given in keys.items():
        if given:
            raise ConfigError(f"basic_parameters: streaming and {key} exclude each other, for that needs all samples to be known; remove one of them")


def _select(samples: StoredSamples, basic: BasicParameters, is_train: bool, seed: int) -> Sequence[int] | None:
    """Which stored samples make up a split, in which order; None: all of them as they lie."""
    parts, start = [], 0
    for number, (source, length) in enumerate(zip(samples.sources, samples.lengths(), strict=True)):
        parts.append(_part(source, number, range(start, start + length), seed))
        start += length
    if basic.val_rate is not None:
        parts = _one_side(parts, basic.val_rate, is_train, seed)
    is_mixed = is_train and basic.mix_strategy != "concat"
    # Read for one dataset too: shares of datasets that are not there are a mistake.
    shares = mixing.read_shares(basic.interleave_probs, len(parts)) if is_mixed else []
    if is_mixed and len(parts) > 1:
        numbers, indices = mixing.interleave([len(part) for part in parts], shares, seed, until_last=basic.mix_strategy == "interleave_over")
        logger.info("%s: %d samples of %d datasets, shares %s", basic.mix_strategy, len(numbers), len(parts), shares)
        return array("q", (parts[number][index] for number, index in zip(numbers, indices, strict=True)))
    if all(isinstance(part, range) for part in parts):
        return None
    return array("q", (stored for part in parts for stored in part))


def _part(source: Source, number: int, stored: range, seed: int) -> Sequence[int]:
    """The samples of one dataset that are used."""
    wanted = source.num_samples
    if wanted is None or wanted == len(stored):
        return stored
    if wanted > len(stored):
        raise DataError(f"{source.name}: num_samples is {wanted} but the dataset has {len(stored)} samples; lower num_samples or remove it")
    return array("q", (stored[index] for index in mixing.subset(len(stored), wanted, seed, number)))


def _one_side(parts: Sequence[Sequence[int]], rate: float, is_train: bool, seed: int) -> list[Sequence[int]]:
    """Of each part what is for training, or what is set aside."""
    ends = [0]
    for part in parts:
        ends.append(ends[-1] + len(part))
    train, valid = mixing.split(ends[-1], rate, seed)
    chosen = set(train if is_train else valid)
    return [array("q", (stored for place, stored in enumerate(part, start) if place in chosen)) for part, start in zip(parts, ends, strict=False)]
