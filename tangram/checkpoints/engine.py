"""Writes files whose every byte has a known place: fixed parts, such as headers, and tensors at offsets.

A tensor is filled slab by slab, straight into its place, so that no whole tensor is ever in memory: a slab that lies as it should in
the mapped source goes from there to the file, others are gathered into a buffer first. Tensors are written in parallel, whatever file
they belong to; the worker that finishes a file flushes it to the disk while the others copy on.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

import tangram
from tangram.checkpoints.reader import TensorInfo, count_elements
from tangram.checkpoints.resume import Journal
from tangram.checkpoints.safetensors_io import raw_bytes
from tangram.checkpoints.writing import WriteSettings
from tangram.errors import CheckpointError
from tangram.placement.table import Shape

SLAB = 8 << 20
"""Largest rectangle that is read at once, bytes."""
_STEP = 1 << 20
"""Bytes that are checksummed and written at once: few enough to stay in the processor's cache between the two."""
_WRITEBACK = 32 << 20
"""The kernel is asked to begin writing to the disk after so many bytes, so that the final flush finds little left."""

Fetch = Callable[[Shape, Shape, torch.Tensor], torch.Tensor]
"""``(start, shape, buffer)`` -> a rectangle of a tensor, contiguous: ``buffer``, filled, or a view of the source that needs no copy."""


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor and its place in a file.

    Args:
        offset: of the first byte.
        fetch: gives its rectangles.
        recipe: what the values are made of, in words; equal recipes over equal sources give equal bytes.
    """

    name: str
    offset: int
    info: TensorInfo
    fetch: Fetch = field(repr=False, compare=False)
    recipe: str = ""


@dataclass(frozen=True)
class PlannedFile:
    """A file before it is written.

    Args:
        path: inside the output directory.
        tensors: do not overlap.
        fixed: CRC-32 of each tensor -> all other parts as offset and bytes. Their sizes must not depend on the checksums.
    """

    path: str
    size: int
    tensors: tuple[PlannedTensor, ...]
    fixed: Callable[[Sequence[int]], list[tuple[int, bytes]]] = field(repr=False, compare=False)

    def digest(self, checksums: Sequence[int]) -> str:
        """Of the whole content, given each tensor's CRC-32."""
        content = hashlib.sha256(repr(list(checksums)).encode())
        for offset, part in self.fixed(checksums):
            content.update(offset.to_bytes(8, "little") + part)
        return content.hexdigest()

    def fingerprint(self) -> bytes:
        """Of the plan: equal where path, layout and recipes are."""
        content = hashlib.sha256(f"{self.path} {self.size} {self.digest([0] * len(self.tensors))}".encode())
        for tensor in self.tensors:
            content.update(f"{tensor.name} {tensor.offset} {tensor.info} {tensor.recipe}\n".encode())
        return content.digest()


def slabs(shape: Shape, itemsize: int, limit: int) -> Iterator[tuple[Shape, Shape]]:
    """Cut a tensor into rectangles ``(start, shape)`` that follow each other in memory, each of at most ``limit`` bytes where one element fits."""
    if not count_elements(shape):
        return
    if not shape:
        yield (), ()
        return
    row = count_elements(shape[1:]) * itemsize
    if row > limit and len(shape) > 1:
        for i in range(shape[0]):
            for start, size in slabs(shape[1:], itemsize, limit):
                yield (i, *start), (1, *size)
        return
    rows = max(1, limit // row)
    for first in range(0, shape[0], rows):
        yield (first, *[0] * (len(shape) - 1)), (min(rows, shape[0] - first), *shape[1:])


def peak_memory(settings: WriteSettings) -> int:
    """Upper bound of the anonymous memory that copying takes, bytes: per worker its buffer and a slab gathered from several owners."""
    return 2 * SLAB * settings.workers


def write_files(folder: Path, files: Sequence[PlannedFile], identity: str | None, settings: WriteSettings, journal: Journal | None = None) -> int:
    """Write files, flushed to the disk.

    Args:
        folder: is made where it is missing.
        identity: of the source, as ``reader.identity_of`` gives it; None: nothing is kept for a later run.
        journal: of the output directory that ``folder`` is or lies in; finished files that it names are kept.

    Returns:
        Bytes of tensors in the files.

    Raises:
        CheckpointError: the disk is too small or full, a file cannot be written, or anything that a source raises.
    """
    plan = hashlib.sha256(b"".join([tangram.__version__.encode(), *(file.fingerprint() for file in files)])).hexdigest()
    if journal is not None:
        journal.begin(f"{plan} {identity}" if identity is not None else None)
    folder.mkdir(parents=True, exist_ok=True)
    total = sum(tensor.info.nbytes for file in files for tensor in file.tensors)
    run = _Run(folder, settings, journal, total)
    with _pool(settings.workers) as pool:
        finished = [pool.submit(run.is_finished, file) for file in files]
        remaining = [file for file, kept in zip(files, finished, strict=True) if not kept.result()]
    require_space(folder, sum(file.size for file in remaining))
    targets = [_Target(folder / file.path, file) for file in remaining]
    try:
        with _pool(settings.workers) as pool, run.stopping():
            tasks: list[Future[None]] = []
            for target in targets:
                order = sorted(range(len(target.file.tensors)), key=lambda i: -target.file.tensors[i].info.nbytes)
                tasks += [pool.submit(run.write_tensor, target, i) for i in order] or [pool.submit(run.finish, target)]
            for task in as_completed(tasks):
                task.result()
    finally:
        for target in targets:
            target.close()
    return total


class _pool(ThreadPoolExecutor):
    """Threads of which the first failure ends the waiting ones."""

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.shutdown(wait=True, cancel_futures=kind is not None)


def require_space(folder: Path, needed: int) -> None:
    """Check that a disk has room.

    Raises:
        CheckpointError: it has not; both numbers are named.
    """
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise CheckpointError(f"{folder.parent}: {needed:,} bytes are to be written but {free:,} are free; make room or write elsewhere")


class _Target:
    """A file while it is written. Opened by its first tensor, closed after its last."""

    def __init__(self, path: Path, file: PlannedFile) -> None:
        self.path, self.file = path, file
        self.checksums = [0] * len(file.tensors)
        self._left = len(file.tensors)
        self._handle = -1
        self._lock = threading.Lock()

    def open(self) -> None:
        with self._lock, self._errors():
            if self._handle < 0:
                self.path.parent.mkdir(exist_ok=True)
                self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
                os.ftruncate(self._handle, self.file.size)

    def write(self, data: memoryview, offset: int) -> None:
        with self._errors():
            while data:
                count = os.pwrite(self._handle, data, offset)
                data, offset = data[count:], offset + count

    def begin_writeback(self, offset: int, size: int) -> None:
        """Linux starts to write dirty pages that it is told are not needed, and does not wait for them."""
        if size and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._handle, offset, size, os.POSIX_FADV_DONTNEED)

    def tensor_done(self, index: int, checksum: int) -> bool:
        """Note a tensor's checksum; true for the last."""
        with self._lock:
            self.checksums[index] = checksum
            self._left -= 1
            return self._left == 0

    def flush(self) -> None:
        with self._errors():
            os.fsync(self._handle)

    def close(self) -> None:
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            folder = self.path.parent if self.path.parent.exists() else self.path.parent.parent
            raise CheckpointError(
                f"{self.path}: cannot write its {self.file.size:,} bytes: {error.strerror or error}; {shutil.disk_usage(folder).free:,} bytes are "
                "free; make room or write elsewhere"
            ) from None


