"""The values of a JSON array or JSON-lines file, one after another, in the memory of a window.

``tangram.data.records`` remembers where records lie, so that they can be read in any order; this reads once, from front to back, and parses
each value once.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tangram.errors import DataError

WINDOW = 1 << 20
"""Bytes read at a time."""

OPEN_STRING = "Unterminated string"
"""What json says of a string that the end of the window cuts off."""
LONGEST_WORD = 16
"""Characters; anything else that the end cuts off (a number's sign, an escape, ``-Infinity``) begins so near to it."""

Progress = Callable[[int, int], None]
"""Bytes done and bytes in all."""

_decode = json.JSONDecoder().raw_decode
_space = re.compile(r"[ \t\r\n]*")


def json_values(path: Path, progress: Progress | None = None) -> Iterator[Any]:
    """The items of an array, or one value a line.

    A byte-order mark, CRLF and a missing last newline are harmless; a line ends at a line feed only, so U+2028 inside a string does not split it.

    Args:
        progress: called once a window.

    Raises:
        DataError: the file is missing, not UTF-8 or not JSON, with the line.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    with path.open("rb") as stream:
        yield from _Reader(path, stream, progress).values()


class _Reader:
    def __init__(self, path: Path, stream: BinaryIO, progress: Progress | None) -> None:
        self._path, self._stream, self._progress = path, stream, progress
        self._size, self._read = path.stat().st_size, 0
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text, self._at = "", 0
        """The window, and the place in it."""
        self._lines = 0
        """Line feeds before the window."""

    def values(self) -> Iterator[Any]:
        if self._peek() != "[":
            while self._peek():
                yield self._value(one_line=True)
            return
        self._at += 1
        while self._peek() != "]":
            yield self._value()
            mark = self._peek()
            if mark == ",":
                self._at += 1
                if self._peek() == "]":
                    raise self._error("a comma before ']'")
            elif mark != "]":
                raise self._error("expected ',' or ']' after a record")
        self._at += 1
        if self._peek():
            raise self._error("text after the array")

    def _peek(self) -> str:
        """The next character that is not white, or an empty string at the end."""
        while True:
            match = _space.match(self._text, self._at)
            self._at = match.end() if match else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def _value(self, one_line: bool = False) -> Any:
        self._peek()
        while True:
            try:
                value, end = _decode(self._text, self._at)
                break
            except json.JSONDecodeError as error:
                into = error.pos - self._at
                cut_off = error.msg.startswith(OPEN_STRING) or error.pos > len(self._text) - LONGEST_WORD
                if not (cut_off and self._more()):
                    self._at += into
                    raise self._error(f"{error.msg}; the file must be one array or one object a line") from None
            except (RecursionError, ValueError) as error:  # nested a thousand deep, or a number of thousands of digits
                raise self._error(str(error)) from None
        if one_line and self._text.find("\n", self._at, end) >= 0:
            raise self._error("a record that runs over several lines; write one record a line, or one array")
        self._at = end
        return value

    def _more(self) -> bool:
        """Drop what is behind, read as much again as is left and a window; False at the end of the file."""
        raw = self._stream.read(WINDOW + len(self._text) - self._at)
        self._lines += self._text.count("\n", 0, self._at)
        self._text, self._at = self._text[self._at :], 0
        try:
            self._text += self._decoder.decode(raw, final=not raw)
        except UnicodeDecodeError as error:
            offset = self._read + len(raw) - len(error.object) + error.start
            line = self._lines + self._text.count("\n") + error.object[: error.start].count(b"\n") + 1
            raise DataError(f"{self._path}: line {line}: not UTF-8 at byte {offset}; save the file as UTF-8") from None
        self._read += len(raw)
        if self._progress:
            self._progress(self._read, self._size)
        return bool(raw)

    def _error(self, what: str) -> DataError:
        line = self._lines + self._text.count("\n", 0, self._at) + 1
        return DataError(f"{self._path}: line {line}: not a JSON dataset: {what}")
