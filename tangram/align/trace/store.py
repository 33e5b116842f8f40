"""The files of a trace: written record by record while a model runs, read one record at a time.

Each rank writes into the trace's folder, so that no collective is needed and memory holds no more than ``PART_BYTES``:

- ``trace_RRRRR.NNNN.safetensors``: the tensors, in parts.
- ``trace_RRRRR.jsonl``: an index, one line per record.
- ``trace_RRRRR.json``: what the rank was; written last, so that a trace which lacks one was cut off.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import save_file
from torch import Tensor

from tangram.align.trace.rows import RowTable, by_rows

FORMAT = 1
PART_BYTES = 64 * 2**20
"""Of tensors that wait for being written."""

What = Literal["input", "output", "grad_input", "grad_output", "weight", "gradient"]
"""Of a module what goes in and comes out, and the gradients of both; of a parameter its value and its gradient."""

Columns = tuple[tuple[int, int], ...]
"""Consecutive features: first (of the whole module's) and number, in the order in which a tensor holds them."""


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies: number of the part, and key in it."""

    part: int
    key: str


@dataclass
class Facts:
    """What a rank was.

    Args:
        run: of which kind and split, in words.
        dtype: ``fp32``, ``bf16`` or ``fp16``, in which it computed.
        ranks: how many there are.
        gradient_scale: what gradients of activations are multiplied with to be those of the loss.
        media: of each (data-parallel rank, micro-batch) the keys of its pictures and videos; see ``tangram.align.trace.rows``.
        skipped: modules of which nothing, or not all, is recorded, and why.
        frozen: parameters without a gradient.
        only: patterns of the modules that were recorded; none: all.
        records: lines of the index.
    """

    run: str
    dtype: str
    ranks: int = 1
    gradient_scale: float = 1.0
    media: list[tuple[int, int, list[list[int]]]] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    frozen: list[str] = field(default_factory=list)
    only: list[str] = field(default_factory=list)
    records: int = 0


def index_file(folder: Path, rank: int) -> Path:
    return folder / f"trace_{rank:05d}.jsonl"


def facts_file(folder: Path, rank: int) -> Path:
    return folder / f"trace_{rank:05d}.json"


def part_file(folder: Path, rank: int, part: int) -> Path:
    return folder / f"trace_{rank:05d}.{part:04d}.safetensors"


class TraceWriter:
    """One rank's records.

    Args:
        folder: made where it does not exist; files of an earlier trace of the same rank are replaced.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob(f"trace_{rank:05d}.*"):
            old.unlink()
        self._records = 0
        self._index = index_file(folder, rank).open("w", encoding="utf-8")
        self._waiting: dict[str, Tensor] = {}
        self._bytes = self._part = self._count = 0
        self._tables: dict[int, tuple[RowTable, Stored]] = {}

    def keep(self, tensor: Tensor) -> Stored:
        """Write a copy of ``tensor``."""
        copy = tensor.detach().to("cpu", copy=True).contiguous()
        stored = Stored(self._part, str(self._count))
        self._waiting[stored.key] = copy
        self._count, self._bytes = self._count + 1, self._bytes + copy.numel() * copy.element_size()
        if self._bytes >= PART_BYTES:
            self._flush()
        return stored

    def rows(self, table: RowTable) -> Stored:
        """Write the keys of the real rows of a table; once, however often it is asked for."""
        if id(table) not in self._tables:
            # The table is kept too, so that no other one gets its id.
            self._tables[id(table)] = table, self.keep(table.keys[table.real])
        return self._tables[id(table)][1]

    def activation(self, name: str, what: What, stored: Stored, table: RowTable, columns: Columns, width: int, order: tuple[int, int]) -> None:
        """Say what a stored tensor ``[rows, features]`` is.

        Args:
            columns: of the module's ``width`` features those in the tensor.
            order: position of the stage in the pipeline, and number of the event within a pass of a micro-batch.
        """
        place = {"rows": _place(self.rows(table)), "columns": columns, "width": width, "order": order, "partial": table.partial}
        self._line({"name": name, "what": what, **_place_of(stored), **place})

    def rectangle(self, name: str, what: What, tensor: Tensor, start: Sequence[int], shape: Sequence[int]) -> None:
        """Write a rectangle of a parameter, or of its gradient."""
        self._line({"name": name, "what": what, **_place_of(self.keep(tensor)), "start": list(start), "shape": list(shape)})

    def _line(self, content: Mapping[str, Any]) -> None:
        self._index.write(json.dumps(content) + "\n")
        self._records += 1

    def _flush(self) -> None:
        if self._waiting:
            save_file(self._waiting, part_file(self.folder, self.rank, self._part))
            self._part += 1
        self._waiting, self._bytes = {}, 0
        self._index.flush()

    def close(self, facts: Facts) -> None:
        """Write what waits, and that the trace is whole."""
        self._flush()
        self._index.close()
        facts.records = self._records
        facts_file(self.folder, self.rank).write_text(json.dumps({"format": FORMAT, **vars(facts)}), encoding="utf-8")


def _place(stored: Stored) -> list[Any]:
    return [stored.part, stored.key]


def _place_of(stored: Stored) -> dict[str, Any]:
    return {"part": stored.part, "key": stored.key}


def real_rows(tensor: Tensor, table: RowTable) -> Tensor:
    """The rows ``[n, features]`` of a tensor that stand for something; padding does not."""
    flat = by_rows(tensor.detach())
    return flat if bool(table.real.all()) else flat[table.real.to(flat.device)]
