"""What one step leaves behind: a record, a line of the log, a line of metrics.jsonl."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step, the same on every rank but for ``step_ms``."""

    step: int
    """Counted from 1."""
    consumed_samples: int
    loss: float
    supervised_tokens: int
    """Positions with a label, over the global batch."""
    tokens: int
    """Tokens that are not padding, over the global batch."""
    padded_tokens: int
    samples: int
    grad_norm: float
    lr: float
    step_ms: float
    loss_scale: float
    skipped: bool

    @property
    def is_nan(self) -> bool:
        """Whether loss or gradient was not finite. Overflow under a loss scale is how the scale is found, and no such fault."""
        return not math.isfinite(self.loss) or (self.loss_scale == 1.0 and not math.isfinite(self.grad_norm))

    @property
    def tokens_per_s(self) -> float:
        return 1000 * self.tokens / self.step_ms if self.step_ms else 0.0


@dataclass
class Counters:
    """Steps that changed no weight, and steps whose loss or gradient was not finite, since the run began."""

    skipped: int = 0
    nan: int = 0

    def count(self, record: StepRecord) -> None:
        self.skipped += record.skipped
        self.nan += record.is_nan


def log_line(records: Sequence[StepRecord], train_iters: int, counters: Counters, *, show_tokens_per_sample: bool = False) -> str:
    """The line for the last of ``records``, its loss and time averaged over all of them.

    The form is Megatron's; a value that is not finite is printed like any other.
    """
    last, count = records[-1], len(records)
    elapsed = sum(record.step_ms for record in records)
    fields = [
        f"[{datetime.now():%Y-%m-%d %H:%M:%S}] iteration {last.step:8d}/{train_iters:8d}",
        f"consumed samples: {last.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {elapsed / count:.1f}",
        f"learning rate: {last.lr:.6E}",
        f"global batch size: {last.samples:5d}",
    ]
    if show_tokens_per_sample:
        fields.append(f"tokens per sample: {sum(r.padded_tokens for r in records) / sum(r.samples for r in records):.6E}")
    fields += [
        f"loss: {sum(record.loss for record in records) / count:.6E}",
        f"loss scale: {last.loss_scale:.1f}",
        f"grad norm: {last.grad_norm:.3f}",
        f"number of skipped iterations: {counters.skipped:3d}",
        f"number of nan iterations: {counters.nan:3d}",
        f"tokens/s: {1000 * sum(record.tokens for record in records) / elapsed if elapsed else 0:.1f}",
    ]
    return " " + " | ".join(fields) + " |"


class MetricsFile:
    """metrics.jsonl: one flat JSON object per step.

    JSON has no NaN or infinity, so they are written as the strings "nan", "inf" and "-inf". Records of steps that a resumed run is going to
    repeat are cut off.
    """

    def __init__(self, path: Path, resumed_step: int = 0) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in path.read_text().splitlines() if _step_of(line) <= resumed_step] if resumed_step and path.exists() else []
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text("".join(f"{line}\n" for line in kept))
        temporary.replace(path)

    def write(self, record: StepRecord) -> None:
        row: dict[str, Any] = {**asdict(record), "tokens_per_s": record.tokens_per_s, "nan": record.is_nan}
        self.append(row)

    def append(self, row: dict[str, Any]) -> None:
        """Add one object; readers that follow the file see whole lines."""
        plain = {key: str(value) if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}
        with self.path.open("a") as file:
            file.write(json.dumps(plain) + "\n")


def _step_of(line: str) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf
