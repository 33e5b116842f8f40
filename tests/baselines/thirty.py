"""Thirty steps of AdamW with the loss in chunks and with whole logits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tangram.align.gate.baseline import read_baseline
from tangram.align.gate.replay import prepare
from tangram.align.gate.replay_split import Wishes
from tests.baselines.recipe import BACKENDS, stored
from tests.trial import metrics

FAMILY, COUNT = "qwen2_5_vl", 30
STEPS = [f"training.train_iters={COUNT}", "training.lr_decay_style=constant"]
OF_BACKEND = {
    "megatron": ["training.global_batch_size=2", "training.lr_warmup_iters=0"],
    "fsdp2": ["training.gradient_accumulation_steps=1", "training.lr_warmup_ratio=0"],
}
"""One micro-batch of two samples a step: three times through the data."""
CHUNKS = {"megatron": "features.chunk_size=3", "fsdp2": "features.chunkloss_plan.chunk_size=3"}
"""Learnt positions at a time; micro-batches have more."""
PAGE = Path(__file__).parents[2] / "docs" / "baselines.md"
HEAD = "| backend | loss, absolute | loss, relative | gradient norm, absolute | gradient norm, relative |\n|---|---|---|---|---|\n"


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
        for name, settings in (("whole", []), ("chunks", ["features.enable_chunk_loss=true", CHUNKS[backend]])):
            wishes = Wishes(settings=[*STEPS, *OF_BACKEND[backend], *settings])
            files.append(prepare(baseline, wishes, folder / f"{backend}, {name}", root).run_file)
    return files


def deviations(folder: Path, one: str, other: str) -> dict[str, Deviation]:
    """By loss and grad_norm, of one run ("fsdp2, chunks") from the other ("fsdp2, whole")."""
    chunks, whole = (metrics(folder / name / "metrics.jsonl") for name in (one, other))
    assert len(whole) == len(chunks) == COUNT and whole[-1]["loss"] < whole[0]["loss"] - 1
    found = {}
    for key in ("loss", "grad_norm"):
        gaps = [(abs(a[key] - b[key]), abs(b[key])) for a, b in zip(chunks, whole, strict=True)]
        found[key] = Deviation(max(gap for gap, _ in gaps), max(gap / size for gap, size in gaps))
    return found


def page(text: str, folder: Path) -> str:
    """``text`` with what was measured in ``folder``."""
    before, _, after = text.partition(HEAD)
    rest = after.splitlines(keepends=True)
    while rest and rest[0].startswith("|"):
        del rest[0]
    rows = []
    for backend in BACKENDS:
        found = deviations(folder, f"{backend}, chunks", f"{backend}, whole")
        cells = [f"{value:.2e}" for key in ("loss", "grad_norm") for value in (found[key].absolute, found[key].relative)]
        rows.append(f"| {backend} | {' | '.join(cells)} |\n")
    return before + HEAD + "".join([*rows, *rest])
