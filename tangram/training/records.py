"""What one step leaves behind: a record, a line of the log, a line of metrics.jsonl."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tangram.errors import ConfigError


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
    """From asking for the data to the end of the update, milliseconds."""
    loss_scale: float
    skipped: bool
    load_balancing: float | None = None
    """Mean over micro-batches and layers of the loss that balances experts, without its weight: 1 where all get the same. None: there is none."""
    skipped_samples: int = 0
    """Places of the global batch that stayed empty since their sample cannot be used."""
    valid_loss: float | None = None
    """Of the validation that followed the step."""
    model_tflop: float | None = None
    """Model FLOPs of the step, in 10^12, on each device; see ``tangram.families.flops``. None: not counted."""
    peak_tflops: float | None = None
    """What a device could do, TFLOP/s; None: not known."""
    samples_digest: str | None = None
    """Of the ids of the global batch's samples, however ranks and micro-batches share them. None: the data have no ids."""

    @property
    def is_nan(self) -> bool:
        return not (math.isfinite(self.loss) and math.isfinite(self.grad_norm))

    @property
    def tokens_per_s(self) -> float:
        return 1000 * self.tokens / self.step_ms if self.step_ms else 0.0

    @property
    def tflops(self) -> float | None:
        """TFLOP/s on each device."""
        return None if self.model_tflop is None or not self.step_ms else 1000 * self.model_tflop / self.step_ms

    @property
    def mfu(self) -> float | None:
        """Part of the peak, 1 being all of it."""
        return None if self.tflops is None or self.peak_tflops is None else self.tflops / self.peak_tflops


def row_of(record: StepRecord) -> dict[str, Any]:
    """One flat row of metrics.jsonl, of plain numbers. What is not known is not there."""
    given = asdict(record)
    del given["model_tflop"], given["peak_tflops"]
    row = {**given, "tokens_per_s": record.tokens_per_s, "nan": record.is_nan, "tflops_per_device": record.tflops, "mfu": record.mfu}
    return {name: value for name, value in row.items() if value is not None}


def log_line(records: Sequence[StepRecord], train_iters: int, *, show_tokens_per_sample: bool = False) -> str:
    """The line for the last of ``records``: loss and time are means over all of them, skipped and nan iterations are counted among them.

    The form is Megatron's, and the counts start anew with each line as there. Unlike there, a loss that is not finite is averaged and
    printed like any other, and skipped samples are counted where there are any.
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
    empty = sum(record.skipped_samples for record in records)
    fields += [
        f"loss: {sum(record.loss for record in records) / count:.6E}",
        f"loss scale: {last.loss_scale:.1f}",
        f"grad norm: {last.grad_norm:.3f}",
        f"number of skipped iterations: {sum(record.skipped for record in records):3d}",
        f"number of nan iterations: {sum(record.is_nan for record in records):3d}",
        f"tokens/s: {1000 * sum(record.tokens for record in records) / elapsed if elapsed else 0:.1f}",
        *([f"load balancing: {last.load_balancing:.4f}"] if last.load_balancing is not None else []),
        *_speed(records, elapsed),
        *([f"number of skipped samples: {empty:3d}"] if empty else []),
    ]
    return " " + " | ".join(fields) + " |"


def _speed(records: Sequence[StepRecord], elapsed: float) -> list[str]:
    """Model FLOPs per second and device, and what part of the peak that is, as far as they are known."""
    counted = [record.model_tflop for record in records if record.model_tflop is not None]
    if len(counted) < len(records) or not elapsed:
        return []
    speed, peak = 1000 * sum(counted) / elapsed, records[-1].peak_tflops
    return [f"TFLOP/s per device: {speed:.1f}", *([f"MFU: {speed / peak:.1%}"] if peak else [])]


class MetricsFile:
    """metrics.jsonl: one flat JSON object per step.

    JSON has no NaN or infinity, so they are written as the strings "nan", "inf" and "-inf". Records of steps that a resumed run is going to
    repeat are cut off.

    Raises:
        ConfigError: ``path`` is a folder or a device, which the new file would replace.
    """

    def __init__(self, path: Path, resumed_step: int = 0) -> None:
        self.path = path
        if path.exists() and not path.is_file():
            raise ConfigError(f"metrics_file {path}: {'a folder' if path.is_dir() else 'no regular file'}; give the path of a file")
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in path.read_text().splitlines() if _step_of(line) <= resumed_step] if resumed_step and path.exists() else []
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text("".join(f"{line}\n" for line in kept))
        temporary.replace(path)

    def write(self, record: StepRecord) -> None:
        """Add one object, in one write, so that readers who follow the file see whole lines. ``valid_loss`` is there after a validation only."""
        plain = {key: str(value) if isinstance(value, float) and not math.isfinite(value) else value for key, value in row_of(record).items()}
        with self.path.open("a") as file:
            file.write(json.dumps(plain) + "\n")


def _step_of(line: str) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf
