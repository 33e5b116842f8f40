"""What the dataset's files hold, as hashes: the same samples under another name or date are the same, one changed letter is not."""

from __future__ import annotations

import hashlib
import logging
import time
import zlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from tangram.config.data import DatasetParam
from tangram.data.files import Source, find_sources
from tangram.errors import DataError

logger = logging.getLogger(__name__)

CHUNK = 1 << 22
REPORT_SECONDS = 10.0
ENDS = 1 << 20
"""Bytes at either end of a streamed file that stand for it: looking through all of it is what streaming avoids."""
OUTLINE = 1 << 16
"""Bytes at either end of a file that every rank looks at."""


def dataset_sources(data: DatasetParam, split: str = "train") -> list[Source]:
    """What the training set ("train", and "valid" where ``val_rate`` cuts it from the same) or ``val_dataset`` is made of, in order."""
    key = "val_dataset" if split == "valid" and data.basic_parameters.val_dataset is not None else "dataset"
    return find_sources(getattr(data.basic_parameters, key), data.basic_parameters.dataset_dir, data.attr, key)


def content_hash(data: DatasetParam, split: str = "train") -> str:
    """SHA-256 over the contents of all files of a split, read once per process, and over what the registry says of them; of streamed files over
    their sizes and ends.

    Raises:
        DataError: a file is missing.
    """
    whole = hashlib.sha256()
    for source in dataset_sources(data, split):
        if source.attr != data.attr or source.num_samples is not None:
            whole.update(f"{source.attr.model_dump()} {source.num_samples}".encode())
        for path in map(Path, source.paths):
            if not path.is_file():
                raise DataError(f"{path}: no such dataset file; check basic_parameters.dataset")
            status = path.stat()
            digest = _ends if data.basic_parameters.streaming else _sha256
            whole.update(digest(str(path.resolve()), status.st_size, status.st_mtime_ns).encode())
    return whole.hexdigest()


def outline(data: DatasetParam, split: str = "train") -> dict[str, str]:
    """Size and both ends of every file of a split, in order: cheap, and enough to tell most other files by.

    Raises:
        DataError: a file is missing.
    """
    paths = [Path(path) for source in dataset_sources(data, split) for path in source.paths]
    return {f"file {number}": f"{path.stat().st_size} bytes, {_outline(path)}" for number, path in enumerate(paths, start=1)}


def _outline(path: Path) -> str:
    with path.open("rb") as file:
        ends = file.read(OUTLINE)
        file.seek(max(0, path.stat().st_size - OUTLINE))
        return f"{zlib.crc32(ends + file.read(OUTLINE)):08x}"


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
