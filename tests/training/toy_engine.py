"""A whole engine for one process: linear regression in torch, trained by SGD."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from tangram.backends.engine import Batch, CanonicalTensor, Copies, ForwardResult, StepResult


class LinearEngine:
    """``y = w x`` with squared error; the loss is the mean over samples."""

    data_parallel_rank = 0
    data_parallel_size = 1
    loss_scale = 1.0

    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.rates: list[float] = []
        self.seen: list[int] = []
        self._loss = 0.0

    def _errors(self, micro_batches: Sequence[Batch]) -> torch.Tensor:
        x = torch.cat([batch["x"] for batch in micro_batches])
        y = torch.cat([batch["y"] for batch in micro_batches])
        return (self.weight * x - y) ** 2

    def forward_backward(self, micro_batches: Sequence[Batch]) -> ForwardResult:
        self.seen += [sample for batch in micro_batches for sample in batch["sample_ids"]]
        errors = self._errors(micro_batches)
        errors.mean().backward()
        self._loss = float(errors.mean().detach())
        return ForwardResult(self._loss, len(errors), len(errors))

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[Batch]) -> ForwardResult:
        errors = self._errors(micro_batches)
        return ForwardResult(float(errors.mean()), len(errors), len(errors))

    def copies(self) -> Mapping[str, Copies]:
        return {}

    @torch.no_grad()
    def step(self, lr: float) -> StepResult:
        assert self.weight.grad is not None
        self.rates.append(lr)
        norm = abs(float(self.weight.grad))
        skipped = not (math.isfinite(norm) and math.isfinite(self._loss))
        if not skipped:
            self.weight -= lr * self.weight.grad
        self.weight.grad = None
        return StepResult(norm, skipped)

    def canonical_parameters(self) -> Iterator[CanonicalTensor]:
        yield CanonicalTensor("weight", (), (), self.weight.detach())

    def canonical_gradients(self) -> Iterator[CanonicalTensor]:
        assert self.weight.grad is not None
        yield CanonicalTensor("weight", (), (), self.weight.grad)


def batch(xs: Sequence[float], ys: Sequence[float], first: int = 0, padding: int = 0) -> dict[str, Any]:
    """A micro-batch with one token per sample, and ``padding`` places besides."""
    mask = torch.tensor([[1] + [0] * padding] * len(xs))
    return {"x": torch.tensor(xs), "y": torch.tensor(ys), "attention_mask": mask, "sample_ids": list(range(first, first + len(xs)))}


def endless(consumed: int = 0, bad_step: int | None = None) -> Iterator[list[Batch]]:
    """Steps of two micro-batches of one sample, from place ``consumed`` on; the target is 2 x, or not a number in ``bad_step``."""
    place = consumed
    while True:
        values = [1.0 + (place + i) % 3 for i in range(2)]
        scale = math.nan if place // 2 + 1 == bad_step else 2.0
        yield [batch([x], [scale * x], place + i, padding=1) for i, x in enumerate(values)]
        place += 2
