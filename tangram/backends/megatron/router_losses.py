"""Losses of experts' routers, weighed over micro-batches as the loss itself is; the routers are ``tangram.models.experts.Router``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tangram.backends.engine import Batch
from tangram.config.model import ExpertKeys, TextDecoderConfig
from tangram.errors import ConfigError
from tangram.losses.modes import denominator_of

KEY = "loss_weight"
"""Of a micro-batch, scalar int64: what it adds to the denominator of the run's loss type."""


class RouterLosses:
    """What routers of experts add to the loss in training; nothing where the model has none, or none that add to it.

    Args:
        loss_type: the run's.
    """

    def __init__(self, text: TextDecoderConfig, loss_type: str) -> None:
        self._added = isinstance(text, ExpertKeys) and text.has_router_loss
        self._layers, self._loss_type = text.num_layers, loss_type

    def weigh(self, micro_batches: Sequence[Batch]) -> Sequence[Batch]:
        """The micro-batches, each with its weight, where routers add to the loss."""
        if not self._added:
            return micro_batches
        weights = [denominator_of(batch["labels"], batch.get("cu_seqlens_padded"), self._loss_type) for batch in micro_batches]
        return [{**batch, KEY: torch.tensor(weight)} for batch, weight in zip(micro_batches, weights, strict=True)]

    def take(self, micro_batches: Sequence[Batch]) -> float:
        """What this rank's routers made of load-balancing losses in these micro-batches, times their weights."""
        if not _weighed(micro_batches):
            return 0.0
        from tangram.models.experts import take_load_balancing

        return take_load_balancing()

    def mean(self, micro_batches: Sequence[Batch], balancing: float, weight: float, denominator: float) -> float | None:
        """Mean load-balancing loss over layers and micro-batches; None where there is none.

        Args:
            balancing, weight, denominator: of all ranks, what they took, the micro-batches' weights, and what the loss was divided by.

        Raises:
            ConfigError: a loss function of the user's has other denominators than the run's loss type.
        """
        if _weighed(micro_batches) and weight != denominator:
            raise ConfigError(
                f"loss_func averages over {denominator:g}, loss_type {self._loss_type} over {weight:g}, by which routers' losses are "
                "averaged; give loss_func the denominators of loss_type, or set moe_aux_loss_coeff and moe_z_loss_coeff to 0"
            )
        return balancing / denominator / self._layers if balancing and denominator else None


def weight_of(micro_batches: Sequence[Batch]) -> float:
    """Sum of the weights; 0 where they have none."""
    return sum(float(batch.get(KEY, 0)) for batch in micro_batches)


def _weighed(micro_batches: Sequence[Batch]) -> bool:
    return any(KEY in batch for batch in micro_batches)
