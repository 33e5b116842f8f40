"""Blocks of canonical tensors as torch.distributed.checkpoint (DCP) sees them.

A rank holds rectangles of a canonical tensor, each a view of something local: a slice of a fused parameter, or a stretch of the
distributed optimizer's flat buffer. ``BlockTensor`` presents them to DCP under the canonical name; DCP then saves, deduplicates and
reshards by offsets and knows nothing of how local tensors are laid out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from tangram.placement.blocks import Block
from tangram.placement.table import Shape

MAX_PIECE_BYTES = 64 * 2**20
"""DCP reads a stored piece whole even where a rank needs a part of it, so large blocks are stored in pieces of about this size."""


@dataclass(frozen=True)
class Box:
    """A rectangle: ``shape`` elements from ``start``."""

    start: Shape
    shape: Shape

    def intersect(self, other: Box) -> Box | None:
        """The common part, or None."""
        start = tuple(map(max, self.start, other.start))
        end = tuple(min(a + m, b + n) for a, m, b, n in zip(self.start, self.shape, other.start, other.shape, strict=True))
        shape = tuple(b - a for a, b in zip(start, end, strict=True))
        return Box(start, shape) if min(shape, default=1) > 0 else None


def flat_range_boxes(shape: Sequence[int], start: int, end: int) -> list[Box]:
    """Cut elements ``[start, end)`` of a row-major tensor into rectangles.

    Each rectangle is a run of the flat order and they follow each other, so each can be viewed in place. A matrix gives at most three (the
    rest of a row, whole rows, the beginning of a row), a tensor of n dimensions at most ``2 n - 1``.
    """
    if start >= end:
        return []
    if not shape:
        return [Box((), ())]
    inner = math.prod(shape[1:])
    row, offset = divmod(start, inner)
    last_row, rest = divmod(end, inner)
    if row == last_row:
        return list(_in_row(row, shape[1:], offset, rest))
    boxes: list[Box] = []
    if offset:
        boxes += _in_row(row, shape[1:], offset, inner)
        row += 1
    if last_row > row:
        boxes.append(Box((row, *(0 for _ in shape[1:])), (last_row - row, *shape[1:])))
    if rest:
        boxes += _in_row(last_row, shape[1:], 0, rest)
    return boxes


def _in_row(row: int, shape: Sequence[int], start: int, end: int) -> Iterator[Box]:
    for box in flat_range_boxes(shape, start, end):
        yield Box((row, *box.start), (1, *box.shape))


@dataclass(frozen=True)
class Piece:
    """``data`` equals the rectangle of the canonical tensor that starts at ``start``; it is a view of what the rank holds."""

    start: Shape
    data: torch.Tensor


def block_piece(block: Block, local: torch.Tensor) -> Piece:
    """The part of a local tensor that ``block`` describes."""
    return Piece(block.canonical_start, block.to_canonical(local[block.local_slices]))


def flat_pieces(block: Block, local_shape: Shape, start: int, flat: torch.Tensor) -> Iterator[Piece]:
    """The parts of ``block`` that lie in a flat stretch of its local tensor.

    Args:
        local_shape: shape of the local tensor that the block belongs to.
        start: where in the flattened local tensor the stretch begins.
        flat: the stretch, one-dimensional and contiguous.
    """
    position = 0
    for run in flat_range_boxes(local_shape, start, start + flat.numel()):
        size = math.prod(run.shape)
        held = run.intersect(Box(block.local_start, block.shape))
        if held is not None:
            view = flat[position : position + size].view(run.shape)
            inside = tuple(slice(a - b, a - b + n) for a, b, n in zip(held.start, run.start, held.shape, strict=True))
            yield Piece(block.part(held.start, held.shape).canonical_start, block.to_canonical(view[inside]))
        position += size


def _split_large(piece: Piece) -> Iterator[Piece]:
    data = piece.data
    rows = data.shape[0] if data.dim() else 1
    row_bytes = max(data.nbytes // max(rows, 1), 1)
    step = max(MAX_PIECE_BYTES // row_bytes, 1)
    if rows <= step:
        yield piece
        return
    for row in range(0, rows, step):
        yield Piece((piece.start[0] + row, *piece.start[1:]), data[row : row + step])


class BlockTensor(torch.Tensor):
    """The pieces of one canonical tensor that this rank holds, for DCP only: it has a shape and a dtype but no data of its own.

    Saving writes the pieces; loading writes into them in place. Equal pieces of several ranks are written once (DCP drops items with one
    name and offset).

    Args:
        shape: of the canonical tensor.
        pieces: at least one; all of one dtype and device.
    """

    pieces: list[Piece]

    @staticmethod
    def __new__(cls, shape: Shape, pieces: Sequence[Piece]) -> BlockTensor:
        first = pieces[0].data
        tensor: BlockTensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=first.dtype, device=first.device)
        tensor.pieces = [part for piece in pieces for part in _split_large(piece)]
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func}: a BlockTensor is only a description of a checkpoint entry")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"BlockTensor({tuple(self.shape)}, {self.dtype}, {len(self.pieces)} pieces)"

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(piece.start)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=self._chunk(piece), properties=TensorProperties(dtype=self.dtype), size=torch.Size(self.shape)),
            )
            for piece in {piece.start: piece for piece in self.pieces}.values()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk(piece) for piece in self.pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """The piece at ``index.offset``.

        While loading, ``index.index`` counts this rank's pieces; while saving, DCP has renumbered it over all ranks, so it is only a hint.
        The hint matters where one rank holds a rectangle twice: both copies must be filled.
        """
        assert index.offset is not None
        offset = tuple(index.offset)
        hint = index.index
        if hint is not None and hint < len(self.pieces) and self.pieces[hint].start == offset:
            return self.pieces[hint].data
        return next(piece.data for piece in self.pieces if piece.start == offset)

    @staticmethod
    def _chunk(piece: Piece) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=torch.Size(piece.start), sizes=torch.Size(piece.data.shape))
