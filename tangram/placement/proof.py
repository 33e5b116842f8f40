"""Proof that a set of placements covers a model: nothing missing, nothing twice, in both directions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import numpy as np

from tangram.errors import PlacementError, name_some
from tangram.placement.blocks import Placement, canonical_shapes, place_all
from tangram.placement.table import Rule, Shape
from tangram.placement.topology import Topology


def cover_counts(shape: Shape, boxes: Iterable[tuple[Shape, Shape]]) -> np.ndarray:
    """How often each cell of a tensor is covered by boxes ``(start, size)``, on the grid of the boxes' own edges.

    Raises:
        PlacementError: a box reaches outside the tensor or has no volume.
    """
    boxes = [(start, tuple(a + b for a, b in zip(start, size, strict=True))) for start, size in boxes]
    edges: list[dict[int, int]] = []
    for dim, size in enumerate(shape):
        marks = sorted({0, size, *(start[dim] for start, _ in boxes), *(end[dim] for _, end in boxes)})
        if marks[0] < 0 or marks[-1] > size:
            raise PlacementError(f"a block reaches to {marks[-1]} along dim {dim} of a tensor of shape {shape}")
        edges.append({mark: index for index, mark in enumerate(marks)})
    counts = np.zeros([max(len(marks) - 1, 0) for marks in edges], dtype=np.int64)
    for start, end in boxes:
        counts[tuple(slice(edges[dim][a], edges[dim][b]) for dim, (a, b) in enumerate(zip(start, end, strict=True)))] += 1
    return counts


@lru_cache(maxsize=4096)
def cover_extremes(shape: Shape, boxes: tuple[tuple[Shape, Shape], ...]) -> tuple[int, int]:
    """Least and most of ``cover_counts``; 1 for a tensor without elements. A model's layers are alike, so that few cases are many tensors."""
    counts = cover_counts(shape, boxes)
    return (int(counts.min()), int(counts.max())) if counts.size else (1, 1)


def prove(placements: Sequence[Placement], shapes: Mapping[str, Shape]) -> None:
    """Prove that every local element has exactly one source and every canonical element an owner.

    Args:
        placements: of all ranks and chunks.
        shapes: name and shape of every canonical tensor.

    Raises:
        PlacementError: naming the parameter or the tensors.
    """
    owners: dict[str, list[tuple[Shape, Shape]]] = defaultdict(list)
    for placement in placements:
        for tensor in placement.tensors.values():
            least, most = cover_extremes(tensor.shape, tuple((block.local_start, block.shape) for block in tensor.blocks))
            if (least, most) != (1, 1):
                raise PlacementError(
                    f"{tensor.name} on tensor rank {placement.tp_rank}, stage {placement.chunk.position}: "
                    f"elements covered between {least} and {most} times instead of once"
                )
            for block in tensor.blocks:
                if block.canonical is None:
                    continue
                if block.canonical not in shapes:
                    raise PlacementError(f"{tensor.name}: its source {block.canonical} is not a tensor of the model")
                owners[block.canonical].append((block.canonical_start, block.canonical_shape))
    lost = []
    for name, shape in shapes.items():
        boxes = owners.get(name)
        if not boxes or cover_extremes(shape, tuple(dict.fromkeys(boxes)))[0] == 0:
            lost.append(name)
    if lost:
        raise PlacementError(f"{len(lost)} tensors have elements that no rank holds: {name_some(lost)}")


def prove_table(table: Sequence[Rule], topology: Topology) -> dict[str, Shape]:
    """Prove a family's table on shapes alone and return the canonical shapes."""
    shapes = canonical_shapes(table, topology)
    prove(place_all(table, topology), shapes)
    return shapes


def distinct_elements(placements: Sequence[Placement]) -> int:
    """Canonical elements that the placements hold, replicas and tied copies counted once."""
    seen = {(b.canonical, b.canonical_start, b.canonical_shape): b.numel for p in placements for b in p.blocks if b.canonical is not None}
    return sum(seen.values())


__all__ = ["cover_counts", "cover_extremes", "distinct_elements", "prove", "prove_table"]
