"""What ranks do in ``test_training_at_every_split``."""

from __future__ import annotations

from typing import Any

import torch

from tangram.backends.engine import Batch
from tests.backends.cases_sequence import opened, tasks_of

EPS = 1e-3
"""Of Adam, as large as clipped gradients are: else it would make up for gradients that are all too large."""
SILENT: tuple[tuple[int, ...], ...] = ((), (0, 1), (2, 3))
"""Rows without a label, of one step after the other."""


def train(file: str) -> dict[str, dict[str, Any]]:
    """Of each task: losses, gradient norms, and after the third and the last step this rank's parameters by canonical name and place."""
    found = {}
    for task in tasks_of(file):
        assert task.curve is not None
        with opened(task, adam_eps=EPS) as (engine, mine):
            if not engine.needs_pixels:
                mine = [{key: value for key, value in batch.items() if key != "pixel_values"} for batch in mine]
            losses, norms, parameters = [], [], {}
            for step in range(task.curve.steps):
                result = engine.forward_backward([silenced(batch, SILENT[step % len(SILENT)]) for batch in mine])
                losses.append(result.loss)
                norms.append(engine.step(task.curve.lr).grad_norm)
                if step + 1 in (3, task.curve.steps):
                    parameters[step + 1] = {(p.name, p.start): (p.full_shape, p.local.numpy().copy()) for p in engine.canonical_parameters()}
            found[task.name] = {"losses": losses, "norms": norms, "parameters": parameters}
    return found


def silenced(batch: Batch, rows: tuple[int, ...]) -> Batch:
    """The micro-batch without the labels of some of the batch's rows."""
    quiet = torch.tensor([number in rows for number in batch["sample_ids"]])
    return {**batch, "labels": batch["labels"].masked_fill(quiet[:, None], -100)}
