"""Tensors of a reader as torch.distributed.checkpoint entries that are read only when they are written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from tangram.checkpoints.dcp_blocks import MAX_PIECE_BYTES
from tangram.checkpoints.dcp_state import model_key
from tangram.checkpoints.engine import slabs
from tangram.checkpoints.reader import CanonicalReader
from tangram.placement.table import Shape


def source_entries(source: CanonicalReader, progress: Callable[[int, int], None] | None = None) -> dict[str, torch.Tensor]:
    """``model.`` entries of every tensor of ``source``.

    Args:
        progress: called with bytes read so far and bytes in all.
    """
    total = sum(info.nbytes for info in source.names().values())
    read = 0

    def fetch(name: str, start: Shape, shape: Shape) -> torch.Tensor:
        nonlocal read
        piece = source.read(name, start, shape)
        read += piece.nbytes
        if progress is not None:
            progress(read, total)
        return piece

    return {model_key(name): SourceTensor(name, info.shape, info.dtype, fetch) for name, info in source.names().items()}


class SourceTensor(torch.Tensor):
    """One tensor of a reader, for DCP's writer only: it has a shape and a dtype, and reads its rows piece by piece when asked."""

    canonical: str
    fetch: Callable[[str, Shape, Shape], torch.Tensor]

    @staticmethod
    def __new__(cls, name: str, shape: Shape, dtype: torch.dtype, fetch: Callable[[str, Shape, Shape], torch.Tensor]) -> SourceTensor:
        tensor: SourceTensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=torch.device("cpu"))
        tensor.canonical, tensor.fetch = name, fetch
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func}: a SourceTensor is only a description of a checkpoint entry")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"SourceTensor({self.canonical}, {tuple(self.shape)}, {self.dtype})"

    def _pieces(self) -> Iterator[tuple[Shape, Shape]]:
        return slabs(tuple(self.shape), self.dtype.itemsize, MAX_PIECE_BYTES)

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties, size = TensorProperties(dtype=self.dtype), torch.Size(self.shape)
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(start)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=torch.Size(start), sizes=torch.Size(shape)), properties=properties, size=size
                ),
            )
            for start, shape in self._pieces()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """The piece at ``index.offset``."""
        assert index.offset is not None
        start = tuple(index.offset)
        return self.fetch(self.canonical, start, next(shape for begin, shape in self._pieces() if begin == start))
