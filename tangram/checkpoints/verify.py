"""Whether two checkpoints, of any two formats and splits, hold the same model."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from threading import Lock
from typing import Any

from tangram.checkpoints.compare import SLAB, TensorComparison, compare_tensors, exact_type
from tangram.checkpoints.conversion import check_family
from tangram.checkpoints.copier import show
from tangram.checkpoints.dcp_manifest import find_checkpoint, read_manifest
from tangram.checkpoints.hf_directory import TIED_HEAD
from tangram.checkpoints.kinds import ADAPTER_MANIFEST, kind_of_weights
from tangram.checkpoints.look_options import VerifyOptions
from tangram.checkpoints.manifest import MANIFEST
from tangram.checkpoints.open import OpenCheckpoint, open_checkpoint
from tangram.checkpoints.options import ParallelOptions
from tangram.checkpoints.reader import count_elements
from tangram.errors import name_some

TRAINING_SLAB = 32 * SLAB
"""A part of a training checkpoint's file is read whole for each slab of it, so slabs are larger there."""
SHOWN = 8
"""Tensors with elements that are not finite that the text names."""


@dataclass(frozen=True)
class Verdict:
    """What a comparison found; ``first`` and ``second`` are the checkpoints' paths."""

    first: str
    second: str
    tensors: int
    """Compared, by name."""
    elements: int
    missing: tuple[list[str], list[str]]
    """Names that the first, and that the second, does not have."""
    shapes: list[str]
    """``name: shape and shape``."""
    dtypes: list[str]
    differing: list[TensorComparison]
    not_finite: list[TensorComparison]
    """Tensors with NaN or infinite elements; no difference by themselves."""
    notes: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        return not (self.missing[0] or self.missing[1] or self.shapes or self.dtypes or self.differing)

    @property
    def exit_code(self) -> int:
        """0 equal, 1 different."""
        return 0 if self.equal else 1

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON; numbers that are not finite become strings."""
        return _plain({"equal": self.equal, **asdict(self)})

    def __str__(self) -> str:
        head = f"{'equal' if self.equal else 'DIFFERENT'}: {self.tensors} tensors, {self.elements} elements compared"
        lines = [head, f"  first:  {self.first}", f"  second: {self.second}"]
        for side, names in zip(("first", "second"), self.missing, strict=True):
            if names:
                lines.append(f"  {len(names)} missing in the {side}: {name_some(names)}")
        for what, texts in (("shape", self.shapes), ("element type", self.dtypes)):
            if texts:
                lines.append(f"  {len(texts)} of another {what}: {texts[0]}{f' and {len(texts) - 1} more' if len(texts) > 1 else ''}")
        if self.differing:
            lines += self._differences()
        for tensor in self.not_finite[:SHOWN]:
            one, other = (f"{counts.nan} NaN, {counts.inf} infinite" for counts in tensor.not_finite)
            lines.append(f"  not finite: {tensor.name}: {one} in the first and {other} in the second")
        if len(self.not_finite) > SHOWN:
            lines.append(f"  not finite: {len(self.not_finite) - SHOWN} more tensors")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    def _differences(self) -> list[str]:
        tensor = self.differing[0]
        assert tensor.where is not None
        elements = sum(other.differing for other in self.differing)
        largest, relative = max(self.differing, key=lambda t: t.largest), max(self.differing, key=lambda t: t.relative)
        return [
            f"  first difference: {tensor.name} at {list(tensor.where.index)}: {tensor.where.first!r} and {tensor.where.second!r}",
            f"  {elements} of {self.elements} elements differ, in {len(self.differing)} of {self.tensors} tensors: "
            f"{name_some([other.name for other in self.differing])}",
            f"  largest difference {largest.largest:.6g} ({largest.name}), largest relative {relative.relative:.6g} ({relative.name})",
        ]


def verify(
    first: OpenCheckpoint,
    second: OpenCheckpoint,
    *,
    workers: int = 2,
    tolerance: float | None = None,
    ignore_dtype: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Verdict:
    """Compare names, shapes, element types and bits, tensor by tensor, in memory of about ``workers`` slabs.

    A head in the files of one side equals its absence on the other where the other's config ties it to an equal embedding.

    Args:
        workers: tensors compared at the same time.
        tolerance: as ``compare_tensors``.
        ignore_dtype: compare values of different types after an exact conversion.
        progress: called with bytes compared so far and in all, those of the first; from any thread.

    Raises:
        CheckpointError: a checkpoint turns out to be damaged when read.
    """
    infos = first.reader.names(), second.reader.names()
    pairs, notes = _pairs(first, second)
    missing = sorted(set(infos[1]) - {b for _, _, b in pairs}), sorted(set(infos[0]) - {a for _, a, _ in pairs})
    shapes, dtypes, compared = [], [], []
    for name, a, b in pairs:
        one, other = infos[0][a], infos[1][b]
        if one.shape != other.shape:
            shapes.append(f"{name}: {list(one.shape)} and {list(other.shape)}")
        elif one.dtype != other.dtype and (not ignore_dtype or exact_type(one.dtype, other.dtype) is None):
            dtypes.append(f"{name}: {show(one.dtype)} and {show(other.dtype)}")
        else:
            compared.append((name, a, b))
    total = sum(count_elements(infos[0][a].shape) for _, a, _ in compared)
    size = sum(infos[0][a].nbytes for _, a, _ in compared)
    limit = TRAINING_SLAB if "training checkpoint" in (first.kind, second.kind) else SLAB
    done, lock = 0, Lock()

    def run(pair: tuple[str, str, str]) -> TensorComparison:
        nonlocal done
        name, a, b = pair
        found = compare_tensors(name, infos[0][a].shape, (first.reader, a), (second.reader, b), tolerance=tolerance, limit=limit)
        with lock:
            done += infos[0][a].nbytes
            if progress is not None:
                progress(done, size)
        return found

    pool = ThreadPoolExecutor(workers)
    try:
        results = list(pool.map(run, compared))
    finally:
        pool.shutdown(cancel_futures=True)
    return Verdict(
        first=str(first.path),
        second=str(second.path),
        tensors=len(compared),
        elements=total,
        missing=missing,
        shapes=shapes,
        dtypes=dtypes,
        differing=[found for found in results if found.differing],
        not_finite=[found for found in results if any(found.not_finite)],
        notes=notes,
    )


def _pairs(first: OpenCheckpoint, second: OpenCheckpoint) -> tuple[list[tuple[str, str, str]], list[str]]:
    """Tensors to compare, as a name for messages and the names on both sides; and what to say of tied heads."""
    names = first.reader.names(), second.reader.names()
    pairs = [(name, name, name) for name in names[0] if name in names[1]]
    notes = []
    if first.family.name != second.family.name:
        notes.append(f"the first is a {first.family.name}, the second a {second.family.name}")
    for holder, lacking in ((first, second), (second, first)):
        if TIED_HEAD not in holder.reader.names() or TIED_HEAD in lacking.reader.names() or not lacking.tied:
            continue
        embedding = lacking.embedding
        if embedding in lacking.reader.names():
            pairs.append((TIED_HEAD, TIED_HEAD, embedding) if holder is first else (TIED_HEAD, embedding, TIED_HEAD))
            notes.append(f"{TIED_HEAD} is in {holder.path} only; {lacking.path} ties the head to {embedding}, with which it was compared")
    return pairs, notes


def _plain(value: Any) -> Any:
    """``value`` with numbers that JSON cannot hold as strings."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return repr(value) if isinstance(value, float) and not isfinite(value) else value


