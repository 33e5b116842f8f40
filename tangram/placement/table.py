"""The tensor table: how one family's canonical tensors become local parameters.

A table is a list of ``Rule``; each pairs one local parameter (or one per layer) with the canonical tensors it is made of and the
layout that orders and splits their rows. The table is the only description of how weights are laid out: conversion, loading,
export, checkpoints, init and alignment all run off it, in both directions.

Patterns hold ``{i}`` where the layer number stands: global in canonical names, local to the chunk in local names; local names of
experts hold ``{e}`` for the expert's number on its rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from tangram.errors import PlacementError

Shape = tuple[int, ...]
Component = Literal["vision", "text"]
Init = Literal["normal", "zeros", "ones"]


@dataclass(frozen=True)
class Run:
    """``length`` consecutive rows of source number ``source``, from ``start``; ``source`` None is padding with zeros."""

    source: int | None
    start: int
    length: int


class Layout(Protocol):
    """How the sources' rows along ``axis`` are ordered in the local parameter and split over tensor-parallel ranks."""

    @property
    def axis(self) -> int:
        """The axis that is concatenated and split."""

    def runs(self, rows: Sequence[int], tp_size: int, tp_rank: int) -> list[Run]:
        """Rows of the local parameter, in order.

        Args:
            rows: size of each source along ``axis``.

        Raises:
            PlacementError: the sizes do not divide.
        """


def even_share(rows: int, tp_size: int, what: str) -> int:
    """``rows / tp_size``.

    Raises:
        PlacementError: it is not a whole number.
    """
    if rows % tp_size:
        raise PlacementError(f"{what} {rows} is not divisible by tensor-parallel size {tp_size}; choose a size that divides it")
    return rows // tp_size


@dataclass(frozen=True)
class Replicated:
    """Every tensor-parallel rank holds the whole tensor."""

    axis: int = 0

    def runs(self, rows: Sequence[int], tp_size: int, tp_rank: int) -> list[Run]:
        return [Run(0, 0, rows[0])]


@dataclass(frozen=True)
class Split:
    """Equal consecutive parts along ``axis``: 0 for a column-parallel linear (and its bias), 1 for a row-parallel one."""

    axis: int = 0

    def runs(self, rows: Sequence[int], tp_size: int, tp_rank: int) -> list[Run]:
        share = even_share(rows[0], tp_size, "size")
        return [Run(0, tp_rank * share, share)]


@dataclass(frozen=True)
class GatedSplit:
    """Gate and up projections, each split, then concatenated on every rank: ``[gate_r; up_r]``."""

    axis: int = 0

    def runs(self, rows: Sequence[int], tp_size: int, tp_rank: int) -> list[Run]:
        runs = []
        for source, size in enumerate(rows):
            share = even_share(size, tp_size, "feed-forward size")
            runs.append(Run(source, tp_rank * share, share))
        return runs


@dataclass(frozen=True)
class PackedGatedSplit:
    """One tensor ``[gate; up]`` whose halves are split and concatenated on every rank, as ``GatedSplit``."""

    axis: int = 0

    def runs(self, rows: Sequence[int], tp_size: int, tp_rank: int) -> list[Run]:
        half = rows[0] // 2
        share = even_share(half, tp_size, "feed-forward size")
        return [Run(0, part * half + tp_rank * share, share) for part in range(2)]


@dataclass(frozen=True)
class GroupedQKV:
    """Separate q, k and v, interleaved by key/value group: ``q of group 0, k0, v0, q of group 1, ...``; ranks take whole groups."""

    groups: int
    axis: int = 0

    def runs(self, rows: Sequence[int], tp_size: int, tp_rank: int) -> list[Run]:
        per_rank = even_share(self.groups, tp_size, "number of key/value heads")
        return [
            Run(source, group * (size // self.groups), size // self.groups)
            for group in range(tp_rank * per_rank, (tp_rank + 1) * per_rank)
            for source, size in enumerate(rows)
        ]


@dataclass(frozen=True)
class PackedQKV:
    """One tensor ``[q; k; v]``, interleaved by head: ``q0 k0 v0 q1 k1 v1 ...``; ranks take whole heads."""

    heads: int
    axis: int = 0

    def runs(self, rows: Sequence[int], tp_size: int, tp_rank: int) -> list[Run]:
        per_rank = even_share(self.heads, tp_size, "number of attention heads")
        third = rows[0] // 3
        width = third // self.heads
        return [Run(0, part * third + head * width, width) for head in range(tp_rank * per_rank, (tp_rank + 1) * per_rank) for part in range(3)]


@dataclass(frozen=True)
class Vocabulary:
    """Rows of a vocabulary of ``padded`` entries in equal parts; entries past the source's last row are zeros."""

    padded: int
    axis: int = 0

    def runs(self, rows: Sequence[int], tp_size: int, tp_rank: int) -> list[Run]:
        share = even_share(self.padded, tp_size, "padded vocabulary")
        start = tp_rank * share
        real = max(0, min(rows[0] - start, share))
        runs = [Run(0, start, real)] if real else []
        return [*runs, Run(None, 0, share - real)] if share > real else runs


def padded_vocabulary(vocab_size: int, tp_size: int, divisible_by: int = 1) -> int:
    """Smallest multiple of ``divisible_by * tp_size`` that holds ``vocab_size`` entries (Megatron's rule)."""
    unit = divisible_by * tp_size
    return -(-vocab_size // unit) * unit


@dataclass(frozen=True)
class Source:
    """A canonical tensor: name (or pattern with ``{i}``) and shape.

    ``stacked``: the tensor is ``[experts, in, out]`` and a local parameter is made of one expert's matrix, transposed to ``[out, in]``.
    """

    name: str
    shape: Shape
    stacked: bool = False

    @property
    def view_shape(self) -> Shape:
        """What layouts see: the shape of the tensor, or of one expert's transposed matrix."""
        return (self.shape[2], self.shape[1]) if self.stacked else self.shape


Place = Literal["layer", "expert", "first", "last"]


@dataclass(frozen=True)
class Rule:
    """One line of a tensor table.

    Args:
        local: name of the local parameter.
        sources: the canonical tensors that it is made of.
        layout: how their rows are ordered and split.
        component: whose layer list decides the stage.
        place: ``layer``: one per layer, on the stage that holds the layer; ``expert``: one per layer and expert, on the expert-parallel
            ranks that hold the expert; ``first`` or ``last``: on the stage with the component's first or last layer.
        init: what a fresh model holds.
        tied: a second copy of tensors that another rule owns, built only where the owner is in another chunk.
        layers: global numbers of the only layers that have the parameter; ``{i}`` of its sources then counts along this tuple. None: all
            layers have it.
    """

    local: str
    sources: tuple[Source, ...]
    layout: Layout
    component: Component
    place: Place = "layer"
    init: Init = "normal"
    tied: bool = False
    layers: tuple[int, ...] | None = None

    @property
    def experts(self) -> int:
        """Experts of a layer; 1 for what is no expert."""
        return self.sources[0].shape[0] if self.place == "expert" else 1
