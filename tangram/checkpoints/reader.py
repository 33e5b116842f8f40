"""What can be read as canonical tensors: the one interface between every source of weights and every use of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from tangram.errors import CheckpointError, suggest
from tangram.placement.table import Shape


class TensorInfo(NamedTuple):
    """Shape and element type of one canonical tensor."""

    shape: Shape
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size of the whole tensor, bytes."""
        return count_elements(self.shape) * self.dtype.itemsize


class CanonicalReader(Protocol):
    """A model's tensors under their canonical names, read by rectangles."""

    def names(self) -> Mapping[str, TensorInfo]:
        """Every tensor there is."""

    def read(self, name: str, start: Shape, shape: Shape) -> torch.Tensor:
        """The rectangle of tensor ``name`` that begins at ``start`` and has ``shape``, on the CPU.

        The result may share memory with the source: copy it before writing to it.

        Raises:
            CheckpointError: no such tensor, or the rectangle reaches outside it.
        """


class MemoryReader:
    """Canonical tensors that are in memory already."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._infos = {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}

    def names(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def read(self, name: str, start: Shape, shape: Shape) -> torch.Tensor:
        check_rectangle(self._infos, name, start, shape, "memory")
        return self._tensors[name][slices(start, shape)]


class AliasReader:
    """``source`` with some of its tensors also under second names, as files with tied weights have them."""

    def __init__(self, source: CanonicalReader, aliases: Mapping[str, str]) -> None:
        self._source, self._aliases = source, aliases

    def names(self) -> Mapping[str, TensorInfo]:
        infos = self._source.names()
        return {**infos, **{alias: infos[name] for alias, name in self._aliases.items()}}

    def read(self, name: str, start: Shape, shape: Shape) -> torch.Tensor:
        return self._source.read(self._aliases.get(name, name), start, shape)

    @property
    def identity(self) -> str | None:
        inner = identity_of(self._source)
        return None if inner is None else f"{inner} {sorted(self._aliases.items())}"


def identity_of(source: CanonicalReader) -> str | None:
    """A word that changes whenever the values of ``source`` may have: its property ``identity``.

    None where it has no such property. What is written from it is then never kept for a later run.
    """
    return getattr(source, "identity", None)


def files_identity(files: Iterable[Path]) -> str:
    """``identity`` of a source that lies in files: their places, sizes, times and numbers on the disk."""
    facts = [(str(file), (stat := file.stat()).st_size, stat.st_mtime_ns, stat.st_ino) for file in sorted(files)]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def count_elements(shape: Shape) -> int:
    """Product of the sizes; 1 for a scalar."""
    total = 1
    for size in shape:
        total *= size
    return total


def slices(start: Shape, shape: Shape) -> tuple[slice, ...]:
    """The index that cuts the rectangle out of a tensor."""
    return tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as integers of their size; integers as they are."""
    if not tensor.is_floating_point():
        return tensor
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize])


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal in type, shape and every bit; a NaN equals itself."""
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(bits(one), bits(other))


def read_whole(source: CanonicalReader, name: str) -> torch.Tensor:
    """All of one tensor."""
    shape = source.names()[name].shape
    return source.read(name, (0,) * len(shape), shape)


def check_rectangle(infos: Mapping[str, TensorInfo], name: str, start: Shape, shape: Shape, where: str) -> None:
    """Check that a rectangle lies inside a tensor of ``where``.

    Raises:
        CheckpointError: no such tensor, or outside it.
    """
    if name not in infos:
        raise CheckpointError(f"{where}: no tensor {name}{suggest(name, infos)} among {len(infos)}")
    full = infos[name].shape
    if (
        len(start) != len(full)
        or len(shape) != len(full)
        or any(a < 0 or n < 0 or a + n > size for a, n, size in zip(start, shape, full, strict=True))
    ):
        raise CheckpointError(f"{where}: {name} has shape {full}; the rectangle of shape {shape} at {start} lies outside it")