class _Run:
    """What the workers of one ``write_files`` share."""

    def __init__(self, folder: Path, settings: WriteSettings, journal: Journal | None, total: int) -> None:
        self._folder, self._settings, self._journal, self._total = folder, settings, journal, total
        self._written = 0
        self._lock = threading.Lock()
        self._buffers = threading.local()
        self._stopped = threading.Event()

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """Let workers leave at their next slab if the block raises: a tensor can be many gigabytes."""
        try:
            yield
        except BaseException:
            self._stopped.set()
            raise

    def is_finished(self, file: PlannedFile) -> bool:
        """An earlier run wrote the file, and it is whole."""
        path = self._folder / file.path
        entry = self._journal.entry(path) if self._journal is not None else None
        if entry is None:
            return False
        if path.stat().st_size == entry.size == file.size and read_digest(path, file) == entry.digest:
            self._advance(sum(tensor.info.nbytes for tensor in file.tensors))
            return True
        return False

    def write_tensor(self, target: _Target, index: int) -> None:
        """Write one tensor, and finish its file if it was the last."""
        tensor, dtype = target.file.tensors[index], target.file.tensors[index].info.dtype
        target.open()
        checksum, position, begun = 0, tensor.offset, tensor.offset
        for start, shape in slabs(tensor.info.shape, dtype.itemsize, SLAB):
            if self._stopped.is_set():
                return
            values = tensor.fetch(start, shape, self._buffer(shape, dtype))
            if TensorInfo(tuple(values.shape), values.dtype) != TensorInfo(shape, dtype):
                raise CheckpointError(f"{target.path}: {tensor.name} came as {tuple(values.shape)} {values.dtype}, announced was {shape} {dtype}")
            data = raw_bytes(values)
            for first in range(0, len(data), _STEP):
                step = data[first : first + _STEP]
                checksum = zlib.crc32(step, checksum)
                target.write(step, position + first)
            position += len(data)
            self._advance(len(data))
            if position - begun >= _WRITEBACK:
                target.begin_writeback(begun, position - begun)
                begun = position
        target.begin_writeback(begun, position - begun)
        if target.tensor_done(index, checksum):
            self.finish(target)

    def finish(self, target: _Target) -> None:
        """Write the fixed parts, flush, close, and note the file as finished."""
        target.open()
        for offset, part in target.file.fixed(target.checksums):
            target.write(memoryview(part), offset)
        target.flush()
        target.close()
        if self._journal is not None:
            self._journal.add(target.path, target.file.size, target.file.digest(target.checksums))

    def _buffer(self, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """This worker's buffer in a shape."""
        size = count_elements(shape) * dtype.itemsize
        if not hasattr(self._buffers, "bytes") or self._buffers.bytes.numel() < size:
            self._buffers.bytes = torch.empty(max(SLAB, size), dtype=torch.uint8)
        return self._buffers.bytes[:size].view(dtype).view(shape)

    def _advance(self, count: int) -> None:
        with self._lock:
            self._written += count
            if self._settings.progress is not None:
                self._settings.progress(self._written, self._total)


def read_digest(path: Path, file: PlannedFile) -> str:
    """Digest of a file on the disk, as ``PlannedFile.digest`` computes it; another one where the fixed parts are not those of its tensors."""
    handle = os.open(path, os.O_RDONLY)
    try:
        checksums = [_checksum(handle, tensor.offset, tensor.info.nbytes) for tensor in file.tensors]
        for offset, part in file.fixed(checksums):
            if os.pread(handle, len(part), offset) != part:
                return f"byte {offset} and on"
        return file.digest(checksums)
    finally:
        os.close(handle)


def _checksum(handle: int, offset: int, size: int) -> int:
    checksum = 0
    for first in range(0, size, _STEP):
        checksum = zlib.crc32(os.pread(handle, min(_STEP, size - first), offset + first), checksum)
    return checksum
