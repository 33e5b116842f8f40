"""What the dataset's files hold, as hashes: the same samples under another name or date are the same, one changed letter is not."""

from __future__ import annotations

import hashlib
import logging
import time
import zlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from tangram.config.data import BasicParameters
from tangram.errors import DataError

logger = logging.getLogger(__name__)

SUFFIXES = (".json", ".jsonl", ".parquet")
CHUNK = 1 << 22
REPORT_SECONDS = 10.0
ENDS = 1 << 20
"""Bytes at either end of a streamed file that stand for it: looking through all of it is what streaming avoids."""


def dataset_files(basic: BasicParameters, split: str = "train") -> list[Path]:
    """The files of the training set ("train", and "valid" where ``val_rate`` cuts it from the same) or of ``val_dataset``, in order."""
    names = basic.val_dataset if split == "valid" and basic.val_dataset is not None else basic.dataset
    files: list[Path] = []
    for name in (part.strip() for part in names.split(",")):
        path = Path(name)
        files += sorted(file for file in path.iterdir() if file.suffix in SUFFIXES) if path.is_dir() else [path]
    return files


def content_hash(basic: BasicParameters, split: str = "train") -> str:
    """SHA-256 over the contents of all files of a split, read once per process; of streamed ones over their sizes and ends.

    Raises:
        DataError: a file is missing.
    """
    whole = hashlib.sha256()
    for path in dataset_files(basic, split):
        if not path.is_file():
            raise DataError(f"{path}: no such dataset file; check basic_parameters.dataset")
        status = path.stat()
        whole.update((_ends if basic.streaming else _sha256)(str(path.resolve()), status.st_size, status.st_mtime_ns).encode())
    return whole.hexdigest()


@lru_cache(maxsize=256)
def _sha256(path: str, size: int, modified: int) -> str:
    digest = hashlib.sha256()
    _through(path, size, "reading", digest.update)
    return digest.hexdigest()


@lru_cache(maxsize=256)
def _ends(path: str, size: int, modified: int) -> str:
    digest = hashlib.sha256(str(size).encode())
    with open(path, "rb") as file:
        digest.update(file.read(ENDS))
        file.seek(max(0, size - ENDS))
        digest.update(file.read(ENDS))
    return digest.hexdigest()


def crc32(path: Path) -> int:
    """CRC-32 of a file, read once per process as long as its size and date stay."""
    status = path.stat()
    return _crc32(str(path.resolve()), status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=256)
def _crc32(path: str, size: int, modified: int) -> int:
    value = 0

    def update(part: bytes) -> None:
        nonlocal value
        value = zlib.crc32(part, value)

    _through(path, size, "checking", update)
    return value


def _through(path: str, size: int, what: str, update: Callable[[bytes], object]) -> None:
    """Read a file in parts, and say how far it is when it takes long."""
    told = time.monotonic()
    done = 0
    with open(path, "rb") as file:
        while part := file.read(CHUNK):
            update(part)
            done += len(part)
            if time.monotonic() - told > REPORT_SECONDS:
                told = time.monotonic()
                logger.info("%s %s: %d of %d MiB", what, path, done >> 20, size >> 20)
