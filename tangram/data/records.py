"""Random access to the records of a JSON array or JSON-lines file without holding them in memory.

Only where each record begins and ends is kept, 16 bytes a record. The file is scanned as Latin-1, in which every byte is one character: JSON's own
marks are ASCII and no other UTF-8 character holds an ASCII byte, so the ends found are byte offsets, and each record is then decoded as UTF-8.
A record ends where JSON says so and a line at a line feed only: carriage returns and U+2028 do not split records.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tangram.errors import DataError

BOM = b"\xef\xbb\xbf"
WHITESPACE = " \t\r\n"
WINDOW = 1 << 20


class JsonRecords:
    """The records of one file.

    Raises:
        DataError: the file is missing, not UTF-8, not JSON (with the line), or neither an array nor lines of objects.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._starts, self._ends = array("q"), array("q")
        if not Path(path).is_file():
            raise DataError(f"{path}: no such dataset file; check basic_parameters.dataset")
        with Path(path).open("rb") as stream:
            for start, end in self._spans(stream):
                self._starts.append(start)
                self._ends.append(end)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Record ``index``.

        Raises:
            DataError: it is no object.
        """
        with Path(self.path).open("rb") as stream:
            return self._parse(stream, index)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with Path(self.path).open("rb") as stream:
            for index in range(len(self)):
                yield self._parse(stream, index)

    def _parse(self, stream: BinaryIO, index: int) -> dict[str, Any]:
        start, end = self._starts[index], self._ends[index]
        stream.seek(start)
        raw = stream.read(end - start)
        try:
            record = json.loads(raw.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise self._not_utf8(start + error.start) from None
        except json.JSONDecodeError as error:
            raise DataError(f"{self.path}: record {index} is not JSON any more ({error.msg}); the file changed after it was opened") from None
        if b"\\u" in raw and not _is_text(record):
            raise DataError(f"{self.path}: record {index} holds half of a surrogate pair (\\ud800 to \\udfff), which is no character; remove it")
        if not isinstance(record, dict):
            raise DataError(f"{self.path}: record {index} is a {type(record).__name__}; every record must be an object with messages")
        return record

    def _spans(self, stream: BinaryIO) -> Iterator[tuple[int, int]]:
        """Byte ranges of the records."""
        scan = _Scanner(self.path, stream, len(BOM) if stream.read(len(BOM)) == BOM else 0)
        opening = scan.peek()
        if opening == "[":
            scan.take()
            while scan.peek() != "]":
                yield self._checked(stream, scan.value())
                if scan.peek() == ",":
                    scan.take()
                    if scan.peek() == "]":
                        raise scan.error("a comma before ']'")
                elif scan.peek() != "]":
                    raise scan.error("expected ',' or ']' after a record")
            scan.take()
            if scan.peek():
                raise scan.error("text after the array")
            return
        while scan.peek():
            yield self._checked(stream, scan.value(one_line=True))

    def _checked(self, stream: BinaryIO, span: tuple[int, int]) -> tuple[int, int]:
        start, end = span
        back = stream.tell()
        stream.seek(start)
        try:
            stream.read(end - start).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._not_utf8(start + error.start) from None
        stream.seek(back)
        return span

    def _not_utf8(self, offset: int) -> DataError:
        return DataError(f"{self.path}: line {line_of(self.path, offset)}: not UTF-8 at byte {offset}; save the file as UTF-8")


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
                _, end = self._decoder.raw_decode(self._text, self._at)
                break
            except json.JSONDecodeError as error:
                into = error.pos - self._at
                if not self._more():  # the value begins the window now
                    raise self.error(self._reason(error), into) from None
            except (RecursionError, ValueError) as error:  # nested a thousand deep, or a number of thousands of digits
                raise self.error(str(error)) from None
        span = (self._base + self._at, self._base + end)
        if one_line and "\n" in self._text[self._at : end]:
            raise self.error("a record that runs over several lines; write one record a line, or one array")
        self._at = end
        return span

    def _reason(self, error: json.JSONDecodeError) -> str:
        """Why the rest of the file, which is in the window, is no value."""
        try:
            self._text.encode("latin-1").decode("utf-8")
        except UnicodeDecodeError as wrong:
            return f"not UTF-8 at byte {self._base + wrong.start}; save the file as UTF-8"
        return f"{error.msg}; the file must be one array or one object a line"

    def error(self, what: str, at: int | None = None) -> DataError:
        offset = self._base + (self._at if at is None else at)
        return DataError(f"{self._path}: line {line_of(self._path, offset)}: not a JSON dataset: {what}")


def line_of(path: str, offset: int) -> int:
    """Number, from 1, of the line that holds byte ``offset``."""
    with Path(path).open("rb") as stream:
        return stream.read(offset).count(b"\n") + 1
