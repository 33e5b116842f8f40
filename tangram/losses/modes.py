"""Loss types: which tokens and samples are averaged.

Every type is a sum divided by a count. A micro-batch gives both, and both are added over micro-batches and data-parallel ranks before
they are divided, so the loss does not depend on how a global batch is cut.

| type | numerator of a micro-batch | denominator |
|---|---|---|
| ``per_token_loss`` | sum over its supervised tokens | their number |
| ``per_sample_loss`` | sum over its samples of the sample's mean | samples with a supervised token |
| ``default`` | mean over its supervised tokens | 1, or 0 if it has none |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from tangram.errors import ConfigError

LossType = Literal["default", "per_sample_loss", "per_token_loss"]


@dataclass(frozen=True)
class LossTerms:
    """Loss of one micro-batch: ``numerator / denominator``; both 0 where nothing is supervised."""

    numerator: Tensor
    """Scalar, fp32, with gradient."""
    denominator: Tensor
    """Scalar, int64."""


def reduce_token_losses(token_losses: Tensor, samples: Tensor, loss_type: str) -> LossTerms:
    """Reduce the losses of one micro-batch's supervised tokens.

    Args:
        token_losses: [n], cross-entropy of each supervised token.
        samples: [n], number of the sample that each belongs to, whatever row it lies in.

    Raises:
        ConfigError: unknown ``loss_type``.
    """
    count = torch.tensor(token_losses.numel(), device=token_losses.device)
    total = token_losses.float().sum()
    if loss_type == "per_token_loss":
        return LossTerms(total, count)
    if loss_type == "default":
        return LossTerms(total / count.clamp(min=1), count.clamp(max=1))
    if loss_type == "per_sample_loss":
        numbers, sample, tokens = samples.unique(return_inverse=True, return_counts=True)
        return LossTerms((token_losses.float() / tokens[sample]).sum(), torch.tensor(numbers.numel(), device=token_losses.device))
    raise ConfigError(f"loss_type {loss_type!r} is unknown; known: {', '.join(get_args(LossType))}")
