"""Safetensors files, read by memory map; their layout for writing.

The format (https://huggingface.co/docs/safetensors): eight bytes with the length of a JSON header, the header, then the tensors' bytes.
The header is read here, not by the safetensors package, so that a damaged file is named with its numbers, rectangles are cut without
touching other rows, and bytes are counted.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

import torch

from tangram.checkpoints.reader import TensorInfo, count_elements, slices
from tangram.errors import CheckpointError
from tangram.placement.table import Shape

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
_LARGEST_HEADER = 100_000_000
"""Bytes; the safetensors package refuses larger ones too."""


class _Entries(list[tuple[str, Any]]):
    """A JSON mapping as it stands, repeated keys included."""


def _is_numbers(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


class SafetensorsFile:
    """One file. Its header is read and checked at once, its data is mapped when first needed.

    Raises:
        CheckpointError: the file is truncated or longer than its tensors, or its header is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.infos: dict[str, TensorInfo] = {}
        self.header = b""
        self._begins: dict[str, int] = {}
        self._map: mmap.mmap | None = None
        self._read_header()

    def _read_header(self) -> None:
        if not self.path.is_file():
            what = "a folder" if self.path.is_dir() else "a link to nothing"
            raise CheckpointError(f"{self.path}: no file, but {what}; remove it or copy the file in")
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            lead = file.read(8)
            if len(lead) < 8:
                raise CheckpointError(f"{self.path}: {size} bytes is too short for a safetensors file; copy or download it again")
            (length,) = struct.unpack("<Q", lead)
            if length > min(_LARGEST_HEADER, size - 8):
                raise CheckpointError(
                    f"{self.path}: the header should take {length} bytes but the file has {size}; it is truncated or no safetensors file; "
                    "copy or download it again"
                )
            self.header = file.read(length)
        try:
            entries = json.loads(self.header, object_pairs_hook=_Entries)
        except (ValueError, RecursionError):
            entries = None
        if not isinstance(entries, _Entries):
            raise CheckpointError(f"{self.path}: the header is not a JSON mapping; the file is damaged, copy or download it again")
        for name, entry in entries:
            if name in self.infos:
                raise CheckpointError(f"{self.path}: {name} stands twice in the header; the file is damaged, copy or download it again")
            if name != "__metadata__":
                self._read_entry(name, entry, 8 + length, size)
        self._check_order(8 + length, size)

    def _read_entry(self, name: str, entry: Any, data: int, size: int) -> None:
        fields = dict(entry) if isinstance(entry, _Entries) else {}
        code, shape, place = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
        if not (isinstance(code, str) and _is_numbers(shape) and _is_numbers(place) and len(place) == 2):
            raise CheckpointError(f"{self.path}: the header's entry of {name} is damaged: {fields or entry!r}; copy or download the file again")
        shape, (begin, end) = tuple(shape), place
        if code not in DTYPES:
            raise CheckpointError(f"{self.path}: {name} has element type {code}, which is not supported; supported: {', '.join(DTYPES)}")
        info = TensorInfo(shape, DTYPES[code])
        if end - begin != info.nbytes:
            raise CheckpointError(
                f"{self.path}: {name} of shape {shape} and type {code} takes {info.nbytes} bytes, but the header gives it {begin}..{end}"
            )
        if data + end > size:
            raise CheckpointError(
                f"{self.path}: {name} ends at byte {data + end} but the file has {size}; it is truncated, copy or download it again"
            )
        self.infos[name] = info
        self._begins[name] = data + begin

    def _check_order(self, data: int, size: int) -> None:
        """The format lets tensors neither overlap nor leave gaps; a file that does was put together wrongly."""
        end, last = data, "the header"
        for name in sorted(self.infos, key=lambda name: (self._begins[name], self.infos[name].nbytes)):
            if self._begins[name] != end:
                raise CheckpointError(
                    f"{self.path}: {name} begins at byte {self._begins[name]} but {last} ends at {end}; the file is damaged, download it again"
                )
            end, last = end + self.infos[name].nbytes, name
        if end != size:
            raise CheckpointError(f"{self.path}: {size} bytes, but {last} ends at {end}; the file is damaged, copy or download it again")

    def read(self, name: str, start: Shape, shape: Shape) -> torch.Tensor:
        """A rectangle of one tensor as a view of the mapped file; only the pages it lies on are touched when it is used."""
        info = self.infos[name]
        if not count_elements(shape):
            return torch.empty(shape, dtype=info.dtype)
        whole = torch.frombuffer(self._mapped(), dtype=info.dtype, count=count_elements(info.shape), offset=self._begins[name])
        return whole.view(info.shape)[slices(start, shape)]

    def _mapped(self) -> mmap.mmap:
        if self._map is None:
            # Private and writable: torch wants a writable buffer, and a write by mistake must not reach the file.
            flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
            with self.path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        return self._map

    def close(self) -> None:
        """Let go of the map; tensors that were read keep their part of it alive."""
        self._map = None


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements of a CPU tensor, row by row, as bytes; no copy where it is contiguous."""
    return memoryview(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def lay_out(infos: Mapping[str, TensorInfo], metadata: Mapping[str, str] | None = None) -> tuple[bytes, dict[str, int]]:
    """What a file begins with, and the first byte of each tensor after it.

    Tensors lie in the order of the safetensors package (wide types first, then by name), so equal content gives an equal file.

    Args:
        infos: what the file is to hold.
    """
    order = sorted(infos, key=lambda name: (-infos[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    begins: dict[str, int] = {}
    end = 0
    for name in order:
        begins[name], end = end, end + infos[name].nbytes
        header[name] = {"dtype": CODES[infos[name].dtype], "shape": list(infos[name].shape), "data_offsets": [begins[name], end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    lead = struct.pack("<Q", len(text)) + text
    return lead, {name: len(lead) + begin for name, begin in begins.items()}
