"""Readers made of other readers: cast, cut down to some tensors, or laid over each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from tangram.checkpoints.copier import show
from tangram.checkpoints.reader import CanonicalReader, TensorInfo, check_rectangle, identity_of
from tangram.placement.table import Shape


class CastReader:
    """``source`` with its floating-point tensors in another type; integers keep theirs."""

    def __init__(self, source: CanonicalReader, dtype: torch.dtype) -> None:
        self._source = source
        self._infos = {n: TensorInfo(i.shape, dtype) if i.dtype.is_floating_point else i for n, i in source.names().items()}

    def names(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def read(self, name: str, start: Shape, shape: Shape) -> torch.Tensor:
        return self._source.read(name, start, shape).to(self._infos[name].dtype)

    @property
    def identity(self) -> str | None:
        return identity_of(self._source)


class SubsetReader:
    """Some of the tensors of ``source``."""

    def __init__(self, source: CanonicalReader, names: Iterable[str]) -> None:
        self._source = source
        infos = source.names()
        self._infos = {name: infos[name] for name in names}

    def names(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def read(self, name: str, start: Shape, shape: Shape) -> torch.Tensor:
        check_rectangle(self._infos, name, start, shape, "the chosen tensors")
        return self._source.read(name, start, shape)

    @property
    def identity(self) -> str | None:
        return identity_of(self._source)


class OverlayReader:
    """``below`` with the tensors of ``above`` in place of its own of the same names."""

    def __init__(self, below: CanonicalReader, above: CanonicalReader) -> None:
        self._below, self._above = below, above
        self._infos = {**below.names(), **above.names()}

    def names(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def read(self, name: str, start: Shape, shape: Shape) -> torch.Tensor:
        return (self._above if name in self._above.names() else self._below).read(name, start, shape)

    @property
    def identity(self) -> str | None:
        below, above = identity_of(self._below), identity_of(self._above)
        return None if below is None or above is None else f"{below} {above}"


def lossy_cast(source: CanonicalReader, dtype: torch.dtype | None) -> str | None:
    """A note on what a cast to ``dtype`` cannot keep; None where it keeps every value."""
    if dtype is None:
        return None
    narrowed = [i.dtype for i in source.names().values() if i.dtype.is_floating_point and torch.promote_types(i.dtype, dtype) != dtype]
    if not narrowed:
        return None
    kinds = ", ".join(sorted({show(kind) for kind in narrowed}))
    return f"{len(narrowed)} tensors are cast from {kinds} to {show(dtype)}, which is lossy"
