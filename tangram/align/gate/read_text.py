"""The text of a file, however it was kept: compressed, with a mark of its encoding, or as a terminal would have shown it."""

from __future__ import annotations

import re
import zlib
from pathlib import Path

from tangram.errors import ConfigError

GZIP = b"\x1f\x8b"
UTF16 = (b"\xff\xfe", b"\xfe\xff")
"""PowerShell's ``>`` and Tee-Object write so."""
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
"""Colours, movements of the cursor and titles of windows (ECMA-48)."""
LARGEST = 4 * 2**30
"""Bytes. A run of a million steps leaves half a gigabyte."""


def read_text(path: Path, damaged: str | None = None) -> str:
    """The text of a file that holds some, without colours.

    Args:
        damaged: put in the place of bytes that are no text; None: they are refused.

    Raises:
        ConfigError: it is missing, no regular file, empty, too large, or no text.
    """
    if not path.exists():
        raise ConfigError(f"{path}: no such file; correct the path")
    if not path.is_file():
        raise ConfigError(f"{path}: {'a folder' if path.is_dir() else 'no regular file'}; give the path of a file")
    if path.stat().st_size > LARGEST:
        raise ConfigError(f"{path}: {path.stat().st_size} bytes, more than {LARGEST}; give metrics.jsonl, a log, or a baseline")
    raw = path.read_bytes()
    if raw.startswith(GZIP):
        raw = _unpacked(raw, path)
    try:
        text = raw.decode("utf-16" if raw.startswith(UTF16) else "utf-8-sig")
    except UnicodeDecodeError as error:
        if damaged is None:
            where = f"byte {error.start} is not {'UTF-16' if raw.startswith(UTF16) else 'UTF-8'}"
            raise ConfigError(f"{path}: no text ({where}); give metrics.jsonl, a log, or a baseline") from None
        text = raw.decode("utf-8-sig", errors="replace").replace("\ufffd", damaged)
    if "\x1b" in text:
        text = ESCAPES.sub("", text)
    if not text.strip():
        raise ConfigError(f"{path}: is empty; the run has not ended its first step")
    return text


def _unpacked(raw: bytes, path: Path) -> bytes:
    """Of a file that ends too early, which a killed run leaves, as much as there is."""
    text = b""
    while raw:
        packed = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
        try:
            text += packed.decompress(raw, LARGEST)
        except zlib.error as error:
            raise ConfigError(f"{path}: damaged gzip file ({error}); copy it again") from None
        raw = packed.unused_data
    return text


def lines_of(text: str) -> list[str]:
    """Lines as a terminal would leave them: a carriage return begins one anew."""
    return text.replace("\r", "\n").split("\n")


def without_gzip(path: Path) -> Path:
    """The path of what a compressed file holds."""
    return path.with_suffix("") if path.suffix == ".gz" else path
