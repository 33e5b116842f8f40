"""A micro-batch as a Hugging Face model takes it, and which of its positions are learnt."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tangram.backends.engine import Batch
from tangram.losses.modes import loss_weights

MEDIA = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
IGNORE = -100


@dataclass(frozen=True)
class Supervised:
    """The learnt positions of a micro-batch.

    Args:
        rows, columns: [n], where in ``[b, s]`` the logits lie that predict them.
        targets: [n], the tokens.
        weights: [n], fp32, what each cross-entropy is multiplied with; their sum over the global batch makes the loss.
        denominator: what the micro-batch adds to what the sum of all losses is divided by.
    """

    rows: Tensor
    columns: Tensor
    targets: Tensor
    weights: Tensor
    denominator: int

    @classmethod
    def of(cls, batch: Batch, loss_type: str, device: torch.device) -> Supervised:
        """Of a collated micro-batch. Source of the shift: ``ForCausalLMLoss`` of transformers."""
        labels: Tensor = batch["labels"]
        rows, columns = (labels[:, 1:] != IGNORE).nonzero(as_tuple=True)
        ends = batch.get("cu_seqlens_padded")
        samples = rows if ends is None else torch.bucketize(columns, ends[1:].long(), right=True)
        weights, denominator = loss_weights(samples, "per_token_loss" if loss_type == "raw" else loss_type)
        targets = labels[rows, columns + 1]
        moved = [tensor.to(device) for tensor in (rows, columns, targets, weights)]
        return cls(moved[0], moved[1], moved[2], moved[3], 1 if loss_type == "raw" else denominator)

    def scaled(self, factor: float) -> Supervised:
        """With weights multiplied by ``factor``."""
        return Supervised(self.rows, self.columns, self.targets, self.weights * factor, self.denominator)

    def columns_of(self, start: int, size: int, counts: bool) -> Supervised:
        """The part whose logits lie in columns ``start`` to ``start + size``, which become 0 to ``size``.

        Args:
            counts: this part brings the whole denominator; exactly one of the parts must.
        """
        ours = (self.columns >= start) & (self.columns < start + size)
        return Supervised(self.rows[ours], self.columns[ours] - start, self.targets[ours], self.weights[ours], self.denominator if counts else 0)


def forward_arguments(model: nn.Module, batch: Batch, device: torch.device) -> dict[str, Any]:
    """Arguments of the model's forward; labels are not among them.

    Positions are always ours: from 5.3 on, transformers falls back to plain 1-D positions where it gets no ``mm_token_type_ids``.
    """
    known: Mapping[str, object] = inspect.signature(model.forward).parameters
    tensors = {name: batch[name].to(device, non_blocking=True) for name in ("input_ids", "attention_mask", "position_ids", *MEDIA) if name in batch}
    config: Any = model.config
    if "mm_token_type_ids" in known:
        ids = tensors["input_ids"]
        tensors["mm_token_type_ids"] = (ids == config.image_token_id).int() + 2 * (ids == config.video_token_id).int()
    return {**tensors, "use_cache": False}
