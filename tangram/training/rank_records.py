"""What a run is, and what each rank found by itself: the file beside metrics.jsonl from which runs are compared (``tangram gate``)."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 1
"""Of the whole file; said in its first line."""
DENSE_STEPS, THEN_EVERY = 100, 100
"""A thousand ranks over many steps would fill disks, so after the first steps only each so-manieth is written."""
MIB = 2**20
WORD = 2**64
ABSENT = (0, 0)


def is_kept(step: int) -> bool:
    """Whether a step is one of those that are written."""
    return step <= DENSE_STEPS or step % THEN_EVERY == 0


@dataclass(frozen=True)
class CopiesRecord:
    """Of one kind of parameters, rank by rank."""

    held_with: Sequence[int]
    """The lowest of the ranks that hold the same ones."""
    digest: Sequence[str | None]
    """Of their bits, as the step used them; alike on all ranks with the same number in ``held_with``. None: no other rank holds them."""


@dataclass(frozen=True)
class RankRecord:
    """One step, rank by rank. None: the rank has no such number."""

    step: int
    loss: Sequence[float | None]
    """``ForwardResult.own_loss``: the part that this rank found."""
    grad_norm: Sequence[float | None]
    """Of the gradients that the rank's optimizer holds, before clipping."""
    shared_grad_norm: Sequence[float | None]
    """Of those among them that all ranks with the same number in ``shared_with`` have copies of."""
    shared_with: Sequence[int]
    peak_memory_mb: Sequence[float]
    """Largest so far; as ``Platform.peak_memory``, in 2^20 bytes."""
    grad_norm_with: Sequence[int | None] = ()
    """The lowest of the ranks that hold the same gradients, which then must have the same ``grad_norm``. None: no other does. Empty: none has."""
    loss_of_all: float | None = None
    """That of metrics.jsonl, by which the two files are known to be of one run. None: not told."""
    copies: Mapping[str, CopiesRecord] = field(default_factory=dict)
    """By kind of parameters. Empty: not told."""


def ranks_path(metrics: Path) -> Path:
    """The file that belongs to a metrics file."""
    return metrics.with_suffix(".ranks.jsonl")


class RanksFile:
    """A line that says what the run is, again wherever it was resumed, and one line per step.

    Lines of steps that a resumed run is going to repeat are cut off.

    Args:
        facts: what decides the numbers: split, seed, data and others, as plain data.
        config: the run file that gives this run again.
    """

    def __init__(self, path: Path, facts: dict[str, Any], config: str, resumed_step: int = 0) -> None:
        self.path = path
        lines = path.read_text(encoding="utf-8").splitlines() if resumed_step and path.is_file() else []
        kept = [line for line in lines if _first_step_of(line) <= resumed_step]
        head = {"schema": SCHEMA, "after_step": resumed_step, "facts": facts, "config": config}
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text("".join(f"{line}\n" for line in [*kept, json.dumps(head)]), encoding="utf-8")
        temporary.replace(path)

    def write(self, record: RankRecord) -> None:
        """Add one step, in one write, if it is one of those that are written."""
        if not is_kept(record.step):
            return
        row = {name: _plain(value) for name, value in asdict(record).items() if value not in ((), {}, None)}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _plain(value: Any) -> Any:
    """JSON has neither NaN nor infinity."""
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _first_step_of(line: str) -> float:
    """The first step that a line says something of."""
    try:
        row = json.loads(line)
        return int(row["step"]) if "step" in row else int(row["after_step"]) + 1
    except (ValueError, KeyError, TypeError):
        return math.inf


def to_words(value: float | None) -> tuple[int, int]:
    """A number as two int64, to travel with whole numbers; exact, and NaN is a number."""
    return ABSENT if value is None else (1, struct.unpack("<q", struct.pack("<d", value))[0])


def from_words(present: int, bits: int) -> float | None:
    """The number of ``to_words``."""
    return struct.unpack("<d", struct.pack("<q", bits))[0] if present else None


def digest(samples: Iterable[int]) -> int:
    """An int64 of a set of sample ids, in whatever order: the sum of each one's hash, so that ranks' digests add up to that of all."""
    return signed(sum(_mixed(int(sample)) for sample in samples))


def signed(value: int) -> int:
    """``value`` modulo 2^64 as an int64."""
    value %= WORD
    return value - WORD if value >= WORD // 2 else value


def _mixed(number: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014), which scatters neighbours."""
    number = (number + 0x9E3779B97F4A7C15) % WORD
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB % WORD
    return number ^ (number >> 31)
