"""The samples of datasets as they lie in their files, one file after another, by a number that runs through all of them."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise

from tangram.data.conversation import Conversation
from tangram.data.files import Source
from tangram.data.formats.reader import RecordReader
from tangram.data.records import Record, Records, open_records
from tangram.errors import DataError

logger = logging.getLogger(__name__)

Place = tuple[int, int]
"""Number of the file, and of the record in it."""
_told: set[tuple[str, str]] = set()
"""Files and how they are written, as this process has logged them. A run opens its datasets several times."""


class StoredSamples:
    """The samples of the datasets in the order of their files.

    Args:
        media_dir: folder that relative media paths start from.
        streaming: open files, and look through them, only as far as samples are asked for.

    Raises:
        DataError: a file that cannot be read, or whose records show no known format; no samples at all.
    """

    def __init__(self, sources: Sequence[Source], media_dir: str, streaming: bool = False) -> None:
        self.sources = sources
        self.media_dir = media_dir
        self.streaming = streaming
        self._paths = [(path, source) for source in sources for path in source.paths]
        self._files: list[Records] = []
        """Those opened."""
        self._readers: list[RecordReader | None] = []
        """Of the same; None: an empty file."""
        self._ends: list[int] = []
        """Samples up to the end of each file whose end has been seen."""
        self._said: set[str] = set()
        if not streaming:
            for number in range(len(self._paths)):
                self._open(number)
                self._ends.append(self._start(number) + (self._files[number].known_length() or 0))
        if not self.has(0):
            raise DataError(f"{', '.join(source.name for source in sources)}: the dataset is empty: 0 samples")

    def has(self, number: int) -> bool:
        """Whether there is a sample ``number``; opens files and looks through them as far as this needs.

        Raises:
            DataError: a file that cannot be read is on the way.
        """
        return self._place(number) is not None

    def known_length(self) -> int | None:
        """Number of samples; None: not all of the files have been looked through. Parquet files tell without."""
        while len(self._ends) < len(self._paths):
            number = len(self._ends)
            if number >= len(self._files) and not self._paths[number][0].endswith(".parquet"):
                return None
            self._open(number)
            length = self._files[number].known_length()
            if length is None:
                return None
            self._ends.append(self._start(number) + length)
        return self._ends[-1]

    def lengths(self) -> list[int]:
        """Samples of each dataset; all files are there."""
        bounds = [0, *self._ends]
        ends, files = [0], 0
        for source in self.sources:
            files += len(source.paths)
            ends.append(bounds[files])
        return [end - start for start, end in pairwise(ends)]

    def read(self, index: int, number: int) -> Conversation:
        """Sample ``number`` as the dataset's sample ``index``.

        Raises:
            IndexError: there is none.
            DataError: the record breaks the format; the message names file, record and what is wrong.
        """
        place = self._place(number)
        if place is None:
            raise IndexError(number)
        file, record = place
        return self._conversation(index, file, record, self._files[file][record])

    def walk(self, numbers: Iterable[int]) -> Iterator[Conversation | DataError]:
        """The samples ``numbers`` as the dataset's samples 0, 1, ..., or their faults; each file is opened once for its neighbours.

        Ends where the files do.
        """
        index = 0
        for file, places in groupby(self._places(numbers), key=lambda place: place[0]):
            for record, content in self._files[file].at(record for _, record in places):
                if isinstance(content, DataError):
                    yield content
                else:
                    try:
                        yield self._conversation(index, file, record, content)
                    except DataError as fault:
                        yield fault
                index += 1

    def _places(self, numbers: Iterable[int]) -> Iterator[Place]:
        for number in numbers:
            place = self._place(number)
            if place is None:
                return
            yield place

    def _place(self, number: int) -> Place | None:
        """File and record of sample ``number``; None: there are not so many."""
        file = bisect_right(self._ends, number)
        while file < len(self._paths):
            self._open(file)
            start = self._start(file)
            if self._files[file].has(number - start):
                return file, number - start
            if file == len(self._ends):
                self._ends.append(start + (self._files[file].known_length() or 0))
            file += 1
        return None

    def _start(self, file: int) -> int:
        return self._ends[file - 1] if file else 0

    def _open(self, number: int) -> None:
        """Open the files up to ``number`` and see how their records are written."""
        while len(self._files) <= number:
            path, source = self._paths[len(self._files)]
            file = open_records(path, lazy=self.streaming)
            reader = None
            if file.has(0):
                reader = RecordReader(source.attr, self.media_dir, path, file.head())
                self._say(path, reader)
            self._files.append(file)
            self._readers.append(reader)

    def _say(self, path: str, reader: RecordReader) -> None:
        how = str(reader)
        if how not in self._said and (path, how) not in _told:
            logger.info("%s: %s", path, how)
        self._said.add(how)
        _told.add((path, how))

    def _conversation(self, index: int, file: int, record: int, content: Record) -> Conversation:
        reader = self._readers[file]
        assert reader is not None, "an empty file has no records"
        return reader(index, f"{self._files[file].path}, record {record}", content)
