"""Thirty steps of AdamW with the loss in chunks and with whole logits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

from tangram.align.gate.baseline import read_baseline
from tangram.align.gate.replay import Wishes, prepare
from tests.baselines.recipe import BACKENDS, stored
from tests.trial import metrics

FAMILY, COUNT = "qwen2_5_vl", 30
CHUNKS = {
    "megatron": ["features.enable_chunk_loss=true", "features.chunk_size=5"],
    "fsdp2": ["features.enable_chunk_loss=true", "features.chunkloss_plan.chunk_size=5"],
}
"""Micro-batches have more learnt positions than that."""


@dataclass(frozen=True)
class Deviation:
    """The largest at any step."""

    absolute: float
    relative: float


def thirty_steps(root: Path, folder: Path) -> list[Path]:
    """Run files of both backends, each with and without chunks, over the data of the stored baselines."""
    files = []
    for backend in BACKENDS:
        baseline = read_baseline(stored(FAMILY, backend, "hf"))
        for name, settings in (("whole", []), ("chunks", CHUNKS[backend])):
            wishes = Wishes(settings=[f"training.train_iters={COUNT}", "training.lr_decay_style=constant", *settings])
            files.append(prepare(baseline, wishes, folder / f"{backend}, {name}", root).run_file)
    return files


def deviations(folder: Path, backend: str) -> dict[str, Deviation]:
    """By loss and grad_norm, of the run in chunks from that with whole logits."""
    whole, chunks = (metrics(folder / f"{backend}, {name}" / "metrics.jsonl") for name in ("whole", "chunks"))
    assert len(whole) == len(chunks) == COUNT and whole[-1]["loss"] < whole[0]["loss"]
    found = {}
    for key in ("loss", "grad_norm"):
        gaps = [(abs(a[key] - b[key]), abs(b[key])) for a, b in zip(chunks, whole, strict=True)]
        found[key] = Deviation(max(gap for gap, _ in gaps), max(gap / size for gap, size in gaps))
    return found
