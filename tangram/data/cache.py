"""Tokenised samples on disk: ``cache_dir/<hash of the key>/`` with ``key.json``, ``index.npy`` and ``samples.bin``.

The key says everything that the samples depend on but the media files, which are compared when their pixels are read. A folder gets its name
when all of it is on the disk, so what has a name is whole. Processes that want the same folder take turns by a lock on ``<hash>.lock``,
which the system takes from a process that dies: one builds, the others wait, and the next builds where the first did not finish.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tangram.checkpoints.publish import publish, remove_stale, temporary_name
from tangram.data.bad_samples import Skip
from tangram.data.content import crc32
from tangram.data.conversation import Conversation
from tangram.data.encode import EncodedSample
from tangram.data.media import Media
from tangram.data.packed_sample import unpack
from tangram.errors import DataError

if TYPE_CHECKING:
    import numpy as np

    from tangram.data.encode_all import Chunk, Progress

logger = logging.getLogger(__name__)

KEY_FILE, INDEX_FILE, SAMPLES_FILE = "key.json", "index.npy", "samples.bin"
POLL_SECONDS = 0.2
REPORT_SECONDS = 10.0

Chunks = Callable[["Progress"], Iterator["Chunk"]]


class StaleCacheError(DataError):
    """A cache that does not fit the files any more; skipping samples would be the wrong answer."""


def key_hash(key: Mapping[str, Any]) -> str:
    """Name of the folder of a key."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]


