"""What the training loop knows of a backend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Batch = Mapping[str, Any]
"""One micro-batch as the collator makes it; see ``tangram.data.collate``."""


@dataclass(frozen=True)
class ForwardResult:
    """Loss of a global batch, the same number on every rank."""

    loss: float
    """By the run's loss type; the mean over what that type averages."""
    tokens: int
    """Positions with a label, over all data-parallel ranks."""


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did, the same on every rank."""

    grad_norm: float
    skipped: bool
    """True where a loss or gradient was not finite: weights, moments and schedule stay as they were."""


@dataclass(frozen=True)
class CanonicalTensor:
    """A local tensor under its canonical name: ``local`` equals the rectangle of the canonical tensor that starts at ``start``."""

    name: str
    start: tuple[int, ...]
    full_shape: tuple[int, ...]
    local: torch.Tensor


class Engine(Protocol):
    """An assembled model, its optimizer and the way to run them."""

    data_parallel_rank: int
    data_parallel_size: int

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied with before the backward pass; 1 but for fp16."""

    def forward_backward(self, micro_batches: Sequence[Batch]) -> ForwardResult:
        """Run this rank's micro-batches of one global batch; gradients are final and unclipped afterwards."""

    def evaluate(self, micro_batches: Sequence[Batch]) -> ForwardResult:
        """Loss without gradients."""

    def step(self, lr: float) -> StepResult:
        """Clip, update with learning rate ``lr``, clear gradients."""

    def canonical_parameters(self) -> Iterator[CanonicalTensor]:
        """This rank's parameters."""

    def canonical_gradients(self) -> Iterator[CanonicalTensor]:
        """This rank's gradients, between ``forward_backward`` and ``step``: those of the loss that ``forward_backward`` returned."""
