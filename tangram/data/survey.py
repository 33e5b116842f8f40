"""Everything that is wrong with a dataset, found in one walk over it, and what its tokens amount to."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tangram.data.conversation import Conversation, Video
from tangram.data.dataset import ConversationDataset
from tangram.data.encode import IGNORE, SampleEncoder
from tangram.data.images import decode_rgb, open_image
from tangram.data.media import Media
from tangram.data.walk import Died, walk
from tangram.errors import DataError

RECORD, MEDIA, TOKENS, PROCESS = "record", "media", "tokens", "process"
"""Where a fault shows: reading the record, opening or decoding its media, making tokens, or by the death of the process."""
FIRST_SAMPLES = 5


@dataclass(frozen=True)
class Fault:
    """One reason why a sample cannot be used."""

    sample: int
    stage: str
    message: str
    kind: str
    """The message without what differs from sample to sample."""


@dataclass(frozen=True)
class Kind:
    """Faults that differ in their samples alone."""

    stage: str
    kind: str
    count: int
    samples: tuple[int, ...]
    """The first of them."""
    example: str


@dataclass(frozen=True)
class TokenStatistics:
    """Of the samples that can be used; tokens of each after truncation."""

    samples: int
    min: int
    median: float
    p95: float
    max: int
    total: int
    supervised: int
    """Tokens with a label."""
    media: int
    """Tokens of images and videos."""

    @property
    def supervised_share(self) -> float:
        return self.supervised / self.total if self.total else 0.0


@dataclass
class Survey:
    """What the walk found."""

    samples: int
    faults: list[Fault] = field(default_factory=list)
    truncated: list[int] = field(default_factory=list)
    """Samples that lose turns to the cutoff."""
    duplicates: list[tuple[int, int]] = field(default_factory=list)
    """Sample, and the first one that says the same."""
    media_files: int = 0
    """Different ones that were named."""
    tokens: TokenStatistics | None = None
    """None: no tokenizer was given, or no sample can be used."""

    def kinds(self) -> list[Kind]:
        """The faults by kind, the most frequent first."""
        groups: dict[tuple[str, str], list[Fault]] = {}
        for fault in self.faults:
            groups.setdefault((fault.stage, fault.kind), []).append(fault)
        kinds = []
        for (stage, kind), faults in groups.items():
            samples = tuple(dict.fromkeys(fault.sample for fault in faults))[:FIRST_SAMPLES]
            kinds.append(Kind(stage, kind, len(faults), samples, faults[0].message))
        return sorted(kinds, key=lambda kind: -kind.count)

    @property
    def bad_samples(self) -> int:
        return len({fault.sample for fault in self.faults})

    def as_json(self) -> dict[str, Any]:
        """All of it, for a file."""
        content = asdict(self)
        content["bad_samples"] = self.bad_samples
        content["kinds"] = [asdict(kind) for kind in self.kinds()]
        if self.tokens:
            content["tokens"]["supervised_share"] = self.tokens.supervised_share
        return content


@dataclass(frozen=True)
class _Found:
    """What one sample shows; sent from process to process."""

    faults: tuple[Fault, ...] = ()
    digest: int = 0
    """Of what it says, 63 bits; 0: it could not be read."""
    media: tuple[int, ...] = ()
    """Digests of the paths it names."""
    counts: tuple[int, int, int] | None = None
    """Tokens, supervised tokens, media tokens; None: not encoded."""
    truncated: bool = False


def survey(
    dataset: ConversationDataset,
    encoder: SampleEncoder | None,
    *,
    decode: bool = True,
    workers: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Survey:
    """Look at every sample; a fault never ends the walk.

    Args:
        encoder: None: only the records and their media are looked at.
        decode: False: of media files only the headers are read.
        workers: processes; 0: this one.
        progress: called with samples done and samples in all.

    Raises:
        DataError: worker processes die for another reason than a sample.
    """
    examiner = _Examiner(dataset, encoder, decode)
    length = len(dataset)
    found, digests = Survey(length), array("q", bytes(8 * length))
    counts: list[tuple[int, int, int]] = []
    media: set[int] = set()
    for done, (index, result) in enumerate(walk(examiner, length, workers), start=1):
        if isinstance(result, Died):
            found.faults.append(_fault(index, PROCESS, str(result)))
        else:
            found.faults += result.faults
            media.update(result.media)
            digests[index] = result.digest
            if result.counts:
                counts.append(result.counts)
            if result.truncated:
                found.truncated.append(index)
        if progress:
            progress(done, length)
    found.faults.sort(key=lambda fault: fault.sample)
    found.truncated.sort()
    found.media_files = len(media)
    found.duplicates = _duplicates(digests)
    found.tokens = _statistics(counts)
    return found


def _duplicates(digests: Sequence[int]) -> list[tuple[int, int]]:
    first: dict[int, int] = {}
    return [(index, first[digest]) for index, digest in enumerate(digests) if digest and first.setdefault(digest, index) != index]


def _statistics(counts: Sequence[tuple[int, int, int]]) -> TokenStatistics | None:
    if not counts:
        return None
    import numpy as np

    tokens, supervised, media = np.array(counts, dtype=np.int64).T
    median, p95 = np.percentile(tokens, [50, 95]).tolist()
    sums = (int(values.sum()) for values in (tokens, supervised, media))
    return TokenStatistics(len(counts), int(tokens.min()), median, p95, int(tokens.max()), *sums)


class _Examiner:
    """Looks at one sample. Each process keeps what it knows of the files that it has met."""

    def __init__(self, dataset: ConversationDataset, encoder: SampleEncoder | None, decode: bool) -> None:
        self.dataset, self.encoder, self.decode = dataset, encoder, decode
        self._media = encoder.media if encoder else None
        self._known: dict[str | Video, str | None] = {}

    def __call__(self, index: int) -> _Found:
        try:
            sample = self.dataset[index]
        except DataError as fault:
            return _Found((_fault(index, RECORD, str(fault)),))
        faults = [_fault(index, MEDIA, message, subject, sample.where) for subject, message in self._media_faults(sample)]
        digest = _digest((sample.system, sample.messages, sample.images, sample.videos, sample.tools))
        media = tuple(map(_digest, sample.media_paths()))
        if faults or self.encoder is None:
            return _Found(tuple(faults), digest, media)
        try:
            encoded = self.encoder.tokens(sample)
        except DataError as fault:
            return _Found((_fault(index, TOKENS, str(fault), sample.where, sample.where),), digest, media)
        learnt = sum(label != IGNORE for label in encoded.labels)
        of_media = sum(self._media.tokens(medium) for medium in (*encoded.images, *encoded.videos)) if self._media else 0
        return _Found((), digest, media, (len(encoded.input_ids), learnt, of_media), encoded.turns_dropped > 0)

    def _media_faults(self, sample: Conversation) -> list[tuple[str, str]]:
        """File and fault."""
        faults = []
        media: tuple[str | Video, ...] = (*sample.images, *sample.videos)
        for medium in dict.fromkeys(media):
            if medium not in self._known:
                try:
                    _check_medium(medium, self._media, self.decode)
                    self._known[medium] = None
                except DataError as fault:
                    self._known[medium] = str(fault)
            message = self._known[medium]
            if message is not None:
                paths = (medium,) if isinstance(medium, str) else medium.paths
                faults.append((next((path for path in paths if message.startswith(f"{path}: ")), paths[0]), message))
        return faults


def _check_medium(medium: str | Video, media: Media | None, decode: bool) -> None:
    """Read an image or a video as training does, or without a vision encoder as Pillow does.

    Raises:
        DataError: it cannot be used.
    """
    if isinstance(medium, Video):
        for path in medium.paths:
            if not Path(path).is_file():
                raise DataError(f"{path}: no such video file")
        if media is not None:
            media.video(medium, "")
            if decode:
                media.video_pixels(medium, "")
        return
    if media is not None:
        # The header first: for what it shows, the faults are those that training names.
        media.image(medium, "")
        if decode:
            media.image_pixels(medium, "")
        return
    with open_image(medium) as image:
        if decode:
            decode_rgb(image, medium)


def _digest(value: object) -> int:
    """63 bits that differ where values differ; never 0."""
    return int.from_bytes(blake2b(repr(value).encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big") >> 1 or 1


_RECORD = re.compile(r"^.*?, record \d+(?:, message \d+)?: ")
_QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


def kind_of(message: str, subject: str = "") -> str:
    """A message without its mend and without what differs from sample to sample: its subject, quoted values and numbers.

    Args:
        subject: the file or place that the message is about, as it begins the message.
    """
    text = _RECORD.sub("", message.removeprefix(f"{subject}: "), count=1)
    return _NUMBER.sub("N", _QUOTED.sub("'...'", text)).partition("; ")[0].strip()


def _fault(sample: int, stage: str, message: str, subject: str = "", where: str = "") -> Fault:
    whole = message if not where or where in message else f"{where}: {message}"
    return Fault(sample, stage, whole, kind_of(message, subject))
