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


def loss_weights(samples: Tensor, loss_type: str) -> tuple[Tensor, int]:
    """What each cross-entropy of a micro-batch counts, and what the micro-batch adds to the denominator.

    Args:
        samples: [n], number of the sample that each supervised token belongs to, whatever row it lies in.

    Returns:
        Weights [n], fp32, and the denominator; the numerator is the weighted sum.

    Raises:
        ConfigError: unknown ``loss_type``.
    """
    count = samples.numel()
    if loss_type == "per_token_loss":
        return torch.ones(count, device=samples.device), count
    if loss_type == "default":
        return torch.full((count,), 1 / max(count, 1), device=samples.device), min(count, 1)
    if loss_type == "per_sample_loss":
        numbers, sample, tokens = samples.unique(return_inverse=True, return_counts=True)
        return 1 / tokens[sample].float(), numbers.numel()
    raise ConfigError(f"loss_type {loss_type!r} is unknown; known: {', '.join(get_args(LossType))}")


def denominator_of(labels: Tensor, cu_seqlens_padded: Tensor | None, loss_type: str) -> int:
    """What a micro-batch adds to the denominator.

    Args:
        labels: [b, s], not shifted, -100 where not supervised.
        cu_seqlens_padded: [k + 1], where the samples of a packed row begin and the row ends; None: each row is one sample.
    """
    rows, positions = (labels[:, 1:] != -100).nonzero(as_tuple=True)
    return loss_weights(samples_of(rows, positions, cu_seqlens_padded), loss_type)[1]


def samples_of(rows: Tensor, positions: Tensor, cu_seqlens_padded: Tensor | None) -> Tensor:
    """Number of the sample that each supervised token belongs to, from its row and its position there, both [n]."""
    return rows if cu_seqlens_padded is None else torch.bucketize(positions, cu_seqlens_padded[1:].long(), right=True)


def reduce_token_losses(token_losses: Tensor, samples: Tensor, loss_type: str) -> LossTerms:
    """Reduce the losses of one micro-batch's supervised tokens.

    Args:
        token_losses: [n], cross-entropy of each supervised token.
        samples: as ``loss_weights``.

    Raises:
        ConfigError: unknown ``loss_type``.
    """
    weights, denominator = loss_weights(samples, loss_type)
    return LossTerms((token_losses.float() * weights).sum(), torch.tensor(denominator, device=token_losses.device))
