"""The loss function that a run puts in place of a Hugging Face model's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tangram.backends.fsdp2.head import HeadLoss
from tangram.backends.fsdp2.inputs import Supervised


class SupervisedLoss:
    """Called by the model as ``self.loss_function(logits=..., labels=..., vocab_size=...)``: the weighted sum of cross-entropies at the learnt
    positions alone, fp32; 0, with a graph, where there are none."""

    def __init__(self, supervised: Supervised) -> None:
        self.supervised = supervised

    def __call__(self, logits: Tensor | HeadLoss, labels: Tensor | None = None, vocab_size: int | None = None, **_: Any) -> Tensor:
        """Args: ``logits`` [b, s, V], or what a ``LossHead`` gives in their place; the others are what transformers passes and are not needed."""
        if isinstance(logits, HeadLoss):
            return logits.loss
        learnt = self.supervised
        picked = logits[learnt.rows, learnt.columns].float()
        return (torch.nn.functional.cross_entropy(picked, learnt.targets, reduction="none") * learnt.weights).sum()
