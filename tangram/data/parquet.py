"""Random access to the rows of a parquet file, one row group in memory at a time.

The footer tells how many rows there are, so nothing is looked through. A row group is decoded whole, since that is what parquet is stored in:
a file that is read in shuffled order should have row groups of some hundred or thousand rows, as the hub's files do.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from tangram.errors import DataError

if TYPE_CHECKING:
    import pyarrow.parquet as pq

logger = logging.getLogger(__name__)

UNREADABLE = (ValueError, OSError, LookupError, NotImplementedError, OverflowError)
"""What pyarrow raises for damaged or unknown content; its own errors are kinds of these."""
GROUPS_KEPT = 4
"""Most row groups of a file that stay in memory ..."""
BYTES_KEPT = 64 << 20
"""... as long as they are together no larger than this; the one read last always stays."""


class ParquetRecords:
    """The rows of one file as dictionaries; lists and structs become lists and dictionaries.

    Raises:
        DataError: no parquet file, or damaged; pyarrow is missing.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._file: pq.ParquetFile | None = None
        self._groups: OrderedDict[int, Any] = OrderedDict()
        """Decoded row groups, the one used last at the end."""
        metadata = self._opened().metadata
        sizes = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        self._ends = list(accumulate(group.num_rows for group in sizes))
        largest = max((group.total_byte_size for group in sizes), default=0)
        if len(sizes) > 1 and largest > BYTES_KEPT:
            logger.warning(
                "%s: row groups of up to %d MiB; each record read in shuffled order decodes one, so write smaller row groups", path, largest >> 20
            )

    def has(self, index: int) -> bool:
        """Whether there is a row ``index``."""
        return index < self.known_length()

    def known_length(self) -> int:
        """Number of rows."""
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Row ``index``.

        Raises:
            IndexError: there is none.
            DataError: the file is damaged there.
        """
        if not self.has(index):
            raise IndexError(index)
        number = bisect_right(self._ends, index)
        first = self._ends[number - 1] if number else 0
        try:
            row: dict[str, Any] = self._group(number).slice(index - first, 1).to_pylist()[0]
        except UNREADABLE as error:
            raise DataError(f"{self.path}, record {index}: cannot decode this row ({_line(error)}); write the file again") from None
        return row

    def at(self, indices: Iterable[int]) -> Iterator[tuple[int, dict[str, Any] | DataError]]:
        """Indices with their rows or, where one cannot be decoded, the fault."""
        for index in indices:
            try:
                yield index, self[index]
            except DataError as fault:
                yield index, fault

    def head(self) -> Iterator[dict[str, Any] | DataError]:
        """The rows from the beginning on; of a row group only the pages that hold them are decoded."""
        for number, end in enumerate(self._ends):
            try:
                for batch in self._opened().iter_batches(batch_size=1, row_groups=[number], use_threads=False):
                    yield from batch.to_pylist()
            except UNREADABLE as error:
                yield DataError(f"{self.path}: cannot decode the rows before record {end} ({_line(error)}); write the file again")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None, "_groups": OrderedDict()}

    def _opened(self) -> pq.ParquetFile:
        """The file. Processes forked later may share it, for pyarrow reads at offsets and moves no position."""
        if self._file is None:
            try:
                import pyarrow.parquet as pq
            except ModuleNotFoundError:
                raise DataError(f"{self.path}: parquet files are read with pyarrow, which is not installed; pip install pyarrow") from None

            try:
                self._file = pq.ParquetFile(self.path)
            except (ValueError, NotImplementedError) as error:  # pyarrow.ArrowInvalid is a ValueError
                raise DataError(f"{self.path}: not a parquet file, or a damaged one ({_line(error)}); write it again") from None
        return self._file

    def _group(self, number: int) -> Any:
        """Row group ``number`` as a table."""
        if number in self._groups:
            self._groups.move_to_end(number)
            return self._groups[number]
        # Without threads: those of a process do not survive a fork.
        self._groups[number] = self._opened().read_row_group(number, use_threads=False)
        while len(self._groups) > 1 and (len(self._groups) > GROUPS_KEPT or sum(table.nbytes for table in self._groups.values()) > BYTES_KEPT):
            self._groups.popitem(last=False)
        return self._groups[number]


def _line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
