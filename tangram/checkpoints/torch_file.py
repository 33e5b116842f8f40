"""The layout of a ``torch.save`` file, without its tensors' data.

Such a file is a zip archive of stored, uncompressed entries: ``<stem>/data.pkl`` holds the pickled object, in which a tensor refers to a
storage by number, and ``<stem>/data/<number>`` that storage's bytes, aligned to 64. Sizes of 4 GiB and more use the zip64 records.
Sources: ``torch.serialization`` and the zip format's APPNOTE.
"""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tangram.checkpoints.reader import TensorInfo, count_elements

_ALIGNMENT = 64
_LARGE = 0xFFFFFFFF
"""What a 32-bit field holds where the true value is in a zip64 record."""
_DATE = 0x21
"""1 January 1980: equal content gives an equal file."""


class TorchFile:
    """Where everything in a file lies.

    Args:
        stem: name of the file without its suffix, as torch names the archive's root.
        state: what the file holds; a ``TensorInfo`` in it stands for a tensor, and each is a storage of its own, contiguous.
    """

    def __init__(self, stem: str, state: Mapping[str, Any]) -> None:
        pickled, self.tensors = _pickle(state)
        self._small = [("data.pkl", pickled), ("byteorder", b"little"), ("version", b"3\n")]
        names = [name for name, _ in self._small] + [f"data/{i}" for i in range(len(self.tensors))]
        sizes = [len(content) for _, content in self._small] + [info.nbytes for info in self.tensors]
        self._entries: list[_Entry] = []
        end = 0
        for name, size in zip(names, sizes, strict=True):
            entry = _Entry(f"{stem}/{name}".encode(), end, size)
            self._entries.append(entry)
            end = entry.data + size
        self._directory = end
        self.size = end + len(self._central([0] * len(self._entries)))

    @property
    def offsets(self) -> list[int]:
        """First byte of each tensor, in the order of ``tensors``."""
        return [entry.data for entry in self._entries[len(self._small) :]]

    def fixed(self, checksums: Sequence[int]) -> list[tuple[int, bytes]]:
        """All bytes but the tensors', as offset and content.

        Args:
            checksums: CRC-32 of each tensor's bytes.
        """
        sums = [zlib.crc32(content) for _, content in self._small] + list(checksums)
        parts = [(entry.header, entry.local(checksum)) for entry, checksum in zip(self._entries, sums, strict=True)]
        parts += [(entry.data, content) for entry, (_, content) in zip(self._entries, self._small, strict=False)]
        return [*parts, (self._directory, self._central(sums))]

    def _central(self, checksums: Sequence[int]) -> bytes:
        """The central directory with its end records."""
        body = b"".join(entry.central(checksum) for entry, checksum in zip(self._entries, checksums, strict=True))
        count, start = len(self._entries), self._directory
        large = b""
        if count >= 0xFFFF or start + len(body) >= _LARGE:
            large = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, count, count, len(body), start)
            large += struct.pack("<IIQI", 0x07064B50, 0, start + len(body), 1)
        few = min(count, 0xFFFF)
        return body + large + struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, few, few, len(body), min(start, _LARGE), 0)


class _Entry:
    """One entry of the archive, whose local header begins at byte ``header`` and whose ``size`` bytes begin at ``data``."""

    def __init__(self, name: bytes, header: int, size: int) -> None:
        self.name, self.header, self.size = name, header, size
        extra = struct.pack("<HHQQ", 1, 16, size, size) if size >= _LARGE else b""
        padding = -(header + 30 + len(name) + len(extra) + 4) % _ALIGNMENT
        self._extra = extra + b"FB" + struct.pack("<H", padding) + b"Z" * padding
        self.data = header + 30 + len(name) + len(self._extra)

    def local(self, checksum: int) -> bytes:
        shown = min(self.size, _LARGE)
        version = 45 if self.size >= _LARGE else 20
        fields = (0x04034B50, version, 0x800, 0, 0, _DATE, checksum, shown, shown, len(self.name), len(self._extra))
        return struct.pack("<IHHHHHIIIHH", *fields) + self.name + self._extra

    def central(self, checksum: int) -> bytes:
        large = [self.size, self.size] if self.size >= _LARGE else []
        large += [self.header] if self.header >= _LARGE else []
        extra = struct.pack(f"<HH{len(large)}Q", 1, 8 * len(large), *large) if large else b""
        shown, version = min(self.size, _LARGE), 45 if large else 20
        fields = (0x02014B50, version, version, 0x800, 0, 0, _DATE, checksum, shown, shown, len(self.name), len(extra))
        return struct.pack("<IHHHHHHIIIHHHHHII", *fields, 0, 0, 0, 0, min(self.header, _LARGE)) + self.name + extra


def _pickle(state: Mapping[str, Any]) -> tuple[bytes, list[TensorInfo]]:
    """``state`` as ``torch.load`` unpickles it, and the tensors in it in the order of their storages' numbers."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump({key: _replace(value) for key, value in state.items()})
    return buffer.getvalue(), pickler.tensors


def _replace(value: Any) -> Any:
    if isinstance(value, TensorInfo):
        return _Tensor(value)
    return {key: _replace(inner) for key, inner in value.items()} if isinstance(value, Mapping) else value


class _Storage:
    def __init__(self, info: TensorInfo) -> None:
        self.info = info


class _Tensor:
    """Pickles as a contiguous tensor does."""

    def __init__(self, info: TensorInfo) -> None:
        self.info = info

    def __reduce__(self) -> tuple[Any, ...]:
        shape = self.info.shape
        strides = tuple(count_elements(shape[dim + 1 :]) for dim in range(len(shape)))
        place: tuple[Any, ...] = (_Storage(self.info), 0, shape, strides, False, OrderedDict())
        if _typed(self.info.dtype) is None:
            return torch._utils._rebuild_tensor_v3, (*place, self.info.dtype)
        return torch._utils._rebuild_tensor_v2, place


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.tensors: list[TensorInfo] = []

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _Storage):
            return None
        self.tensors.append(obj.info)
        typed, number = _typed(obj.info.dtype), str(len(self.tensors) - 1)
        if typed is None:
            return "storage", torch.UntypedStorage, number, "cpu", obj.info.nbytes
        return "storage", typed, number, "cpu", count_elements(obj.info.shape)


def _typed(dtype: torch.dtype) -> Any:
    """The storage class that files name for an element type; None for the newer types, which have none."""
    name = torch.storage._dtype_to_storage_type_map().get(dtype)
    return None if name is None else getattr(torch, name)
