"""Put full canonical tensors together from the rectangles that ranks give, and prove that nothing is missing.

Each rank writes a file of its own, so gathering needs no collective and cannot hang.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tangram.backends.engine import CanonicalTensor
from tangram.errors import PlacementError
from tangram.placement.proof import cover_counts
from tangram.placement.table import Shape


@dataclass(frozen=True)
class Piece:
    """A rectangle of a canonical tensor in a rank's file: ``shape`` elements from ``start`` of a tensor of ``full_shape``."""

    name: str
    start: Shape
    shape: Shape
    full_shape: Shape
    file: Path
    key: str


@dataclass(frozen=True)
class Assembled:
    """A full tensor.

    Args:
        disagreement: largest ``||a - b|| / ||b||`` between two ranks' values of the same elements; 0 where no two ranks hold any, or
            all agree to the last bit.
    """

    name: str
    tensor: torch.Tensor
    disagreement: float


def write_pieces(pieces: Iterable[CanonicalTensor], path: Path) -> None:
    """Write one rank's rectangles as fp32."""
    tensors, places = {}, {}
    for number, piece in enumerate(pieces):
        key = str(number)
        tensors[key] = piece.local.detach().to("cpu", torch.float32, copy=True).contiguous()
        places[key] = [piece.name, list(piece.start), list(piece.local.shape), list(piece.full_shape)]
    save_file(tensors, path, metadata={"places": json.dumps(places)})


def read_pieces(path: Path) -> list[Piece]:
    """Places of what ``write_pieces`` wrote, without the values."""
    with safe_open(path, framework="pt") as file:
        places = json.loads(file.metadata()["places"])
    return [Piece(name, tuple(start), tuple(shape), tuple(full), path, key) for key, (name, start, shape, full) in places.items()]


def assemble(paths: Sequence[Path]) -> Iterator[Assembled]:
    """Full tensors, one at a time, in the order of their names.

    Raises:
        PlacementError: elements that no rank gave, a rectangle outside its tensor, or ranks that differ on a tensor's full shape.
    """
    by_name: dict[str, list[Piece]] = defaultdict(list)
    for path in paths:
        for piece in read_pieces(path):
            by_name[piece.name].append(piece)
    with contextlib.ExitStack() as stack:
        files = {path: stack.enter_context(safe_open(path, framework="pt")) for path in paths}
        for name in sorted(by_name):
            yield _assemble_one(name, by_name[name], files)


def _assemble_one(name: str, pieces: list[Piece], files: Mapping[Path, Any]) -> Assembled:
    shapes = {piece.full_shape for piece in pieces}
    if len(shapes) != 1:
        raise PlacementError(f"{name}: ranks give it the full shapes {sorted(shapes)}")
    shape = shapes.pop()
    try:
        counts = cover_counts(shape, [(piece.start, piece.shape) for piece in pieces])
    except PlacementError as error:
        raise PlacementError(f"{name}: {error}") from None
    full, filled = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    disagreement = 0.0
    for piece in pieces:
        value = files[piece.file].get_tensor(piece.key)
        region = tuple(slice(start, start + size) for start, size in zip(piece.start, piece.shape, strict=True))
        seen = filled[region].clone()
        if seen.any():
            disagreement = max(disagreement, difference(value[seen], full[region][seen]))
            value = torch.where(seen, full[region], value)
        full[region], filled[region] = value, True
    if (counts == 0).any():
        lost = math.prod(shape) - int(filled.sum())
        raise PlacementError(f"{name}: no rank gave {lost} of its {math.prod(shape)} elements")
    return Assembled(name, full, disagreement)


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """As ``tangram.align.compare.relative_error``; NaN beside a number counts as infinite, NaN beside NaN as equal."""
    if torch.equal(a, b):
        return 0.0
    if torch.equal(torch.isnan(a), torch.isnan(b)):
        a, b = torch.nan_to_num(a), torch.nan_to_num(b)
        difference = float(torch.linalg.vector_norm(a.double() - b.double()))
        reference = float(torch.linalg.vector_norm(b.double()))
        return difference / reference if reference else difference
    return math.inf
