"""The forward step that megatron-core's schedules call, as a user's entry supplies it or by default."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from tangram.backends.engine import Batch
from tangram.errors import ConfigError
from tangram.losses.modes import reduce_token_losses

LossReport = tuple[Tensor, Tensor | int, Mapping[str, tuple[Any, Any]]]
"""Numerator (with its graph), denominator (whole number), and ``{"loss": (numerator, denominator)}`` for the log."""
LossFunction = Callable[[Any], LossReport]
ForwardStep = Callable[[Iterator[Batch], torch.nn.Module], tuple[Any, LossFunction]]
"""``forward_step(iterator, model) -> (output, loss_func)``; ``loss_func`` is called on the last stage only."""

MODEL_INPUTS = (
    "input_ids",
    "position_ids",
    "attention_mask",
    "labels",
    "pixel_values",
    "image_grid_thw",
    "pixel_values_videos",
    "video_grid_thw",
    "cu_seqlens",
    "cu_seqlens_padded",
    "loss_weight",
)


def get_batch(iterator: Iterator[Batch], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """The next micro-batch's tensors on ``device``, floating ones as ``dtype``, ready for ``model(**batch)``."""
    batch = next(iterator)
    tensors = {key: batch[key].to(device, non_blocking=True) for key in MODEL_INPUTS if batch.get(key) is not None}
    return {key: tensor.to(dtype) if tensor.is_floating_point() else tensor for key, tensor in tensors.items()}


def report_loss(numerator: Tensor, denominator: Tensor | int) -> LossReport:
    """What ``loss_func`` returns."""
    return numerator, denominator, {"loss": (numerator.detach(), denominator)}


def check_report(report: Any) -> LossReport:
    """Refuse a loss function that does not keep the contract.

    Raises:
        ConfigError: it returned something else.
    """
    if not isinstance(report, tuple) or len(report) != 3 or "loss" not in report[2]:
        raise ConfigError(
            "loss_func must return (numerator, denominator, {'loss': (numerator, denominator)}), got "
            f"{type(report).__name__}{f' of {len(report)}' if isinstance(report, tuple) else ''}"
        )
    return report


def default_forward_step(loss_type: str, device: torch.device, dtype: torch.dtype) -> ForwardStep:
    """The batch goes to the model, and the loss is of ``loss_type``."""

    def loss_func(output: Any) -> LossReport:
        losses = output["loss_dict"]
        terms = reduce_token_losses(losses["token_losses"], losses["samples"], loss_type)
        return report_loss(terms.numerator, terms.denominator)

    def forward_step(iterator: Iterator[Batch], model: torch.nn.Module) -> tuple[Any, LossFunction]:
        return model(**get_batch(iterator, device, dtype)), loss_func

    return forward_step
