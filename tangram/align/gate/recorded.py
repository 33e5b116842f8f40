"""What a run has left behind, from whatever file it was read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Step(NamedTuple):
    """One step, or one line of a log, which stands for the steps since the line before. None: not known."""

    step: int
    loss: float | None
    grad_norm: float | None
    step_ms: float | None
    skipped: bool = False
    """No weight was changed, for something was not finite."""
    samples: str | None = None
    """Digest of the ids of the samples."""
    loss_unit: float = 0.0
    """Unit of the last digit that was printed; 0: the number is whole."""
    grad_norm_unit: float = 0.0


@dataclass(frozen=True)
class RankStep:
    """What each rank found in one step, by rank; see ``tangram.training.rank_records.RankRecord``."""

    loss: Sequence[float | None]
    grad_norm: Sequence[float | None]
    shared_grad_norm: Sequence[float | None]
    shared_with: Sequence[int]
    grad_norm_with: Sequence[int | None] = ()
    """Empty: no rank holds those of another, or it is not told, as in baselines, which do not need it."""
    copies: Mapping[str, tuple[Sequence[int], Sequence[str | None]]] = field(default_factory=dict)
    """By kind of parameters: which ranks hold the same, and the digests of theirs."""


Memory = Mapping[str, Mapping[int, Mapping[int, float]]]
"""Figure ("max allocated", "peak resident") -> rank -> step -> MB."""


@dataclass(frozen=True)
class Recorded:
    """A run as it was recorded.

    Args:
        where: file that it was read from.
        kind: "metrics" or "log"; a log says nothing of split, seed, data and samples.
        facts: what decides the numbers, once per time that the run was started; none where nothing says it.
        config: the run file that gives the run again.
        notes: what a reader should know of the file.
    """

    where: str
    kind: str
    steps: Sequence[Step]
    facts: Sequence[Mapping[str, Any]] = ()
    config: str | None = None
    ranks: Mapping[int, RankStep] = field(default_factory=dict)
    memory: Memory = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def by_step(self) -> dict[int, Step]:
        return {step.step: step for step in self.steps}


def is_finite(value: float | None) -> bool:
    """Whether there is a value, and it is a number."""
    return value is not None and math.isfinite(value)
