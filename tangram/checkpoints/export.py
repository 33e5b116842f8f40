"""Canonical tensors as a Hugging Face directory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tangram.checkpoints.copier import show
from tangram.checkpoints.engine import PlannedFile, PlannedTensor, peak_memory, write_files
from tangram.checkpoints.hf_directory import INDEX, SINGLE
from tangram.checkpoints.links import require_inside
from tangram.checkpoints.publish import new_directory
from tangram.checkpoints.reader import CanonicalReader, TensorInfo, identity_of
from tangram.checkpoints.resume import Journal, resumable_directory
from tangram.checkpoints.safetensors_io import SafetensorsFile, lay_out
from tangram.checkpoints.writing import WritePlan, WriteSettings
from tangram.families.base import Family
from tangram.placement.blocks import check_names
from tangram.placement.table import Shape

LARGEST_SHARD = 5_000_000_000
"""Bytes of tensors in one file where no source says how to cut."""
_WEIGHT_FILES = {".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf"}


def export_hf(
    source: CanonicalReader,
    out_dir: Path,
    family: Family,
    *,
    files_from: Path | None = None,
    hf_config: Mapping[str, Any],
    shards: Mapping[str, Sequence[str]] | None = None,
    max_shard_bytes: int = LARGEST_SHARD,
    dtype: torch.dtype | None = None,
    settings: WriteSettings = WriteSettings(),  # noqa: B008  frozen
) -> int:
    """Write a directory that transformers loads; keys are those of the hub's files.

    A run that was killed leaves ``<out_dir>.partial``, from which a rerun with the same arguments takes the finished files.

    Args:
        files_from: directory whose tokenizer, processor and other small files are copied; None: config.json alone is written.
        hf_config: content of config.json; its element type is corrected where the tensors' differs.
        shards: keys per file, as ``HFDirectory.shards`` gives them in either key layout; None: files of at most ``max_shard_bytes``.
        dtype: cast floating-point tensors to it; None: every tensor keeps its own.

    Returns:
        Bytes of tensors written.

    Raises:
        CheckpointError: ``out_dir`` has content, the disk is too small, or anything that ``source`` raises. Nothing is published then.
        PlacementError: ``shards`` and ``source`` hold different tensors.
    """
    files = _plan(source, family, shards, max_shard_bytes, dtype)
    with resumable_directory(out_dir) as journal:
        return _write(journal.folder, source, files, files_from, hf_config, dtype, settings, journal)


def replace_hf(
    source: CanonicalReader, out_dir: Path, family: Family, *, files_from: Path | None, hf_config: Mapping[str, Any], settings: WriteSettings
) -> int:
    """As ``export_hf``, but what stands at ``out_dir`` is replaced once the new directory is complete, and a killed run leaves nothing to keep.

    Raises:
        CheckpointError: the disk is too small, or anything that ``source`` raises. What stood there then still does.
    """
    files = _plan(source, family, None, LARGEST_SHARD, None)
    with new_directory(out_dir, replace=True) as folder:
        return _write(folder, source, files, files_from, hf_config, None, settings, None)


def _write(
    folder: Path,
    source: CanonicalReader,
    files: Sequence[PlannedFile],
    files_from: Path | None,
    hf_config: Mapping[str, Any],
    dtype: torch.dtype | None,
    settings: WriteSettings,
    journal: Journal | None,
) -> int:
    infos = {name: _cast_info(info, dtype) for name, info in source.names().items()}
    if files_from is not None:
        copy_small_files(files_from, folder)
    _write_config(folder, files_from, hf_config, infos)
    write_files(folder, files, identity_of(source), settings, journal)
    return _write_index(folder, [file.path for file in files])


def plan_hf(
    source: CanonicalReader,
    family: Family,
    *,
    shards: Mapping[str, Sequence[str]] | None = None,
    max_shard_bytes: int = LARGEST_SHARD,
    dtype: torch.dtype | None = None,
    settings: WriteSettings = WriteSettings(),  # noqa: B008  frozen
) -> WritePlan:
    """The weight files that ``export_hf`` would write, and their index.

    Raises:
        PlacementError: ``shards`` and ``source`` hold different tensors.
    """
    files = _plan(source, family, shards, max_shard_bytes, dtype)
    sizes = [(file.path, file.size) for file in files]
    if len(files) > 1 or files[0].path != SINGLE:
        weight_map = {tensor.name: file.path for file in files for tensor in file.tensors}
        total = sum(tensor.info.nbytes for file in files for tensor in file.tensors)
        sizes.append((INDEX, len(_index_text(weight_map, total).encode())))
    return WritePlan(tuple(sizes), peak_memory(settings))


def _plan(
    source: CanonicalReader, family: Family, shards: Mapping[str, Sequence[str]] | None, largest: int, dtype: torch.dtype | None
) -> list[PlannedFile]:
    infos = {name: _cast_info(info, dtype) for name, info in source.names().items()}
    canonical = {family.hub_name(name): name for name in infos}
    keys = _cut(infos, family, shards, largest)
    check_names([key for part in keys.values() for key in part], list(canonical), "shards to write")
    return [plan_file(file, {key: (canonical[key], infos[canonical[key]]) for key in part}, source) for file, part in keys.items()]


def plan_file(path: str, tensors: Mapping[str, tuple[str, TensorInfo]], source: CanonicalReader) -> PlannedFile:
    """One weight file. ``tensors``: key -> canonical name, shape and element type in the file."""
    lead, begins = lay_out({key: info for key, (_, info) in tensors.items()}, {"format": "pt"})
    planned = tuple(
        PlannedTensor(key, begin, tensors[key][1], partial(_fetch, source, tensors[key][0]), recipe=tensors[key][0]) for key, begin in begins.items()
    )
    return PlannedFile(path, len(lead) + sum(tensor.info.nbytes for tensor in planned), planned, lambda _: [(0, lead)])


def _fetch(source: CanonicalReader, name: str, start: Shape, shape: Shape, buffer: torch.Tensor) -> torch.Tensor:
    values = source.read(name, start, shape)
    return values if values.dtype == buffer.dtype and values.is_contiguous() else buffer.copy_(values)


def _cast_info(info: TensorInfo, dtype: torch.dtype | None) -> TensorInfo:
    return TensorInfo(info.shape, dtype) if dtype is not None and info.dtype.is_floating_point else info


def _cut(infos: Mapping[str, TensorInfo], family: Family, shards: Mapping[str, Sequence[str]] | None, largest: int) -> dict[str, list[str]]:
    """Hub keys per file."""
    if shards is not None:
        return {file: [family.hub_name(family.canonical_name(key)) for key in keys] for file, keys in shards.items()}
    groups: list[list[str]] = []
    filled = largest + 1
    for name, info in infos.items():
        if filled + info.nbytes > largest:
            groups.append([])
            filled = 0
        groups[-1].append(family.hub_name(name))
        filled += info.nbytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": keys for i, keys in enumerate(groups, 1)}


def copy_small_files(source: Path, target: Path) -> None:
    """Copy tokenizer, processor, chat template and code files with their permissions; weights, indexes, config.json and hidden files stay behind.

    Raises:
        CheckpointError: one is a link out of ``source``.
    """
    for file in sorted(source.iterdir()):
        weights = file.suffix in _WEIGHT_FILES or file.name.endswith(".index.json") or file.name == "config.json"
        if file.is_file() and not weights and not file.name.startswith("."):
            require_inside(source, file)
            shutil.copy(file, target / file.name)


def _write_config(target: Path, files_from: Path | None, config: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> None:
    """Copy config.json as it is where it is right already, else write it with the tensors' element type."""
    corrected = _with_dtype(config, infos)
    original = files_from / "config.json" if files_from is not None else None
    if original is not None and corrected == config and original.is_file():
        shutil.copy(original, target / "config.json")
    else:
        (target / "config.json").write_text(json.dumps(corrected, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _with_dtype(config: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """``config`` whose ``dtype`` keys name the tensors' type. Tensors of several types leave it as it is: no one name would be right."""
    corrected = dict(config)
    dtypes = {info.dtype for info in infos.values() if info.dtype.is_floating_point}
    if len(dtypes) != 1:
        return corrected
    name = show(dtypes.pop())
    sections = {key: dict(value) for key, value in config.items() if key.endswith("_config") and isinstance(value, Mapping)}
    for section in (corrected, *sections.values()):
        for key in ("dtype", "torch_dtype"):
            if key in section and section[key] is not None:
                section[key] = name
    corrected.update(sections)
    if not corrected.get("dtype") and not corrected.get("torch_dtype"):
        corrected["torch_dtype"] = name
    return corrected


def _write_index(folder: Path, files: Sequence[str]) -> int:
    """Write the index of several files from their own headers; returns the bytes of all tensors."""
    weight_map: dict[str, str] = {}
    total = 0
    for name in files:
        written = SafetensorsFile(folder / name)
        weight_map.update(dict.fromkeys(written.infos, name))
        total += sum(info.nbytes for info in written.infos.values())
    if list(files) != [SINGLE]:
        (folder / INDEX).write_text(_index_text(weight_map, total), encoding="utf-8")
    return total


def _index_text(weight_map: Mapping[str, str], total: int) -> str:
    return json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}, indent=2) + "\n"
