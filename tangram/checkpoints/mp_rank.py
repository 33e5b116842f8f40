"""The ``mp_rank`` directory layout of Megatron checkpoints, as MindSpeed-MM's converter writes it.

``<dir>/latest_checkpointed_iteration.txt`` holds ``release`` or an iteration number; beside it lies ``release/`` (or ``iter_0000100/``)
with one ``mp_rank_{tp:02}[_{pp:03}][_{ep:03}]/model_optim_rng.pt`` per rank, the pipeline part only where there is more than one stage,
the expert part only where experts are split. A file is ``{"model": {...}, "checkpoint_version": 3.0}``, with ``model0``, ``model1``, ...
instead of ``model`` for virtual stages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from tangram.checkpoints.copier import LocalSource, check_sources, check_tiling, local_dtype, read_local, show
from tangram.checkpoints.engine import PlannedFile, PlannedTensor, peak_memory, write_files
from tangram.checkpoints.find_split import RANK_FOLDER
from tangram.checkpoints.load_hf import LoadReport, Parameters, check_finite, pair_up
from tangram.checkpoints.manifest import Manifest, check_manifest, read_manifest
from tangram.checkpoints.rank_file import MODEL_KEY, load_rank_file
from tangram.checkpoints.reader import CanonicalReader, TensorInfo, files_identity, identity_of
from tangram.checkpoints.resume import Journal
from tangram.checkpoints.torch_file import TorchFile
from tangram.checkpoints.writing import WritePlan, WriteSettings
from tangram.config.model import ModelConfig
from tangram.errors import CheckpointError
from tangram.placement.blocks import LocalTensor, Placement, check_names, place
from tangram.placement.table import Rule, Shape
from tangram.placement.topology import Topology

TRACKER = "latest_checkpointed_iteration.txt"
RANK_FILE = "model_optim_rng.pt"
CHECKPOINT_VERSION = 3.0


class Rank(NamedTuple):
    """One of the ranks that hold different parts of a model."""

    tp: int
    pp: int = 0
    ep: int = 0

    def folder(self, topology: Topology) -> str:
        """``mp_rank_01``, ``mp_rank_01_003`` with stages, ``mp_rank_01_003_001`` with split experts too."""
        stage = f"_{self.pp:03}" if topology.pipeline > 1 else ""
        return f"mp_rank_{self.tp:02}{stage}" + (f"_{self.ep:03}" if topology.expert > 1 else "")

    def place(self, table: Sequence[Rule], topology: Topology) -> list[Placement]:
        """Of this rank's chunks, by virtual stage."""
        return [place(table, topology, self.tp, topology.chunk(self.pp, vp_rank), self.ep) for vp_rank in range(topology.virtual)]


def all_ranks(topology: Topology) -> list[Rank]:
    """Every rank that has a file, stage by stage."""
    return [Rank(tp, pp, ep) for pp in range(topology.pipeline) for tp in range(topology.tensor_ranks) for ep in range(topology.expert)]


def chunk_keys(virtual: int) -> list[str]:
    """Keys of a file's model chunks."""
    return ["model"] if virtual == 1 else [f"model{i}" for i in range(virtual)]


def write_ranks(
    folder: Path,
    table: Sequence[Rule],
    topology: Topology,
    source: CanonicalReader,
    settings: WriteSettings = WriteSettings(),  # noqa: B008  frozen
    journal: Journal | None = None,
) -> int:
    """Write the file of every rank into ``folder``, flushed to the disk, a slab of a parameter in memory at a time.

    Args:
        journal: of the output directory that ``folder`` lies in; finished files that it names are kept.

    Returns:
        Bytes of tensors written.

    Raises:
        CheckpointError, PlacementError: as ``fill``, and where the disk is too small or a file cannot be written.
    """
    return write_files(folder, _plan(table, topology, source), identity_of(source), settings, journal)


def plan_ranks(table: Sequence[Rule], topology: Topology, source: CanonicalReader, settings: WriteSettings = WriteSettings()) -> WritePlan:  # noqa: B008
    """The files that ``write_ranks`` into ``release`` would write.

    Raises:
        CheckpointError, PlacementError: as ``write_ranks`` before its first byte.
    """
    return WritePlan(tuple((f"release/{file.path}", file.size) for file in _plan(table, topology, source)), peak_memory(settings))


