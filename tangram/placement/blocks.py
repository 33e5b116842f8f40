"""Placements: for one chunk of one rank, where every element of every local parameter lives in canonical tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from tangram.errors import PlacementError, name_some
from tangram.placement.table import Rule, Shape, Source
from tangram.placement.topology import Chunk, Topology

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Block:
    """A rectangle of a local parameter and the rectangle of a canonical tensor that it equals.

    ``canonical`` None is padding: zeros on load, dropped on export, no gradient. ``stacked``: the canonical rectangle is
    ``[e, in, out]`` of a stack of experts and equals the local ``[e, out, in]`` with its last two axes turned; a local rectangle
    ``[out, in]`` is one expert's. Else both have ``shape``.
    """

    local: str
    local_start: Shape
    canonical: str | None
    canonical_start: Shape
    shape: Shape
    """Of the local rectangle."""
    stacked: bool = False

    @property
    def canonical_shape(self) -> Shape:
        """Of the canonical rectangle."""
        return self._turned(self.shape, 1) if self.stacked else self.shape

    @property
    def local_slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.local_start, self.shape, strict=True))

    @property
    def canonical_slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.canonical_start, self.canonical_shape, strict=True))

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def part(self, start: Shape, shape: Shape) -> Block:
        """The block of a rectangle inside this one.

        Args:
            start: in the local parameter.
        """
        offset = tuple(a - b for a, b in zip(start, self.local_start, strict=True))
        if self.stacked:
            offset = self._turned(offset, 0)
        moved = tuple(a + b for a, b in zip(self.canonical_start, offset, strict=True))
        return replace(self, local_start=start, canonical_start=moved, shape=shape)

    def to_local(self, canonical: Tensor) -> Tensor:
        """The canonical rectangle's values as the local one has them, a view."""
        if not self.stacked:
            return canonical
        return canonical.mT if len(self.shape) == 3 else canonical[0].T

    def to_canonical(self, local: Tensor) -> Tensor:
        """The local rectangle's values as the canonical one has them, a view."""
        if not self.stacked:
            return local
        return local.mT if len(self.shape) == 3 else local.T[None]

    @staticmethod
    def _turned(local: Shape, expert: int) -> Shape:
        """A shape or an offset of the local rectangle as the canonical one has it; ``expert`` is what a single expert has on the first axis."""
        *stack, out, inside = local
        return (*(stack or [expert]), inside, out)


@dataclass(frozen=True)
class LocalTensor:
    """A local parameter as a list of blocks that tile it.

    ``sources`` are the canonical tensors that the rule makes it of, also those of which this rank holds nothing but padding.
    """

    name: str
    shape: Shape
    blocks: tuple[Block, ...]
    rule: Rule
    sources: tuple[Source, ...]


@dataclass(frozen=True)
class Placement:
    """Everything that one model chunk of one rank holds.

    ``tensors`` maps the local parameter name (as the chunk's ``state_dict`` has it) to its blocks.
    """

    chunk: Chunk
    tp_rank: int
    tensors: dict[str, LocalTensor]
    ep_rank: int = 0

    @property
    def blocks(self) -> Iterator[Block]:
        for tensor in self.tensors.values():
            yield from tensor.blocks


def canonical_shapes(table: Sequence[Rule], topology: Topology) -> dict[str, Shape]:
    """Name and full shape of every canonical tensor of the model, without tied copies.

    Raises:
        PlacementError: two rules give one tensor different shapes.
    """
    shapes: dict[str, Shape] = {}
    layers = {"vision": topology.vision_layers, "text": topology.text_layers}
    for rule in table:
        count = layers[rule.component]
        if count == 0:
            continue
        if rule.layers is not None:
            numbers = range(len(rule.layers))
        else:
            numbers = range(count) if rule.place in ("layer", "expert") else range(1)
        for i in numbers:
            for source in rule.sources:
                name = source.name.format(i=i)
                if shapes.setdefault(name, source.shape) != source.shape:
                    raise PlacementError(f"tensor table gives {name} two shapes: {shapes[name]} and {source.shape}")
    return shapes


