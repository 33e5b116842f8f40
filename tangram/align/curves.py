"""Training curves of one model at several splits, on either backend."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tangram.align.batch import write_batch
from tangram.align.launch import finish, running
from tangram.align.reference import load_reference, loss_curve
from tangram.align.run import TORCH_DTYPES, check_run_files, check_split, make_task, open_subject, prepare_batch, workplace
from tangram.align.sharded import Sharded
from tangram.align.task import RESULT_FILE, Curve, Dtype, Split

CURVE_TOLERANCE = 1e-6
"""Largest accepted ``|a - b| / |b|`` at any step, fp32."""
REFERENCE = "Hugging Face"
ADAM = {"betas": (0.9, 0.999), "eps": 1e-8}
"""The run's defaults."""


@dataclass(frozen=True)
class Curves:
    """Losses per step of every run; ``against`` is the run that the others are compared with."""

    losses: Mapping[str, Sequence[float]]
    against: str

    @property
    def deviations(self) -> dict[str, float]:
        """Largest relative deviation at any step, per run."""
        base = self.losses[self.against]
        return {name: max(relative(a, b) for a, b in zip(curve, base, strict=True)) for name, curve in self.losses.items() if name != self.against}

    @property
    def worst(self) -> float:
        return max(self.deviations.values(), default=0.0)

    def as_dict(self) -> dict[str, Any]:
        return {"against": self.against, "deviations": self.deviations, "losses": {name: list(curve) for name, curve in self.losses.items()}}


def relative(a: float, b: float) -> float:
    """``|a - b| / |b|``; infinite where either is not finite."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / abs(b) if b else abs(a)


def compare_curves(
    hf_dir: Path,
    splits: Sequence[Split | Sharded],
    steps: int,
    *,
    lr: float = 1e-4,
    seed: int | None = None,
    batch_file: Path | None = None,
    micro_batch_size: int = 1,
    dtype: Dtype = "fp32",
    reference: bool = True,
    plugins: Sequence[str] = (),
) -> Curves:
    """Train on one batch for some steps at every split.

    Args:
        seed: start from random weights of this seed instead of those of ``hf_dir``.
        reference: compare with a plain AdamW loop over Hugging Face's model; else, and with a seed, with the first split.

    Raises:
        TangramError: as ``align``.
    """
    with workplace() as work:
        subject = open_subject(hf_dir, work, plugins, {split.backend for split in splits})
        for split in splits:
            check_split(subject, split)
        batch, _ = prepare_batch(subject, batch_file)
        file = write_batch(batch, work)
        how = {"dtype": dtype, "micro_batch_size": micro_batch_size, "seed": seed, "curve": Curve(steps=steps, lr=lr)}
        tasks = [make_task(subject, split, file, work / f"split_{number}", **how) for number, split in enumerate(splits)]  # type: ignore[arg-type]
        check_run_files(tasks)
        losses: dict[str, Sequence[float]] = {}
        with running(tasks, work) as process:
            if reference and seed is None:
                model = load_reference(subject.directory, TORCH_DTYPES[dtype])
                losses[REFERENCE] = loss_curve(model, [batch] * steps, lr, clip=Curve(steps=steps, lr=lr).clip_grad, **ADAM)  # type: ignore[arg-type]
            finish(process, tasks, work)
        for task in tasks:
            losses[task.name] = json.loads((task.folder / RESULT_FILE).read_text(encoding="utf-8"))["losses"]
    return Curves(losses, against=next(iter(losses)))
