"""Placements: for one chunk of one rank, where every element of every local parameter lives in canonical tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tangram.errors import PlacementError, name_some
from tangram.placement.table import Rule, Shape, Source
from tangram.placement.topology import Chunk, Topology


@dataclass(frozen=True)
class Block:
    """A rectangle of a local parameter and the rectangle of a canonical tensor that it equals.

    Both have ``shape``. ``canonical`` None is padding: zeros on load, dropped on export, no gradient.
    """

    local: str
    local_start: Shape
    canonical: str | None
    canonical_start: Shape
    shape: Shape

    @property
    def local_slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.local_start, self.shape, strict=True))

    @property
    def canonical_slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.canonical_start, self.shape, strict=True))

    @property
    def numel(self) -> int:
        total = 1
        for size in self.shape:
            total *= size
        return total


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
        numbers = range(layers[rule.component]) if rule.place == "layer" else (0,)
        if layers[rule.component] == 0:
            continue
        for i in numbers:
            for source in rule.sources:
                name = source.name.format(i=i)
                if shapes.setdefault(name, source.shape) != source.shape:
                    raise PlacementError(f"tensor table gives {name} two shapes: {shapes[name]} and {source.shape}")
    return shapes


def place(table: Sequence[Rule], topology: Topology, tp_rank: int, chunk: Chunk) -> Placement:
    """Lay out one chunk of one tensor-parallel rank.

    Raises:
        PlacementError: a size does not divide, naming the canonical tensor.
    """
    tensors: dict[str, LocalTensor] = {}
    for rule in table:
        layers = chunk.vision if rule.component == "vision" else chunk.text
        first = chunk.vision_first if rule.component == "vision" else chunk.text_first
        last = chunk.vision_last if rule.component == "vision" else chunk.text_last
        if rule.place == "layer":
            numbers = list(enumerate(layers))
        elif (rule.place == "first" and first) or (rule.place == "last" and last):
            numbers = [(0, 0)]
        else:
            numbers = []
        if rule.tied and topology.text_first_chunk is topology.text_last_chunk:
            numbers = []
        for local_number, number in numbers:
            name = rule.local.format(i=local_number)
            if name in tensors:
                raise PlacementError(f"tensor table has two rules for the local parameter {name}")
            tensors[name] = _lay_out(rule, name, number, topology.tensor, tp_rank)
    return Placement(chunk=chunk, tp_rank=tp_rank, tensors=tensors)


def _lay_out(rule: Rule, name: str, number: int, tp_size: int, tp_rank: int) -> LocalTensor:
    axis = rule.layout.axis
    full = rule.sources[0].shape
    names = [source.name.format(i=number) for source in rule.sources]
    try:
        runs = rule.layout.runs([source.shape[axis] for source in rule.sources], tp_size, tp_rank)
    except PlacementError as error:
        raise PlacementError(f"{names[0]}: {error}") from None
    blocks = []
    offset = 0
    for run in runs:
        local_start = tuple(offset if dim == axis else 0 for dim in range(len(full)))
        start = tuple(run.start if dim == axis else 0 for dim in range(len(full)))
        shape = tuple(run.length if dim == axis else size for dim, size in enumerate(full))
        blocks.append(Block(name, local_start, None if run.source is None else names[run.source], start, shape))
        offset += run.length
    local_shape = tuple(offset if dim == axis else size for dim, size in enumerate(full))
    sources = tuple(Source(canonical, source.shape) for canonical, source in zip(names, rule.sources, strict=True))
    return LocalTensor(name=name, shape=local_shape, blocks=tuple(blocks), rule=rule, sources=sources)


def place_all(table: Sequence[Rule], topology: Topology) -> list[Placement]:
    """Placements of every tensor-parallel rank and every chunk, in order of execution."""
    return [place(table, topology, tp_rank, chunk) for chunk in topology.order for tp_rank in range(topology.tensor)]


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
