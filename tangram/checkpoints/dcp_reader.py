"""A training checkpoint as canonical tensors, in one process and without a model: for export, resplit and a look inside."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tangram.checkpoints.dcp_blocks import BlockTensor, Piece
from tangram.checkpoints.dcp_manifest import find_checkpoint, read_manifest
from tangram.checkpoints.dcp_planner import SafeReader, check_model_names, read_alone, read_metadata
from tangram.checkpoints.dcp_state import model_key, split_key
from tangram.checkpoints.reader import TensorInfo, check_rectangle, files_identity
from tangram.placement.table import Shape


class DCPReader:
    """``CanonicalReader`` of a training checkpoint's parameters.

    Args:
        path: the folder of one checkpoint, or the folder of checkpoints, of which the newest is taken.

    Raises:
        CheckpointError: no checkpoint there, or a damaged one.
    """

    def __init__(self, path: str | Path) -> None:
        self.folder = find_checkpoint(path)
        self.manifest = read_manifest(self.folder)
        self._metadata = read_metadata(self.folder)
        self._reader = SafeReader(self.folder)
        self._infos: dict[str, TensorInfo] = {}
        for key, entry in self._metadata.state_dict_metadata.items():
            kind, name = split_key(key)
            if kind == "model":
                assert isinstance(entry, TensorStorageMetadata), "read_metadata accepts tensors only"
                self._infos[name] = TensorInfo(tuple(entry.size), entry.properties.dtype)

    @property
    def identity(self) -> str:
        """See ``identity_of``."""
        return files_identity(file for file in self.folder.iterdir() if file.is_file())

    def check_model(self, shapes: Mapping[str, Shape]) -> None:
        """Check that the checkpoint holds exactly the tensors of a model.

        Raises:
            CheckpointError: as ``check_model_names``.
        """
        check_model_names(self._metadata, shapes, str(self.folder))

    def names(self) -> Mapping[str, TensorInfo]:
        """Every parameter: canonical name -> shape and dtype."""
        return self._infos

    def read(self, name: str, start: Shape, shape: Shape) -> torch.Tensor:
        """The rectangle of tensor ``name`` that begins at ``start`` and has ``shape``, on the CPU.

        Raises:
            CheckpointError: no such tensor, outside it, or a file is missing or damaged.
        """
        check_rectangle(self._infos, name, start, shape, str(self.folder))
        info = self._infos[name]
        result = torch.empty(shape, dtype=info.dtype)
        read_alone(self._reader, self._metadata, {model_key(name): BlockTensor(info.shape, [Piece(start, result)])})
        return result