def place(table: Sequence[Rule], topology: Topology, tp_rank: int, chunk: Chunk, ep_rank: int = 0) -> Placement:
    """Lay out one chunk of one rank.

    Args:
        tp_rank: below ``topology.tensor_ranks``.
        ep_rank: below ``topology.expert``.

    Raises:
        PlacementError: a size does not divide, naming the canonical tensor.
    """
    tensors: dict[str, LocalTensor] = {}
    for rule in table:
        numbers, tp_size = _numbers(rule, topology, chunk), topology.tensor_of(rule.component)
        if not numbers:
            continue
        experts, shape, parts = _experts(rule, topology, ep_rank), *_parts(rule, numbers[0][1], tp_size, tp_rank % tp_size)
        for local_number, number in numbers:
            sources = tuple(Source(source.name.format(i=number), source.shape, source.stacked) for source in rule.sources)
            for local_expert, expert in enumerate(experts):
                name = rule.local.format(i=local_number, e=local_expert)
                if name in tensors:
                    raise PlacementError(f"tensor table has two rules for the local parameter {name}")
                blocks = tuple(part.block(name, sources, expert) for part in parts)
                tensors[name] = LocalTensor(name=name, shape=shape, blocks=blocks, rule=rule, sources=sources)
    return Placement(chunk=chunk, tp_rank=tp_rank, tensors=tensors, ep_rank=ep_rank)


def _numbers(rule: Rule, topology: Topology, chunk: Chunk) -> list[tuple[int, int]]:
    """Layer numbers of a rule's parameters on a chunk: in the local name and in the sources' names."""
    vision = rule.component == "vision"
    if rule.tied and topology.text_first_chunk is topology.text_last_chunk:
        return []
    if rule.place in ("first", "last"):
        first, last = (chunk.vision_first, chunk.vision_last) if vision else (chunk.text_first, chunk.text_last)
        return [(0, 0)] if (first if rule.place == "first" else last) else []
    layers = chunk.vision if vision else chunk.text
    if rule.layers is None:
        return list(enumerate(layers))
    return [(layer - layers.start, number) for number, layer in enumerate(rule.layers) if layer in layers]


def _experts(rule: Rule, topology: Topology, ep_rank: int) -> range:
    """Numbers of the experts that a rank holds; one for what is no expert."""
    if rule.place != "expert":
        return range(1)
    if rule.experts % topology.expert:
        raise PlacementError(
            f"{rule.sources[0].name.format(i=0)}: {rule.experts} experts are not divisible by expert-parallel size {topology.expert}; "
            "choose a size that divides it"
        )
    share = rule.experts // topology.expert
    return range(ep_rank * share, (ep_rank + 1) * share)


@dataclass(frozen=True)
class _Part:
    """A block of every parameter that a rule makes on one tensor rank, before it has names; ``source`` as in ``Run``."""

    source: int | None
    local_start: Shape
    start: Shape
    shape: Shape

    def block(self, name: str, sources: Sequence[Source], expert: int) -> Block:
        if self.source is None:
            return Block(name, self.local_start, None, self.start, self.shape)
        source = sources[self.source]
        start = (expert, self.start[1], self.start[0]) if source.stacked else self.start
        return Block(name, self.local_start, source.name, start, self.shape, source.stacked)


def _parts(rule: Rule, number: int, tp_size: int, tp_rank: int) -> tuple[Shape, list[_Part]]:
    """Shape and parts of the parameters of a rule on one tensor rank, alike for all layers and experts.

    Raises:
        PlacementError: a size does not divide, naming the tensor of layer ``number``.
    """
    axis, full = rule.layout.axis, rule.sources[0].view_shape
    try:
        runs = rule.layout.runs([source.view_shape[axis] for source in rule.sources], tp_size, tp_rank)
    except PlacementError as error:
        raise PlacementError(f"{rule.sources[0].name.format(i=number)}: {error}") from None

    def along(value: int, others: Shape) -> Shape:
        return (*others[:axis], value, *others[axis + 1 :])

    origin = (0,) * len(full)
    parts, offset = [], 0
    for run in runs:
        parts.append(_Part(run.source, along(offset, origin), along(run.start, origin), along(run.length, full)))
        offset += run.length
    return along(offset, full), parts


def place_all(table: Sequence[Rule], topology: Topology) -> list[Placement]:
    """Placements of every rank and every chunk, in order of execution."""
    return [
        place(table, topology, tp_rank, chunk, ep_rank)
        for chunk in topology.order
        for tp_rank in range(topology.tensor_ranks)
        for ep_rank in range(topology.expert)
    ]


def check_names(found: Sequence[str], expected: Sequence[str], where: str) -> None:
    """Compare two sets of tensor names.

    Raises:
        PlacementError: missing or unexpected names, with counts and examples.
    """
    missing, extra = set(expected) - set(found), set(found) - set(expected)
    parts = []
    if missing:
        parts.append(f"{len(missing)} missing: {name_some(missing)}")
    if extra:
        parts.append(f"{len(extra)} unexpected: {name_some(extra)}")
    if parts:
        raise PlacementError(f"{where}: the tensors are not those of this model and split: {'; '.join(parts)}")