def _plan(table: Sequence[Rule], topology: Topology, source: CanonicalReader) -> list[PlannedFile]:
    archives: dict[str, TorchFile] = {}
    return [_plan_rank(f"{rank.folder(topology)}/{RANK_FILE}", rank.place(table, topology), source, archives) for rank in all_ranks(topology)]


def _plan_rank(path: str, chunks: Sequence[Placement], source: CanonicalReader, archives: dict[str, TorchFile]) -> PlannedFile:
    """The file of one rank; ``archives`` is filled: what files look like by their names and shapes, in which the ranks of a stage are alike."""
    state: dict[str, object] = {"checkpoint_version": CHECKPOINT_VERSION}
    layouts: list[LocalTensor] = []
    for key, chunk in zip(chunk_keys(len(chunks)), chunks, strict=True):
        for layout in chunk.tensors.values():
            check_tiling(layout)
            check_sources(layout, source)
            layouts.append(layout)
        state[key] = {name: TensorInfo(layout.shape, local_dtype(layout, source)) for name, layout in chunk.tensors.items()}
    content = repr(state)
    if content not in archives:
        archives[content] = TorchFile(Path(path).stem, state)
    file = archives[content]
    tensors = tuple(
        PlannedTensor(layout.name, offset, info, partial(read_local, layout, source), recipe=_recipe(layout))
        for layout, info, offset in zip(layouts, file.tensors, file.offsets, strict=True)
    )
    return PlannedFile(path, file.size, tensors, file.fixed)


def _recipe(layout: LocalTensor) -> str:
    return " ".join(f"{b.local_start} {b.canonical} {b.canonical_start} {b.shape} {b.stacked}" for b in layout.blocks)


class MMDirectory:
    """An ``mp_rank`` directory to read.

    Raises:
        CheckpointError: no tracker, or no rank folders where it points.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        tracker = self.path / TRACKER
        if not tracker.is_file():
            raise CheckpointError(f"{self.path}: no {TRACKER}; give a directory that mm-convert or Megatron wrote")
        word = tracker.read_bytes()[:80].decode(errors="replace").strip()
        if word != "release" and not re.fullmatch(r"[0-9]{1,18}", word):
            raise CheckpointError(f"{tracker}: {word!r} is neither 'release' nor an iteration number")
        self.folder = self.path / ("release" if word == "release" else f"iter_{int(word):07}")
        self.manifest: Manifest | None = read_manifest(self.path)
        names = sorted(entry.name for entry in self.folder.glob("mp_rank_*"))
        self.ranks = [m for m in map(RANK_FOLDER.fullmatch, names) if m]
        """Folders. Of one with a single part after the tensor rank only the split tells whether that is a stage or an expert-parallel rank."""
        if not self.ranks or len(self.ranks) != len(names) or len({m.lastindex for m in self.ranks}) > 1:
            raise CheckpointError(
                f"{self.folder}: no folders mp_rank_TT, mp_rank_TT_PPP or mp_rank_TT_PPP_EEE of one kind, found {names[:4]}; convert again"
            )

    def check_split(self, topology: Topology) -> None:
        """Check that there is exactly one folder per rank of a split.

        Raises:
            CheckpointError: there is not.
        """
        present = {m[0] for m in self.ranks}
        expected = {rank.folder(topology) for rank in all_ranks(topology)}
        if present != expected:
            missing = sorted(expected - present)
            absent = f"; {len(missing)} of its folders are missing: {', '.join(missing[:4])}" if missing else ""
            raise CheckpointError(
                f"{self.folder}: holds {len(present)} ranks, {self._sizes(topology)}, but the run is tensor-parallel {topology.tensor_ranks} x "
                f"pipeline {topology.pipeline}{f' x expert-parallel {topology.expert}' if topology.expert > 1 else ''}{absent}; "
                "convert again for this split"
            )

    def _sizes(self, topology: Topology) -> str:
        """The sizes that the folders' names show, in words."""
        tensor, second, third = (1 + max(int(m[part] or 0) for m in self.ranks) for part in (1, 2, 3))
        if third == 1 and topology.expert > 1 and topology.pipeline == 1:
            second, third = 1, second
        return f"tensor-parallel {tensor} x pipeline {second}" + (f" x expert-parallel {third}" if third > 1 else "")

    def load(self, rank: Rank, topology: Topology) -> list[dict[str, torch.Tensor]]:
        """Tensors of one rank, mapped from its file, one mapping per virtual stage.

        Raises:
            CheckpointError: the file is missing, damaged, holds other objects than tensors, or has another number of virtual stages.
        """
        path = self.file(rank, topology)
        state = load_rank_file(path)
        present = sorted(filter(MODEL_KEY.fullmatch, state))
        expected = chunk_keys(topology.virtual)
        if present != sorted(expected):
            raise CheckpointError(
                f"{path}: holds {', '.join(present) or 'no model'}, but a run with {topology.virtual} virtual stage(s) needs {', '.join(expected)}; "
                "convert again for this split"
            )
        chunks = [{name: value for name, value in state[key].items() if not (value is None and name.endswith("_extra_state"))} for key in expected]
        for name, value in (pair for chunk in chunks for pair in chunk.items()):
            if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
                raise CheckpointError(f"{path}: {name} is {type(value).__name__} instead of a plain tensor; convert again")
        return chunks

    def file(self, rank: Rank, topology: Topology) -> Path:
        """File of one rank."""
        return self.folder / rank.folder(topology) / RANK_FILE

    def canonical(self, table: Sequence[Rule], topology: Topology, shapes: Mapping[str, Shape]) -> LocalSource:
        """All ranks' files as one source of canonical tensors.

        Raises:
            CheckpointError, PlacementError: files or tensors missing, unexpected, of another shape or damaged.
        """
        self.check_split(topology)
        parts = []
        for rank in all_ranks(topology):
            where = str(self.file(rank, topology).relative_to(self.path))
            for placement, tensors in zip(rank.place(table, topology), self.load(rank, topology), strict=True):
                check_names(list(tensors), list(placement.tensors), f"{self.path}/{where}")
                parts.append((placement, tensors, where))
        return LocalSource(parts, shapes, files_identity(self.file(rank, topology) for rank in all_ranks(topology)))