def run_verify(options: VerifyOptions, families: tuple[str, ...] = (), progress: Callable[[int, int], None] | None = None) -> Verdict:
    """``verify`` as the command line asks for it.

    A checkpoint without a config of its own takes that of ``hf_config``, else the other's.

    Args:
        families: that the converter is for; empty: any.

    Raises:
        TangramError: as ``open_checkpoint`` and ``verify``, or a checkpoint of another family.
    """
    source_split, target_split = options.source_parallel_config, options.target_parallel_config
    source = (options.source_dir, source_split if source_split.given else None)
    target = (options.target_dir, target_split if target_split.given else None)
    first, second = open_two(source, target, options.hf_config.hf_dir)
    for side in (first, second):
        check_family(side.family, families, str(side.path))
    return verify(first, second, workers=options.workers, tolerance=options.tolerance, ignore_dtype=options.ignore_dtype, progress=progress)


Side = tuple[str, ParallelOptions | None]


def open_two(first: Side, second: Side, hf_dir: str | None) -> tuple[OpenCheckpoint, OpenCheckpoint]:
    """Open two checkpoints, each given by its path and split; one without a config takes the other's."""
    if hf_dir is not None or _has_config(first[0]):
        one = open_checkpoint(first[0], split=first[1], hf_dir=hf_dir)
        return one, open_checkpoint(second[0], split=second[1], config=one.config)
    other = open_checkpoint(second[0], split=second[1])
    return open_checkpoint(first[0], split=first[1], config=other.config), other


def _has_config(path: str) -> bool:
    kind = kind_of_weights(path)
    if kind == "mp_rank directory":
        return Path(path, MANIFEST).is_file()
    if kind == "LoRA adapter":
        return Path(path, ADAPTER_MANIFEST).is_file()
    return kind != "training checkpoint" or bool(read_manifest(find_checkpoint(path)).hf_config)


def verdict_text(verdict: Verdict, as_json: bool) -> str:
    """The text, or JSON."""
    return json.dumps(verdict.as_dict(), indent=1) if as_json else str(verdict)
