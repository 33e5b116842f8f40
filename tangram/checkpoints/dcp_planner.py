"""Saving and loading through torch.distributed.checkpoint, strict in both directions.

DCP itself ignores entries that nobody asks for, casts silently, and loses what no rank contributes; here each of these is an error that
names the entry.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import IO, Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from tangram.checkpoints.dcp_ranks import distributed, lost_contact
from tangram.checkpoints.dcp_state import MASTER, MOMENTS, OPTIMIZERS, STEP, model_key, optimizer_key, split_key, step_entries
from tangram.errors import CheckpointError, name_some
from tangram.placement.table import Shape

METADATA_FILE = ".metadata"


class StrictSavePlanner(DefaultSavePlanner):
    """Refuses to write a checkpoint that is not whole.

    Args:
        names: canonical names of the whole model; each must be there, in full.
        steps: this rank's optimizer steps by canonical name.
    """

    def __init__(self, names: Iterable[str], steps: Mapping[str, int]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.names = list(names)
        self.steps = dict(steps)

    def create_local_plan(self) -> SavePlan:
        return replace(super().create_local_plan(), planner_data=self.steps)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """What is written, laid out by rows, so that a file does not tell a transposed view from a copy of it."""
        data = super().resolve_data(write_item)
        return data.contiguous() if isinstance(data, torch.Tensor) else data

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Check all ranks' plans, then plan as DCP does.

        Raises:
            CheckpointError: an entry of which parts are missing, a model tensor that nobody holds, optimizer state that is partial, or ranks
                whose optimizers have taken different numbers of steps.
        """
        present = _check_whole(all_plans)
        missing = [name for name in self.names if model_key(name) not in present]
        if missing:
            raise CheckpointError(f"{len(missing)} tensors of the model are held by no rank: {name_some(missing)}")
        for canonical in {name for kind, name in map(split_key, present) if kind in (*MOMENTS, MASTER, STEP)}:
            whole_moments(canonical, present, "the optimizer")
        _check_steps(plan.planner_data for plan in all_plans)
        plans, metadata = super().create_global_plan([replace(plan, planner_data=None) for plan in all_plans])
        return plans, replace(metadata, planner_data={key: (key,) for key in metadata.state_dict_metadata})


def _check_whole(plans: Iterable[SavePlan]) -> set[str]:
    sizes: dict[str, int] = {}
    parts: dict[str, dict[Any, Any]] = {}
    for plan in plans:
        for item in plan.items:
            data = item.tensor_data
            assert data is not None and data.chunk is not None, "every entry is a tensor"
            key = item.index.fqn
            sizes[key] = math.prod(data.size)
            shape = parts.setdefault(key, {}).setdefault(data.chunk.offsets, data.chunk.sizes)
            if shape != data.chunk.sizes:
                raise CheckpointError(
                    f"{key}: two ranks hold different parts from {tuple(data.chunk.offsets)}: {tuple(shape)} and {tuple(data.chunk.sizes)}"
                )
    for key, held in parts.items():
        count = sum(math.prod(shape) for shape in held.values())
        if count != sizes[key]:
            raise CheckpointError(f"{key}: the ranks hold {count} of {sizes[key]} elements; the state must be whole or wholly absent")
    return set(parts)


