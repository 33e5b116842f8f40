"""Random access to the records of a JSON array or JSON-lines file without holding them in memory.

Only where each record begins and ends is kept, 16 bytes a record. The file is scanned as Latin-1, in which every byte is one character: JSON's own
marks are ASCII and no other UTF-8 character holds an ASCII byte, so the ends found are byte offsets, and each record is then decoded as UTF-8.
A record ends where JSON says so and a line at a line feed only: carriage returns and U+2028 do not split records.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterable, Iterator
from itertools import count, takewhile
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from tangram.errors import DataError

BOM = b"\xef\xbb\xbf"
WHITESPACE = " \t\r\n"
WINDOW = 1 << 20
END_OF_NUMBER = re.compile(r"[\s,\]]")

Record = dict[str, Any]


class Records(Protocol):
    """The records of one file."""

    path: str

    def has(self, index: int) -> bool:
        """Whether there is a record ``index``; looks through the file as far as this needs."""

    def known_length(self) -> int | None:
        """Number of records; None: the end of the file has not been seen."""

    def __getitem__(self, index: int) -> Record:
        """Record ``index``; raises DataError where it is no object."""

    def at(self, indices: Iterable[int]) -> Iterator[tuple[int, Record | DataError]]:
        """Indices with their records, read through one opening of the file. Faults come as values, since a generator that raises ends."""

    def head(self) -> Iterator[Record | DataError]:
        """The records from the beginning on, with no more effort than those asked for take."""


def open_records(path: str, lazy: bool = False) -> Records:
    """The records of a file: parquet by its suffix, else JSON.

    Args:
        lazy: look through the file only as far as records are asked for.

    Raises:
        DataError: the file is missing or damaged.
    """
    if not Path(path).is_file():
        raise DataError(f"{path}: no such dataset file; check basic_parameters.dataset")
    try:
        if Path(path).suffix == ".parquet":
            from tangram.data.parquet import ParquetRecords

            return ParquetRecords(path)
        return JsonRecords(path, lazy)
    except OSError as error:
        raise DataError(f"{path}: cannot read this dataset file ({error.strerror or error}); check its permissions") from None


class JsonRecords:
    """The records of one JSON array or JSON-lines file.

    Args:
        lazy: False: the whole file is scanned now. True: as far as records are asked for; what has been found stays found.

    Raises:
        DataError: the file is not UTF-8, not JSON (with the line), or neither an array nor lines of objects; when lazy, where the scan gets there.
    """

    def __init__(self, path: str, lazy: bool = False) -> None:
        self.path = path
        self._starts, self._ends = array("q"), array("q")
        self._next = 0
        """Where the scan goes on. No stream is held: processes forked later would share its position."""
        self._in_array = False
        self._complete = False
        if not lazy:
            self._scan(None)

    def has(self, index: int) -> bool:
        """Whether there is a record ``index``.

        Raises:
            DataError: the file is damaged before it.
        """
        if index >= len(self._starts) and not self._complete:
            self._scan(index)
        return index < len(self._starts)

    def known_length(self) -> int | None:
        """Number of records; None: the end of the file has not been seen."""
        return len(self._starts) if self._complete else None

    def __getitem__(self, index: int) -> Record:
        """Record ``index``.

        Raises:
            IndexError: there is none.
            DataError: it is no object.
        """
        if not self.has(index):
            raise IndexError(index)
        with Path(self.path).open("rb") as stream:
            return self._parse(stream, index)

    def at(self, indices: Iterable[int]) -> Iterator[tuple[int, Record | DataError]]:
        """Indices with their records or, where one is no object, the fault."""
        with Path(self.path).open("rb") as stream:
            for index in indices:
                try:
                    yield index, self._parse(stream, index)
                except DataError as fault:
                    yield index, fault

    def head(self) -> Iterator[Record | DataError]:
        """The records from the beginning on."""
        return (record for _, record in self.at(takewhile(self.has, count())))

    def _parse(self, stream: BinaryIO, index: int) -> Record:
        start, end = self._starts[index], self._ends[index]
        stream.seek(start)
        raw = stream.read(end - start)
        where = f"{self.path}, record {index}"
        try:
            record = json.loads(raw.decode("utf-8"))
            is_text = b"\\u" not in raw or _is_text(record)
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else error.reason
            raise DataError(f"{where}: not JSON any more ({reason}); the file changed after it was opened") from None
        except RecursionError:
            raise DataError(f"{where}: nested too deeply; check its brackets") from None
        if not is_text:
            raise DataError(f"{where}: holds half of a surrogate pair (\\ud800 to \\udfff), which is no character; remove it")
        if not isinstance(record, dict):
            raise DataError(f"{where}: a {type(record).__name__}; every record must be an object with messages")
        return record

    def _scan(self, index: int | None) -> None:
        """Find records until ``index`` is among them, or to the end, and on to the end of the window."""
        with Path(self.path).open("rb") as stream:
            scan = _Scanner(self.path, stream, self._next or (len(BOM) if stream.read(len(BOM)) == BOM else 0))
            enough = scan.offset + WINDOW
            if self._next == 0 and scan.peek() == "[":
                self._in_array = True
                scan.take()
            while not self._complete and (index is None or index >= len(self._starts) or scan.offset < enough):
                self._find(scan)
                self._next = scan.offset

    def _find(self, scan: _Scanner) -> None:
        """One record, with what parts it from the next, or the end."""
        if not scan.peek() and not self._in_array:
            self._complete = True
            return
        if self._in_array and scan.peek() == "]" and not self._starts:
            self._close(scan)
            return
        start, end = scan.value(one_line=not self._in_array)
        self._starts.append(start)
        self._ends.append(end)
        if not self._in_array:
            return
        mark = scan.peek()
        if mark == ",":
            scan.take()
            if scan.peek() == "]":
                raise scan.error("a comma before ']'")
        elif mark == "]":
            self._close(scan)
        else:
            raise scan.error("expected ',' or ']' after a record")

    def _close(self, scan: _Scanner) -> None:
        scan.take()
        if scan.peek():
            raise scan.error("text after the array")
        self._complete = True


def _is_text(record: Any) -> bool:
    """Whether every string can be written as UTF-8."""
    try:
        json.dumps(record, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


class _Scanner:
    """Walks over the JSON values of a file, holding a window of it."""

    def __init__(self, path: str, stream: BinaryIO, start: int) -> None:
        self._path, self._stream = path, stream
        self._text = ""
        self._base, self._at = start, 0
        """File offset of the window's beginning, and place in the window."""
        self._stream.seek(start)
        self._decoder = json.JSONDecoder()

    @property
    def offset(self) -> int:
        """Place in the file."""
        return self._base + self._at

    def _more(self) -> bool:
        """Drop what is behind, read as much again as is left and a window; False at the end of the file."""
        self._text = self._text[self._at :]
        self._base += self._at
        self._at = 0
        read = self._stream.read(WINDOW + len(self._text)).decode("latin-1")
        self._text += read
        return bool(read)

    def peek(self) -> str:
        """The next character that is not white, or an empty string at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in WHITESPACE:
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def take(self) -> None:
        self._at += 1

    def value(self, one_line: bool = False) -> tuple[int, int]:
        """Walk over one value and return its byte range.

        Args:
            one_line: the value must be alone on its line.
        """
        self.peek()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
                # The digits of a number may go on behind the window.
                if not isinstance(value, int | float) or END_OF_NUMBER.search(self._text, end) or not self._more():
                    break
            except json.JSONDecodeError as error:
                into = error.pos - self._at
                if not self._more():  # the value begins the window now
                    raise self.error(self._reason(error), into) from None
            except (RecursionError, ValueError) as error:  # nested a thousand deep, or a number of thousands of digits
                raise self.error(str(error)) from None
        if not self._text.isascii():  # known without looking
            self._check_utf8(self._text[self._at : end])
        if one_line and "\n" in self._text[self._at : end]:
            inner = _list_in(value)
            mend = f"save the list under {inner!r} alone" if inner else "write one record a line, or one array"
            raise self.error(f"a record that runs over several lines; {mend}")
        span = (self._base + self._at, self._base + end)
        self._at = end
        return span

    def _check_utf8(self, text: str) -> None:
        try:
            text.encode("latin-1").decode("utf-8")
        except UnicodeDecodeError as wrong:
            place = self.offset + wrong.start
            raise self.error(f"not UTF-8 at byte {place}; save the file as UTF-8", wrong.start) from None

    def _reason(self, error: json.JSONDecodeError) -> str:
        """Why the rest of the file, which is in the window, is no value."""
        try:
            self._text.encode("latin-1").decode("utf-8")
        except UnicodeDecodeError as wrong:
            return f"not UTF-8 at byte {self._base + wrong.start}; save the file as UTF-8"
        return f"{error.msg}; the file must be one array or one object a line"

    def error(self, what: str, into: int = 0) -> DataError:
        """A fault that lies ``into`` bytes from here."""
        return DataError(f"{self._path}: line {line_of(self._path, self.offset + into)}: not a JSON dataset: {what}")


def _list_in(value: Any) -> str | None:
    """The key of an object under which a list of objects stands."""
    if not isinstance(value, dict):
        return None
    return next((key for key, inner in value.items() if isinstance(inner, list) and inner and isinstance(inner[0], dict)), None)


def line_of(path: str, offset: int) -> int:
    """Number, from 1, of the line that holds byte ``offset``."""
    line = 1
    with Path(path).open("rb") as stream:
        while offset > 0 and (part := stream.read(min(offset, WINDOW))):
            line += part.count(b"\n")
            offset -= len(part)
    return line
