"""The ``mp_rank`` directory layout of Megatron checkpoints, as MindSpeed-MM's converter writes it.

``<dir>/latest_checkpointed_iteration.txt`` holds ``release`` or an iteration number; beside it lies ``release/`` (or ``iter_0000100/``)
with one ``mp_rank_{tp:02}[_{pp:03}][_{ep:03}]/model_optim_rng.pt`` per rank, the last parts only where these sizes are above 1. A file is
``{"model": {...}, "checkpoint_version": 3.0}``, with ``model0``, ``model1``, ... instead of ``model`` for virtual stages.
"""

from __future__ import annotations

import re
import struct
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError

import torch

from tangram.checkpoints.copier import LocalSource, fill, local_dtype, show
from tangram.checkpoints.load_hf import LoadReport, Parameters, pair_up
from tangram.checkpoints.manifest import Manifest, check_manifest, read_manifest
from tangram.checkpoints.reader import CanonicalReader, count_elements
from tangram.checkpoints.safetensors_io import raw_bytes
from tangram.checkpoints.writing import WritePlan, WriteSettings
from tangram.config.model import ModelConfig
from tangram.errors import CheckpointError
from tangram.placement.blocks import LocalTensor, Placement, check_names, place
from tangram.placement.table import Rule, Shape
from tangram.placement.topology import Topology

TRACKER = "latest_checkpointed_iteration.txt"
RANK_FILE = "model_optim_rng.pt"


def rank_folder(tp_rank: int, pp_rank: int, pipeline: int, ep_rank: int = 0, expert: int = 1) -> str:
    """Folder of one rank: ``mp_rank_01`` without stages and expert parallelism, ``mp_rank_01_003_000`` with both."""
    return f"mp_rank_{tp_rank:02}" + (f"_{pp_rank:03}" if pipeline > 1 else "") + (f"_{ep_rank:03}" if expert > 1 else "")


def _ranks(topology: Topology) -> list[tuple[int, int, int]]:
    """Tensor, pipeline and expert rank of every file."""
    return [(tp, pp, ep) for pp in range(topology.pipeline) for tp in range(topology.tensor_ranks) for ep in range(topology.expert)]


def plan_ranks(table: Sequence[Rule], topology: Topology, source: CanonicalReader) -> WritePlan:
    """Which files ``write_ranks`` writes."""
    files, largest = [], 0
    for tp, pp, ep in _ranks(topology):
        size = 0
        for vp_rank in range(topology.virtual):
            for layout in place(table, topology, tp, topology.chunk(pp, vp_rank), ep).tensors.values():
                nbytes = count_elements(layout.shape) * local_dtype(layout, source).itemsize
                size, largest = size + nbytes, max(largest, nbytes)
        files.append((f"{rank_folder(tp, pp, topology.pipeline, ep, topology.expert)}/{RANK_FILE}", size))
    return WritePlan(tuple(files), largest)


def chunk_keys(virtual: int) -> list[str]:
    """Keys of a file's model chunks."""
    return ["model"] if virtual == 1 else [f"model{i}" for i in range(virtual)]


def write_ranks(folder: Path, table: Sequence[Rule], topology: Topology, source: CanonicalReader, settings: WriteSettings | None = None) -> int:
    """Write the file of every rank into ``folder``, holding one parameter in memory at a time.

    Returns:
        Bytes of tensors written.

    Raises:
        CheckpointError, PlacementError: as ``fill``.
    """
    settings = settings or WriteSettings()
    written, total = 0, plan_ranks(table, topology, source).bytes
    for tp, pp, ep in _ranks(topology):
        chunks = [place(table, topology, tp, topology.chunk(pp, vp_rank), ep) for vp_rank in range(topology.virtual)]
        path = folder / rank_folder(tp, pp, topology.pipeline, ep, topology.expert) / RANK_FILE
        path.parent.mkdir(parents=True)
        written += _write_rank(path, chunks, source)
        if settings.progress is not None:
            settings.progress(written, total)
    return written


def _write_rank(path: Path, chunks: Sequence[Placement], source: CanonicalReader) -> int:
    """Let torch lay the file out without data, then put each parameter where its storage belongs.

    The checksums of the zip entries stay 0; torch does not look at them.
    """
    layouts = [layout for chunk in chunks for layout in chunk.tensors.values()]
    dtypes = [local_dtype(layout, source) for layout in layouts]
    empty = iter([torch.empty(layout.shape, dtype=dtype) for layout, dtype in zip(layouts, dtypes, strict=True)])
    state: dict[str, object] = {
        key: {name: next(empty) for name in chunk.tensors} for key, chunk in zip(chunk_keys(len(chunks)), chunks, strict=True)
    }
    with torch.serialization.skip_data():
        torch.save({**state, "checkpoint_version": 3.0}, path)
    written = 0
    with path.open("r+b") as file:
        for layout, dtype, (offset, size) in zip(layouts, dtypes, _storages(path), strict=True):
            tensor = torch.empty(layout.shape, dtype=dtype)
            assert tensor.nbytes == size, f"{path}: storage of {size} bytes for {layout.name}"
            fill(layout, tensor, source)
            file.seek(offset)
            file.write(raw_bytes(tensor))
            written += size
    return written


def _storages(path: Path) -> list[tuple[int, int]]:
    """Offset and size, in bytes, of every storage of a torch file, in the order in which they were saved.

    A zip entry's data follows its local header: 30 bytes, of which bytes 26 to 29 are the lengths of the name and the extra field after it.
    """
    found: dict[int, tuple[int, int]] = {}
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        for entry in archive.infolist():
            number = re.fullmatch(r"[^/]+/data/(\d+)", entry.filename)
            if number:
                file.seek(entry.header_offset + 26)
                name, extra = struct.unpack("<HH", file.read(4))
                found[int(number[1])] = (entry.header_offset + 30 + name + extra, entry.file_size)
    return [found[number] for number in sorted(found)]


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
        word = tracker.read_text().strip()
        if word != "release" and not word.isdigit():
            raise CheckpointError(f"{tracker}: {word!r} is neither 'release' nor an iteration number")
        self.folder = self.path / ("release" if word == "release" else f"iter_{int(word):07}")
        self.manifest: Manifest | None = read_manifest(self.path)
        names = sorted(entry.name for entry in self.folder.glob("mp_rank_*"))
        self.ranks = [m for m in (re.fullmatch(r"mp_rank_(\d{2})(?:_(\d{3}))?(?:_(\d{3}))?", name) for name in names) if m]
        if not self.ranks or len(self.ranks) != len(names):
            raise CheckpointError(f"{self.folder}: no folders mp_rank_TT or mp_rank_TT_PPP of one kind, found {names[:4]}; convert again")

    def check_split(self, topology: Topology) -> None:
        """Check that there is exactly one folder per rank of a split.

        Raises:
            CheckpointError: there is not.
        """
        present = {m[0] for m in self.ranks}
        expected = {rank_folder(tp, pp, topology.pipeline, ep, topology.expert) for tp, pp, ep in _ranks(topology)}
        if present != expected:
            tensor = 1 + max(int(m[1]) for m in self.ranks)
            pipeline = 1 + max(int(m[2] or 0) for m in self.ranks)
            absent = (
                f"; {len(expected - present)} of its folders are missing: {', '.join(sorted(expected - present)[:4])}" if expected - present else ""
            )
            raise CheckpointError(
                f"{self.folder}: holds {len(present)} ranks, tensor-parallel {tensor} x pipeline {pipeline}, but the run is "
                f"tensor-parallel {topology.tensor} x pipeline {topology.pipeline}{absent}; convert again for this split"
            )

    def load(self, tp_rank: int, pp_rank: int, topology: Topology, ep_rank: int = 0) -> list[dict[str, torch.Tensor]]:
        """Tensors of one rank, mapped from its file, one mapping per virtual stage.

        Raises:
            CheckpointError: the file is missing, damaged, holds other objects than tensors, or has another number of virtual stages.
        """
        path = self.file(tp_rank, pp_rank, topology, ep_rank)
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file; convert again")
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except UnpicklingError as error:
            raise CheckpointError(f"{path}: holds more than tensors and plain values, which is not loaded: {str(error).split('.')[0]}") from None
        except (RuntimeError, EOFError, OSError, ValueError) as error:
            raise CheckpointError(
                f"{path}: cannot be read, {path.stat().st_size} bytes: {str(error).splitlines()[0]}; copy or convert it again"
            ) from None
        present = sorted(key for key in state if re.fullmatch(r"model\d*", key)) if isinstance(state, Mapping) else []
        expected = chunk_keys(topology.virtual)
        if present != sorted(expected):
            raise CheckpointError(
                f"{path}: holds {', '.join(present) or 'no model'}, but a run with {topology.virtual} virtual stage(s) needs {', '.join(expected)}; "
                "convert again for this split"
            )
        return [{name: value for name, value in state[key].items() if not (value is None and name.endswith("_extra_state"))} for key in expected]

    def file(self, tp_rank: int, pp_rank: int, topology: Topology, ep_rank: int = 0) -> Path:
        """File of one rank."""
        return self.folder / rank_folder(tp_rank, pp_rank, topology.pipeline, ep_rank, topology.expert) / RANK_FILE

    def canonical(self, table: Sequence[Rule], topology: Topology, shapes: Mapping[str, Shape]) -> LocalSource:
        """All ranks' files as one source of canonical tensors.

        Raises:
            CheckpointError, PlacementError: files or tensors missing, unexpected, of another shape or damaged.
        """
        self.check_split(topology)
        parts = []
        for tp, pp, ep in _ranks(topology):
            where = str(self.file(tp, pp, topology, ep).relative_to(self.path))
            for vp_rank, tensors in enumerate(self.load(tp, pp, topology, ep)):
                placement = place(table, topology, tp, topology.chunk(pp, vp_rank), ep)
                check_names(list(tensors), list(placement.tensors), f"{self.path}/{where}")
                parts.append((placement, tensors, where))
        return LocalSource(parts, shapes)


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
        CheckpointError: the manifest or the files are of another split, a file is damaged, or a shape or type differs.
        PlacementError: missing or unexpected tensors.
    """
    if directory.manifest is not None:
        check_manifest(directory.manifest, topology, model, str(directory.path), padded_vocab)
    directory.check_split(topology)
    tp_rank, pp_rank = placements[0].tp_rank, placements[0].chunk.pp_rank
    where = str(directory.file(tp_rank, pp_rank, topology))
    files = directory.load(tp_rank, pp_rank, topology)
    elements = read = 0
    for placement, chunk in zip(placements, files, strict=True):
        check_names(list(chunk), list(placement.tensors), where)
    pairs = pair_up(placements, parameters, where)
    values = [chunk[name] for placement, chunk in zip(placements, files, strict=True) for name in placement.tensors]
    for (layout, parameter), value in zip(pairs, values, strict=True):
        _copy_local(layout, parameter, value, where, cast)
        elements += parameter.numel()
        read += value.nbytes
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
