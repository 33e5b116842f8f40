"""Runs made of numbers, written by the writers that training uses, for a gate to read."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tangram.training.rank_records import WORD, RankRecord, RanksFile, digest, ranks_path
from tangram.training.records import MetricsFile, StepRecord, log_line

FACTS: dict[str, Any] = {
    "backend": "megatron",
    "split": {"tensor": 2, "pipeline": 2, "virtual": 1, "data_parallel": 1, "vit_pp_layers": [[2, 0]], "llm_pp_layers": [[1, 1]]},
    "world_size": 4,
    "seed": 42,
    "data": "sha256:aaaa with global_batch_size 8, shuffle True, tail drop",
    "tokenizer": "sha256:bbbb",
    "family": "qwen2_5_vl",
    "global_batch_size": 8,
    "dtype": "bf16",
    "loss_type": "per_token_loss",
    "schedule": {"lr": 1e-5, "lr_decay_style": "cosine"},
    "callbacks": [],
    "platform": "cuda",
    "device": "a card",
    "packages": {"torch": "2.13.0"},
}
STEPS, RANKS, BATCH = 8, 4, 8


@dataclass
class Numbers:
    """A run of TP2 x PP2; what a test plants, it changes here."""

    records: list[StepRecord]
    ranks: list[RankRecord]
    facts: dict[str, Any] = field(default_factory=lambda: json.loads(json.dumps(FACTS)))

    def each_step(self, change: Callable[[StepRecord], Mapping[str, Any]]) -> Numbers:
        return replace(self, records=[replace(record, **change(record)) for record in self.records])

    def at_step(self, step: int, **values: Any) -> Numbers:
        return self.each_step(lambda record: values if record.step == step else {})

    def each_rank(self, name: str, change: Callable[[int, int, Any], Any]) -> Numbers:
        """``change(step, rank, value)``."""
        rows = [replace(row, **{name: [change(row.step, rank, v) for rank, v in enumerate(getattr(row, name))]}) for row in self.ranks]
        return replace(self, ranks=rows)

    def write(self, folder: Path) -> Path:
        """metrics.jsonl and the file beside it."""
        metrics = MetricsFile(folder / "metrics.jsonl")
        ranks = RanksFile(ranks_path(metrics.path), self.facts, "backend: megatron\n")
        for record in self.records:
            metrics.write(record)
        for row in self.ranks:
            ranks.write(row)
        return metrics.path

    def log(self, path: Path, memory: str = "", prefix: str = "") -> Path:
        """The same as a log."""
        path.write_text("\n".join([memory, *(prefix + log_line([record], STEPS) for record in self.records)]) + "\n")
        return path


def sample_ids(step: int, first: int = 0) -> range:
    """Of a step's global batch, in a data order that starts at ``first``."""
    return range(first + (step - 1) * BATCH, first + step * BATCH)


def digest_of(ids: Sequence[int]) -> str:
    return f"{digest(ids) % WORD:016x}"


def numbers(noise: int | None = None) -> Numbers:
    """Twelve going down to about 9; with ``noise``, a seed, the run repeated on the same machine: times within 4 %, and a slow step now and then,
    memory within 1 %, and sums that round in another order."""
    dice = random.Random(noise)
    wobble = (lambda width: 1 + dice.uniform(-width, width)) if noise is not None else (lambda width: 1.0)
    records, ranks = [], []
    for step in range(1, STEPS + 1):
        loss, norm = 12.11 * math.exp(-0.04 * step), 40 / math.sqrt(step)
        slow = 2.5 if noise is not None and dice.random() < 0.1 else 1.0
        records.append(
            StepRecord(
                step=step,
                consumed_samples=BATCH * step,
                loss=loss * wobble(1e-4),
                supervised_tokens=640,
                tokens=6000,
                padded_tokens=6400,
                samples=BATCH,
                grad_norm=norm * wobble(1e-2),
                lr=1e-5,
                step_ms=(7611.4 if step == 1 else 870.0) * wobble(0.04) * slow,
                loss_scale=1.0,
                skipped=False,
                samples_digest=digest_of(sample_ids(step)),
            )
        )
        found = loss * wobble(1e-4)
        shares = [norm / 2 * (0.9 + 0.05 * rank) * wobble(1e-2) for rank in range(RANKS)]
        shared = [norm / 20 * wobble(1e-2), norm / 30 * wobble(1e-2)]
        ranks.append(
            RankRecord(
                step=step,
                loss=[None, None, found, found],
                grad_norm=shares,
                shared_grad_norm=[shared[rank // 2] for rank in range(RANKS)],
                shared_with=[0, 0, 2, 2],
                peak_memory_mb=[base * wobble(0.01) for base in (21206.09, 21206.09, 25974.75, 25974.75)],
            )
        )
    return Numbers(records, ranks)