def whole_moments(canonical: str, present: Iterable[str] | Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Which moments ``present`` has of a tensor: a key of ``OPTIMIZERS``, or () for none.

    Raises:
        CheckpointError: it has a part of an optimizer's state, or that of two.
    """
    found = {kind for kind in (*MOMENTS, STEP) if optimizer_key(kind, canonical) in present}
    if not found:
        return ()
    kinds = max(OPTIMIZERS, key=lambda kinds: len(found & set(kinds)))
    wanted = (*kinds, STEP)
    if lost := [kind for kind in wanted if kind not in found]:
        raise CheckpointError(f"{where}: optimizer state of {canonical} is partial: {', '.join(lost)} missing; it must be whole or wholly absent")
    if odd := found - set(wanted):
        raise CheckpointError(f"{where}: optimizer state of {canonical} is that of two optimizers: {name_some(found)}; {name_some(odd)} must go")
    return kinds


def _check_steps(all_steps: Iterable[Mapping[str, int]]) -> None:
    known: dict[str, int] = {}
    for steps in all_steps:
        for canonical, step in steps.items():
            if known.setdefault(canonical, step) != step:
                raise CheckpointError(f"optimizer state of {canonical}: one rank has taken {known[canonical]} steps, another {step}")


class _Writer(FileSystemWriter):
    """Writes what was saved, and neither where nor by which call: the same state gives the same bytes."""

    def storage_meta(self) -> StorageMeta:
        """Without the folder's temporary name and the random id of the save, which nothing reads."""
        return StorageMeta()


class SafeReader(FileSystemReader):
    """Reads DCP directories. Their metadata is a pickle, of which only the types that DCP puts there are accepted. Their tensors are zip
    archives, whose checksums torch writes but never reads; here they are compared.

    Args:
        metadata: where it was read already.
    """

    def __init__(self, folder: Path, metadata: Metadata | None = None) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is not None:
            return self._metadata
        path = Path(self.path) / METADATA_FILE
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{path}: holds no checkpoint metadata")
        return metadata

    def _slice_file(self, file: IO[bytes], info: Any) -> IO[bytes]:
        # DCP's own view of a part cannot seek from its end, as zipfile does.
        part = io.BytesIO(super()._slice_file(file, info).read())
        try:
            with zipfile.ZipFile(part) as archive:
                name = archive.testzip()
            damaged = f"{name} does not have its checksum" if name is not None else None
        # Damaged lengths and flags lead zipfile anywhere.
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, RuntimeError, EOFError, struct.error) as error:
            damaged = _one_line(error)
        if damaged is not None:
            raise CheckpointError(
                f"{Path(self.path) / info.relative_path}: damaged between bytes {info.offset} and {info.offset + info.length}: {damaged}; "
                "use another checkpoint"
            )
        part.seek(0)
        return part


class _Refused(pickle.UnpicklingError):
    """A pickle asks for something that could run code."""


class _MetadataUnpickler(pickle.Unpickler):
    """Exact names only: a dotted name would reach what a module imports."""

    NAMES = {
        "torch": {"Size"},
        "torch.serialization": {"_get_layout"},
        "torch.distributed.checkpoint.metadata": {
            "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        },
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    }  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        if name in self.NAMES.get(module, ()) or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):  # how Python 3.11.2 (Debian 12) writes a member of an enum
            return _member
        raise _Refused(f"refers to {module}.{name}")


def _member(owner: Any, name: Any) -> Any:
    """A member of an enum by its name, and nothing else that ``getattr`` gives."""
    if isinstance(owner, type) and issubclass(owner, Enum) and name in owner.__members__:
        return owner[name]
    raise _Refused(f"refers to attribute {name!r} of {owner!r}")


def read_metadata(folder: Path) -> Metadata:
    """The metadata of a DCP directory.

    Raises:
        CheckpointError: missing or damaged, or an entry that is not a tensor.
    """
    path = folder / METADATA_FILE
    if not path.is_file():
        raise CheckpointError(f"{folder}: no training checkpoint there ({METADATA_FILE} is missing); give the folder of a finished one")
    try:
        metadata = SafeReader(folder).read_metadata()
        fault = _fault_of(metadata)
    except CheckpointError:
        raise
    except _Refused as error:
        raise CheckpointError(
            f"{path}: {error}, which no training checkpoint needs; it was not written by Tangram, or has been tampered with: take it from where it "
            "was saved"
        ) from None
    except Exception as error:  # a damaged pickle fails in any way
        raise CheckpointError(f"{path}: damaged: {_one_line(error)}; use another checkpoint") from None
    if fault:
        raise CheckpointError(f"{path}: damaged, or not written by Tangram: {fault}; use another checkpoint")
    return metadata


def _fault_of(metadata: Metadata) -> str | None:
    """What in the metadata contradicts itself: every tensor must be made of parts that lie inside it, fill it, and are stored somewhere."""
    stored = metadata.storage_data
    expected = set()
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            return f"entry {key!r} is not a tensor"
        if not isinstance(getattr(getattr(entry, "properties", None), "dtype", None), torch.dtype):
            return f"entry {key!r} has no element type"
        size, count = tuple(entry.size), 0
        for part in entry.chunks:
            offsets, sizes = tuple(part.offsets), tuple(part.sizes)
            inside = len(offsets) == len(sizes) == len(size)
            if not inside or any(o < 0 or n < 0 or o + n > whole for o, n, whole in zip(offsets, sizes, size, strict=True)):
                return f"{key}: the part at {offsets} of shape {sizes} does not lie inside {size}"
            count += math.prod(sizes)
            expected.add((key, offsets))
        if count != math.prod(size):
            return f"{key}: its parts hold {count} of {math.prod(size)} elements"
    for place in stored.values():
        named = isinstance(place.relative_path, str) and "/" not in place.relative_path
        if not named or min(place.offset, place.length) < 0 or place.transform_descriptors:
            return f"{place} is no place in a file"
    found = {(index.fqn, tuple(index.offset)) for index in stored}
    odd = sorted(str(key) for key, _ in expected ^ found)
    return f"{odd[0]}: its parts and their places in files do not fit" if odd else None


def check_entries(state: Mapping[str, torch.Tensor], metadata: Metadata, where: str) -> None:
    """Compare this rank's entries with the stored ones.

    Raises:
        CheckpointError: an entry is missing or of another shape or dtype.
    """
    stored = metadata.state_dict_metadata
    missing = [key for key in state if key not in stored]
    if missing:
        raise CheckpointError(f"{where}: {len(missing)} entries missing: {name_some(missing)}; the checkpoint is of another model")
    for key, tensor in state.items():
        entry = stored[key]
        assert isinstance(entry, TensorStorageMetadata)
        if tuple(entry.size) != tuple(tensor.shape):
            raise CheckpointError(f"{where}: {key} has shape {tuple(entry.size)}, this model {tuple(tensor.shape)}; use the model it was saved from")
        if entry.properties.dtype != tensor.dtype:
            raise CheckpointError(
                f"{where}: {key} is stored as {entry.properties.dtype}, this run holds {tensor.dtype}; "
                "nothing is cast silently: train with the stored dtype, or export the checkpoint and load that"
            )


def check_model_names(metadata: Metadata, shapes: Mapping[str, Shape], where: str) -> None:
    """Compare the stored names with the model's, both ways.

    Raises:
        CheckpointError: missing or unexpected names, with counts and examples.
    """
    stored: dict[str, set[str]] = {}
    for key in metadata.state_dict_metadata:
        kind, name = split_key(key)
        stored.setdefault(kind, set()).add(name)
    model = stored.get("model", set())
    unknown = {f"{kind} of {name}" for kind, names in stored.items() if kind not in ("model", "rng") for name in names - set(shapes)}
    parts = []
    for what, names in (("missing", set(shapes) - model), ("unexpected", model - set(shapes)), ("without a parameter", unknown)):
        if names:
            parts.append(f"{len(names)} {what}: {name_some(names)}")
    if parts:
        raise CheckpointError(f"{where}: its tensors are not those of this model: {'; '.join(parts)}")


def write(
    folder: Path, tensors: Mapping[str, torch.Tensor], names: Iterable[str], steps: Mapping[str, int], group: dist.ProcessGroup | None = None
) -> None:
    """Write this rank's entries; a collective call over ``group`` (None: the default one).

    Raises:
        CheckpointError: on every rank, if any rank failed.
    """
    state = {**tensors, **step_entries(steps)}
    writer = _Writer(folder, single_file_per_rank=True, thread_count=1, sync_files=True, overwrite=False)
    try:
        dcp.save(state, storage_writer=writer, planner=StrictSavePlanner(names, steps), process_group=group, no_dist=not distributed())
    except CheckpointException as error:
        _raise_plain(error, f"{folder}: not saved")
    except RuntimeError as error:
        raise lost_contact(error) from error


def read(folder: Path, metadata: Metadata, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill this rank's entries in place; a collective call.

    Raises:
        CheckpointError: on every rank, if any rank failed.
    """
    try:
        dcp.load(dict(tensors), storage_reader=SafeReader(folder, metadata), planner=_planner(), no_dist=not distributed())
    except CheckpointException as error:
        _raise_plain(error, f"{folder}: not loaded", "; a file is missing or damaged: use another checkpoint")
    except RuntimeError as error:
        raise lost_contact(error) from error


def read_alone(reader: SafeReader, metadata: Metadata, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill entries in place from a directory whose metadata is at hand, with no other rank taking part.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    planner = _planner()
    planner.set_up_planner(dict(tensors), metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    try:
        reader.read_data(planner.create_local_plan(), planner).wait()
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise CheckpointError(f"{reader.path}: not loaded: {_one_line(error)}; a file is missing or damaged: use another checkpoint") from None


def _planner() -> DefaultLoadPlanner:
    return DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)


def _raise_plain(error: CheckpointException, what: str, mend: str = "") -> NoReturn:
    """DCP's exception is a BaseException that holds one failure per rank; raise the first as ours."""
    rank, (cause, _) = min(error.failures.items())
    if _was_interrupted(cause):
        raise KeyboardInterrupt from None
    if isinstance(cause, CheckpointError):
        raise CheckpointError(f"{what}: {cause}") from None
    raise CheckpointError(f"{what}: rank {rank}: {_one_line(cause)}{mend}") from None


def _was_interrupted(error: BaseException | None) -> bool:
    """Ctrl-C lies behind an error: torch's archive writer, closed half way, raises one of its own over it."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