def load_mm(
    directory: MMDirectory,
    placements: Sequence[Placement],
    parameters: Parameters,
    topology: Topology,
    model: ModelConfig,
    cast: bool = False,
    padded_vocab: int | None = None,
) -> LoadReport:
    """Fill one rank's parameters from its own file.

    Args:
        placements: of this rank's chunks, by virtual stage.
        cast: allow the element type of the files to be changed to the parameters'.
        padded_vocab: the run's, compared with the manifest's where given.

    Raises:
        CheckpointError: the manifest or the files are of another split, a file is damaged, a shape or type differs, or a weight is NaN or
            infinite.
        PlacementError: missing or unexpected tensors.
    """
    if directory.manifest is not None:
        check_manifest(directory.manifest, topology, model, str(directory.path), padded_vocab)
    directory.check_split(topology)
    rank = Rank(placements[0].tp_rank, placements[0].chunk.pp_rank, placements[0].ep_rank)
    where = str(directory.file(rank, topology))
    files = directory.load(rank, topology)
    elements = read = 0
    for placement, chunk in zip(placements, files, strict=True):
        check_names(list(chunk), list(placement.tensors), where)
    pairs = pair_up(placements, parameters, where)
    values = [chunk[name] for placement, chunk in zip(placements, files, strict=True) for name in placement.tensors]
    for (layout, parameter), value in zip(pairs, values, strict=True):
        _copy_local(layout, parameter, value, where, cast)
        elements += parameter.numel()
        read += value.nbytes
    check_finite(placements, parameters, where)
    tied = None if model.text_decoder.untie_embeddings_and_output_weights else "output_layer: tied to word_embeddings"
    return LoadReport(parameters=len(pairs), elements=elements, bytes=read, tied=tied)


def _copy_local(layout: LocalTensor, parameter: torch.Tensor, value: torch.Tensor, where: str, cast: bool) -> None:
    if not layout.shape == tuple(parameter.shape) == tuple(value.shape):
        raise CheckpointError(
            f"{where}: {layout.name} has shape {tuple(value.shape)} in the file, {tuple(parameter.shape)} in the model "
            f"and {layout.shape} by the split; convert again"
        )
    if value.dtype != parameter.dtype and not cast:
        raise CheckpointError(
            f"{where}: {layout.name} is {show(value.dtype)} but the parameter is {show(parameter.dtype)}; "
            f"build the model in {show(value.dtype)}, or ask for the cast"
        )
    with torch.no_grad():
        parameter.copy_(value)