class TokenCache:
    """A published folder, mapped into memory when a sample is first asked for.

    Args:
        folder: as ``open_cache`` gives it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open()

    def _open(self) -> None:
        import numpy as np

        self._index: np.ndarray = np.load(self.folder / INDEX_FILE, mmap_mode="r")
        with (self.folder / SAMPLES_FILE).open("rb") as file:
            self._samples = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    def __getstate__(self) -> Path:
        return self.folder

    def __setstate__(self, folder: Path) -> None:
        self.folder = folder
        self._open()

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, sample: int) -> EncodedSample:
        """What the encoder made of a sample, without pixels.

        Raises:
            DataError: the encoder found that it cannot be used.
        """
        start = int(self._index[sample - 1, 0]) if sample else 0
        return unpack(self._samples[start : int(self._index[sample, 0])], sample)

    @property
    def columns(self) -> np.ndarray:
        """int64 ``[samples, 3]``: tokens, patches and shape."""
        return self._index[:, 1:]

    @property
    def faults(self) -> list[Skip]:
        """The samples that cannot be used."""
        return [Skip(*fault) for fault in _read_key(self.folder)["faults"]]

    def compare(self, encoded: EncodedSample, sample: Conversation, media: Media) -> None:
        """Compare what is kept of a sample's media with the headers of the files.

        Args:
            media: the encoder's ``Media``.

        Raises:
            StaleCacheError: a file has another size than when the cache was made.
            DataError: a file cannot be used.
        """
        for kind, kept, found in (
            ("image", encoded.images, (media.image(path, sample.where) for path in sample.images)),
            ("video", encoded.videos, (media.video(video, sample.where) for video in sample.videos)),
        ):
            for number, (before, now) in enumerate(zip(kept, found, strict=False)):
                if before != now:
                    path = sample.images[number] if kind == "image" else sample.videos[number].paths[0]
                    raise StaleCacheError(
                        f"{path}: the {kind} has the grid {now.grid} but {before.grid} in the cache {self.folder}, in {sample.where}: "
                        "the file changed since; set basic_parameters.overwrite_cache"
                    )


def open_cache(cache_dir: Path, key: Mapping[str, Any], chunks: Chunks, patience: float) -> TokenCache:
    """The cache of a key, built first if it is not there, or not whole.

    Args:
        chunks: gives all samples in order; called in the process that builds.
        patience: seconds without progress after which a process that builds is waited for no longer.

    Raises:
        DataError: ``cache_dir`` is no folder; another process builds and does not get on; or whatever ``chunks`` raises.
    """
    folder = cache_dir / key_hash(key)
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise DataError(f"basic_parameters.cache_dir {cache_dir}: a file stands where the folder should be; give another path") from None
    waited = _Wait(folder, patience)
    while True:
        damage = _damage(folder)
        if damage is None:
            return TokenCache(folder)
        with _lock(folder) as (file, lock):
            if lock is Lock.OTHERS:
                waited.look(file)
                continue
            if (damage := _damage(folder)) is None:
                continue
            if damage:
                logger.warning("%s: %s; built anew", folder, damage)
            _build(folder, key, chunks, file, alone=lock is Lock.OURS)


def forget(cache_dir: Path, key: Mapping[str, Any]) -> None:
    """Remove the cache of a key, if there is one; what is left of it after a kill counts as damaged. For ``overwrite_cache``: one process, before
    any asks for it."""
    folder = cache_dir / key_hash(key)
    if folder.exists():
        shutil.rmtree(folder)


def _read_key(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / KEY_FILE).read_text(encoding="utf-8"))
    return content


def _damage(folder: Path) -> str | None:
    """None: the folder is whole. Empty: there is none. Else what is wrong with it."""
    if not folder.exists():
        return ""
    try:
        for name, (size, checksum) in _read_key(folder)["files"].items():
            found = (folder / name).stat().st_size
            if found != size:
                return f"{name} has {found} bytes, not {size}"
            if crc32(folder / name) != checksum:
                return f"{name} has another checksum than {KEY_FILE} says"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{KEY_FILE} is damaged"
    return None


class Lock(Enum):
    """Who has the lock of a folder."""

    OURS = auto()
    OTHERS = auto()
    NONE = auto()
    """The file system has no locks, so that others may build at the same time."""


@contextmanager
def _lock(folder: Path) -> Iterator[tuple[Any, Lock]]:
    """The lock file of a folder, and who has it."""
    with folder.with_name(f"{folder.name}.lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock = Lock.OURS
        except BlockingIOError:
            lock = Lock.OTHERS
        except OSError as error:
            logger.warning("%s: the file system has no locks (%s); each process builds the cache for itself", file.name, error.strerror)
            lock = Lock.NONE
        yield file, lock


class _Wait:
    """Waits for the process that builds, and tells how far it is."""

    def __init__(self, folder: Path, patience: float) -> None:
        self.folder, self.patience = folder, patience
        self._moved = self._told = time.monotonic()
        self._last = ""

    def look(self, file: Any) -> None:
        """Raises:
        DataError: no progress for too long.
        """
        file.seek(0)
        state, now = file.read().strip(), time.monotonic()
        if state != self._last:
            self._last, self._moved = state, now
        if now - self._moved > self.patience:
            raise DataError(
                f"{self.folder}: another process builds this cache ({self._last or 'it has told nothing'}) and has not got on for "
                f"{self.patience:.0f} s; end it, or give another cache_dir"
            )
        if now - self._told > REPORT_SECONDS:
            self._told = now
            logger.info("waiting for the cache %s: %s", self.folder, self._last)
        time.sleep(POLL_SECONDS)


def _build(folder: Path, key: Mapping[str, Any], chunks: Chunks, file: Any, alone: bool) -> None:
    """Write a folder and give it its name.

    Args:
        file: gets how far it is.
        alone: no other process can be building the same folder.
    """
    import numpy as np

    told = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal told
        if time.monotonic() - told > 1 or done == total:
            told = time.monotonic()
            file.seek(0)
            file.truncate()
            file.write(f"process {os.getpid()}: {done} of {total} samples\n")
            file.flush()

    began = time.monotonic()
    if alone:
        remove_stale(folder)
    temporary = temporary_name(folder)
    temporary.mkdir()
    try:
        index, faults = _write_samples(temporary / SAMPLES_FILE, chunks(progress))
        np.save(temporary / INDEX_FILE, index)
        files = {name: ((temporary / name).stat().st_size, crc32(temporary / name)) for name in (SAMPLES_FILE, INDEX_FILE)}
        content = {"key": key, "samples": len(index), "faults": faults, "files": files}
        (temporary / KEY_FILE).write_bytes(json.dumps(content, indent=1, ensure_ascii=False).encode("utf-8", "surrogateescape"))
        # Without locks another process may have been faster; what it has published is the same.
        if alone or _damage(folder) is not None:
            publish(temporary, folder, replace=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    logger.info("cache %s: %d samples, %d of them unusable, in %.1f s", folder, len(index), len(faults), time.monotonic() - began)


def _write_samples(path: Path, chunks: Iterator[Chunk]) -> tuple[np.ndarray, list[Skip]]:
    """Write all samples; returns the index, int64 ``[samples, 4]``: where each ends, and its sizes."""
    import numpy as np

    rows, faults, end = [], list[Skip](), 0
    with path.open("wb") as file:
        for chunk in chunks:
            file.write(b"".join(chunk.packed))
            ends = end + np.cumsum([len(raw) for raw in chunk.packed])
            end = int(ends[-1])
            rows.append(np.column_stack([ends, chunk.sizes]))
            faults += chunk.faults
    return np.concatenate(rows).astype(np.int64), faults
