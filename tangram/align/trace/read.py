"""A trace as its ranks wrote it, read one record at a time."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from tangram.align.assemble import difference
from tangram.align.trace.rows import NOTHING
from tangram.align.trace.seen import Chosen
from tangram.align.trace.store import FORMAT, Facts, Stored, What, facts_file, index_file, part_file
from tangram.errors import CheckpointError, suggest

KEPT_TABLES = 32
"""Row tables that are kept for the next records."""

Event = tuple[str, What]
"""Name of a module or a parameter, and what of it."""


@dataclass(frozen=True)
class Record:
    """A whole activation ``[rows, features]``, or a whole parameter.

    Args:
        keys: [rows, 3], in ascending order; None: of a parameter.
        partial: there may be fewer rows than the other side has.
        disagreement: largest relative difference between two ranks' values of the same elements.
        missing: elements that no rank gave; their values are zeros.
    """

    values: Tensor
    keys: Tensor | None
    partial: bool
    disagreement: float
    missing: int


class Trace:
    """A folder that ``TraceWriter`` wrote, on every rank.

    Raises:
        CheckpointError: it is none, or a rank's files are missing or of another version.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.facts = [_read_facts(folder, 0)]
        self.facts += [_read_facts(folder, rank) for rank in range(1, self.facts[0].ranks)]
        self._lines: dict[Event, list[tuple[int, dict[str, Any]]]] = defaultdict(list)
        for rank, facts in enumerate(self.facts):
            for content in _read_index(index_file(folder, rank), facts.records):
                self._lines[content["name"], content["what"]].append((rank, content))
        self._open: dict[Path, Any] = {}
        self._known: dict[tuple[tuple[int, int, str], ...], tuple[Tensor, list[tuple[Tensor, Tensor]]]] = {}
        self._media = {(data, number): torch.tensor(keys, dtype=torch.int64) for facts in self.facts for data, number, keys in facts.media}

    @property
    def run(self) -> str:
        return self.facts[0].run

    @property
    def dtype(self) -> str:
        return self.facts[0].dtype

    @cached_property
    def chosen(self) -> Chosen:
        """Which modules were to be recorded."""
        return Chosen(self.facts[0].only)

    @cached_property
    def skipped(self) -> Mapping[str, str]:
        """Modules of which nothing, or not all, is recorded, and why."""
        return {name: why for facts in self.facts for name, why in facts.skipped.items()}

    @cached_property
    def frozen(self) -> set[str]:
        return {name for facts in self.facts for name in facts.frozen}

    @cached_property
    def order(self) -> dict[Event, tuple[int, int]]:
        """Of every activation: of micro-batches that differ in what they pass, the one that passes most counts."""
        return {
            event: max((line["order"][0], line["order"][1]) for _, line in lines) for event, lines in self._lines.items() if "order" in lines[0][1]
        }

    @property
    def parameters(self) -> list[Event]:
        """Weights, and gradients of them."""
        return sorted(event for event, lines in self._lines.items() if "order" not in lines[0][1])

    def __contains__(self, event: object) -> bool:
        return event in self._lines

    def read(self, event: Event) -> Record:
        """Put a record together.

        Raises:
            CheckpointError: a file of the trace cannot be read.
        """
        lines = self._lines[event]
        return self._activation(event, lines) if "order" in lines[0][1] else self._parameter(lines)

    def _tensor(self, rank: int, stored: Stored) -> Tensor:
        path = part_file(self.folder, rank, stored.part)
        try:
            if path not in self._open:
                self._open[path] = safe_open(path, framework="pt")
            found: Tensor = self._open[path].get_tensor(stored.key)
        except Exception as error:  # safetensors has several kinds
            raise CheckpointError(f"{path}: cannot be read: {' '.join(str(error).split())}; write the trace again") from error
        return found

    def _keys(self, rank: int, place: list[Any]) -> Tensor:
        """[n, 3]; rows of a vision encoder get the keys of their pictures."""
        keys = self._tensor(rank, Stored(*place))
        if keys.shape[1] == 3:
            return keys
        found = torch.full((len(keys), 3), NOTHING, dtype=torch.int64)
        for data, number in keys[:, :2].unique(dim=0).tolist():
            mine = (keys[:, :2] == torch.tensor([data, number])).all(dim=1)
            found[mine] = torch.cat([self._media[data, number][keys[mine, 2]], keys[mine, 3:]], dim=1)
        return found

    def _rows(self, tables: tuple[tuple[int, int, str], ...]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Keys of all rows of some tables, in ascending order; and of each table which rows are of the batch, and where among the keys those stand.

        Many records have the same tables. Pictures of a micro-batch that fills a schedule up are of no sample.
        """
        if tables not in self._known:
            parts = [self._keys(rank, [part, key]) for rank, part, key in tables]
            real = [(part[:, 0] != NOTHING).nonzero()[:, 0] for part in parts]
            keys, places = torch.unique(torch.cat([part[rows] for part, rows in zip(parts, real, strict=True)]), dim=0, return_inverse=True)
            self._known[tables] = keys, list(zip(real, places.split([len(rows) for rows in real]), strict=True))
            if len(self._known) > KEPT_TABLES:
                del self._known[next(iter(self._known))]
        return self._known[tables]

    def _activation(self, event: Event, lines: list[tuple[int, dict[str, Any]]]) -> Record:
        keys, tables = self._rows(tuple((rank, *line["rows"]) for rank, line in lines))
        whole = _Whole((len(keys), lines[0][1]["width"]))
        for (rank, line), (real, places) in zip(lines, tables, strict=True):
            values = self._tensor(rank, Stored(line["part"], line["key"]))
            values = (values if len(real) == len(values) else values[real]).float()
            if event[1].startswith("grad_"):
                values = values * self.facts[rank].gradient_scale
            whole.put_rows(places, line["columns"], values)
        return Record(whole.values, keys, any(line["partial"] for _, line in lines), whole.disagreement, int((~whole.filled).sum()))

    def _parameter(self, lines: list[tuple[int, dict[str, Any]]]) -> Record:
        whole = _Whole(tuple(lines[0][1]["shape"]))
        for rank, line in lines:
            values = self._tensor(rank, Stored(line["part"], line["key"])).float()
            whole.put(tuple(slice(start, start + size) for start, size in zip(line["start"], values.shape, strict=True)), values)
        return Record(whole.values, None, False, whole.disagreement, int((~whole.filled).sum()))


class _Whole:
    """A tensor that is put together; two values of the same element are held against each other."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.values, self.filled, self.disagreement = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool), 0.0

    def put(self, where: tuple[slice, ...], values: Tensor) -> None:
        """Write a rectangle."""
        self._check(self.filled[where], self.values[where], values)
        self.values[where], self.filled[where] = values, True

    def put_rows(self, rows: Tensor, columns: list[list[int]], values: Tensor) -> None:
        """Write ``[n, features]`` into ``rows`` [n] and runs of columns."""
        parts = values.split([count for _, count in columns], dim=1)
        for (first, count), part in zip(columns, parts, strict=True):
            mine, filled = self.values.narrow(1, first, count), self.filled.narrow(1, first, count)
            self._check(filled.index_select(0, rows), mine, part, rows)
            mine.index_copy_(0, rows, part)
            filled.index_fill_(0, rows, True)

    def _check(self, seen: Tensor, before: Tensor, values: Tensor, rows: Tensor | None = None) -> None:
        """Note how far values that come a second time are from those that came first."""
        if seen.any():
            before = before if rows is None else before.index_select(0, rows)
            self.disagreement = max(self.disagreement, difference(values[seen], before[seen]))


def _read_index(path: Path, records: int) -> list[dict[str, Any]]:
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        reason = "" if len(lines) == records else f"it has {len(lines)} records of {records}"
        if not all({"name", "what", "part", "key"} <= line.keys() for line in lines):
            reason = "a line is no record"
    except (OSError, ValueError, AttributeError) as error:
        reason = str(error)
    if reason:
        raise CheckpointError(f"{path}: cannot be read: {reason}; write the trace again")
    return lines


def _read_facts(folder: Path, rank: int) -> Facts:
    path = facts_file(folder, rank)
    if not path.is_file():
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: no such directory; a trace is written by 'tangram align --trace-to DIR'")
        inside = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and facts_file(entry, 0).is_file())
        hint = f"; give {folder / inside[0]}" if inside else suggest(folder.name, inside)
        raise CheckpointError(f"{folder}: no whole trace: {path.name} is missing, which rank {rank} writes when it has ended{hint}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version = content.pop("format", None)
        facts = Facts(**content) if version == FORMAT else None
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}; write the trace again") from None
    if facts is None:
        raise CheckpointError(f"{path}: a trace of format {version!r}, and this version reads {FORMAT}; write it again")
    return facts
