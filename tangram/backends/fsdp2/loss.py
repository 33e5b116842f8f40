"""The loss function that a run puts in place of a Hugging Face model's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tangram.backends.fsdp2.head import HeadLoss
from tangram.backends.fsdp2.inputs import Supervised
from tangram.errors import ConfigError


class SupervisedLoss:
    """Called by the model as ``self.loss_function(logits=..., labels=..., vocab_size=...)``: the weighted sum of cross-entropies at the learnt
    positions alone, fp32; 0, with a graph, where there are none."""

    def __init__(self, supervised: Supervised) -> None:
        self.supervised = supervised
        self.asked = False
        """Called with the logits of the whole micro-batch."""

    def __call__(self, logits: Tensor | HeadLoss, labels: Tensor | None = None, vocab_size: int | None = None, **_: Any) -> Tensor:
        """Args: ``logits`` [b, s, V], or what a ``LossHead`` gives in their place; the others are what transformers passes and are not needed."""
        if isinstance(logits, HeadLoss):
            self.asked = True
            return logits.loss
        if labels is None or logits.shape[:-1] != labels.shape:
            # Some classes flatten or cut what they pass; which positions these are cannot be known.
            return logits.sum() * 0
        self.asked = True
        learnt = self.supervised
        picked = logits[learnt.rows, learnt.columns].float()
        return (torch.nn.functional.cross_entropy(picked, learnt.targets, reduction="none") * learnt.weights).sum()


def logits_of(output: Any, model: nn.Module, labels: Tensor) -> Tensor:
    """Logits ``[b, s, V]`` that a forward pass gave, one for each of ``labels``.

    Raises:
        ConfigError: none, or of other positions.
    """
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or logits.shape[:-1] != labels.shape:
        found = f"logits {list(logits.shape)} for labels {list(labels.shape)}" if isinstance(logits, Tensor) else "no logits"
        raise ConfigError(
            f"{type(model).__name__}: forward neither calls self.loss_function(logits=..., labels=..., vocab_size=...) with logits [batch, tokens, "
            f"vocabulary] nor returns them (it returned {found}); do one of them, or set features.loss_cfg.loss_type to raw, its own loss"
        )
    return logits
