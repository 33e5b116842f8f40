"""A micro-batch as a Hugging Face model takes it, and which of its positions are learnt."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tangram.backends.engine import Batch
from tangram.data.encode import IGNORE
from tangram.data.pictures import pictures
from tangram.errors import DataError
from tangram.losses.modes import loss_weights

MEDIA = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
OF_BUILTIN_DATA = {*MEDIA, "input_ids", "attention_mask", "position_ids", "labels", "second_per_grid_ts", "cu_seqlens", "cu_seqlens_padded"}


@dataclass(frozen=True)
class Supervised:
    """The learnt positions of a micro-batch.

    Args:
        rows, columns: [n], where in ``[b, s]`` the logits lie that predict them.
        targets: [n], the tokens.
        weights: [n], fp32, what each cross-entropy is multiplied with; their sum over the global batch makes the loss.
        denominator: what the micro-batch adds to what the sum of all losses is divided by.
        share: what the micro-batch's own loss counts in that of the global batch, with loss type raw.
    """

    rows: Tensor
    columns: Tensor
    targets: Tensor
    weights: Tensor
    denominator: int
    share: float = 1.0

    @classmethod
    def of(cls, batch: Batch, loss_type: str, device: torch.device) -> Supervised:
        """Of a collated micro-batch. Source of the shift: ``ForCausalLMLoss`` of transformers."""
        labels: Tensor = batch["labels"]
        rows, columns = (labels[:, 1:] != IGNORE).nonzero(as_tuple=True)
        ends = batch.get("cu_seqlens_padded")
        samples = rows if ends is None else torch.bucketize(columns, ends[1:].long(), right=True)
        # The model's own loss is a mean over a micro-batch, so micro-batches count as in the type that averages such means.
        weights, denominator = loss_weights(samples, "default" if loss_type == "raw" else loss_type)
        targets = labels[rows, columns + 1]
        moved = [tensor.to(device, non_blocking=True) for tensor in (rows, columns, targets, weights)]
        return cls(moved[0], moved[1], moved[2], moved[3], denominator)

    def scaled(self, factor: float) -> Supervised:
        """With weights multiplied by ``factor``."""
        return replace(self, weights=self.weights * factor, share=self.share * factor)

    def columns_of(self, start: int, size: int, counts: bool) -> Supervised:
        """The part whose logits lie in columns ``start`` to ``start + size``, which become 0 to ``size``.

        Args:
            counts: this part brings the whole denominator; exactly one of the parts must.
        """
        ours = (self.columns >= start) & (self.columns < start + size)
        return replace(
            self,
            rows=self.rows[ours],
            columns=self.columns[ours] - start,
            targets=self.targets[ours],
            weights=self.weights[ours],
            denominator=self.denominator if counts else 0,
        )

    def head_columns(self) -> Tensor:
        """[k], ascending: the columns in which some row is learnt; one where none is, so that the head is part of every graph."""
        return self.columns.unique() if self.columns.numel() else self.columns.new_zeros(1)

    def among(self, columns: Tensor) -> Supervised:
        """The same positions where logits ``[b, k, V]`` are those of ``columns`` alone."""
        return replace(self, columns=torch.searchsorted(columns, self.columns))


def forward_arguments(model: nn.Module, batch: Batch, device: torch.device) -> dict[str, Any]:
    """Arguments of the model's forward; labels are not among them.

    Positions are always ours: from 5.3 on, transformers falls back to plain 1-D positions where it gets no ``mm_token_type_ids``.
    """
    known: Mapping[str, inspect.Parameter] = inspect.signature(model.forward).parameters
    config: Any = getattr(model, "config", None)
    # A forward that only hands on what it gets names nothing; all is for what it hands to.
    hands_on = "input_ids" not in known and _takes_any(known)
    names = [name for name in ("input_ids", *MEDIA, "second_per_grid_ts") if name in batch and (name in known or hands_on)]
    names += _of_plugin(batch, known, type(model).__name__)
    tensors = {name: batch[name].to(device, non_blocking=True) for name in names}
    if "pixel_values" in tensors and "image_grid_thw" in batch and "image_grid_thw" not in names:
        tensors["pixel_values"] = pictures(tensors["pixel_values"], batch["image_grid_thw"], config.vision_config.patch_size)
    if "position_ids" in batch:
        tensors["position_ids"] = _positions(config, batch).to(device, non_blocking=True)
    if "cu_seqlens_padded" not in batch and "attention_mask" in batch:
        tensors["attention_mask"] = batch["attention_mask"].to(device, non_blocking=True)
    media = {number: getattr(config, key) for number, key in ((1, "image_token_id"), (2, "video_token_id")) if getattr(config, key, None) is not None}
    if "mm_token_type_ids" in known and "mm_token_type_ids" not in tensors and media:
        ids = tensors["input_ids"]
        tensors["mm_token_type_ids"] = sum(number * (ids == token).int() for number, token in media.items())
    return {**tensors, **({"use_cache": False} if "use_cache" in known or _takes_any(known) else {})}


def _of_plugin(batch: Batch, known: Mapping[str, inspect.Parameter], model: str) -> list[str]:
    """Names of tensors that the built-in data do not make: those of a plug-in's data, all of which are for the model.

    Raises:
        DataError: its forward does not take one.
    """
    names = [name for name, value in batch.items() if isinstance(value, Tensor) and name not in OF_BUILTIN_DATA]
    foreign = [name for name in names if name not in known and not _takes_any(known)]
    if foreign:
        raise DataError(f"{model}.forward takes no {', '.join(foreign)}, which the micro-batch holds; leave it out of the data")
    return names


def _takes_any(known: Mapping[str, inspect.Parameter]) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())


class PackedSegments:
    """Tells flash attention where packed samples lie, so that it need not find out from positions in every layer.

    It goes in at the text model, past the vision tower, whose attention has segments of its own under the same names.
    """

    def __init__(self, text_model: nn.Module) -> None:
        self._arguments: dict[str, Any] = {}
        text_model.register_forward_pre_hook(self._add, with_kwargs=True)

    def set(self, batch: Batch, device: torch.device) -> None:
        """Before the forward pass of ``batch``, packed or not."""
        ends: Tensor | None = batch.get("cu_seqlens_padded")
        self._arguments = {}
        if ends is not None:
            there, longest = ends.to(device, torch.int32, non_blocking=True), int(ends.diff().max())
            self._arguments = {"cu_seq_lens_q": there, "cu_seq_lens_k": there, "max_length_q": longest, "max_length_k": longest}

    def _add(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, **self._arguments}


def _positions(config: Any, batch: Batch) -> Tensor:
    """Positions ``[3, b, s]``, or ``[b, s]`` for a model without multimodal rotary positions. Packed samples see only themselves if the text's
    own positions, which begin anew with each, come first (``[4, b, s]``) and there is no mask; so transformers has it."""
    positions: Tensor = batch["position_ids"]
    ends = batch.get("cu_seqlens_padded")
    text = None if ends is None else torch.cat([torch.arange(n) for n in ends.diff().tolist()]).unsqueeze(0)
    if not has_mrope(config):
        return positions[0] if positions.dim() == 3 and text is None else positions if text is None else text
    return positions if text is None else torch.cat([text.unsqueeze(0), positions])


def has_mrope(config: Any) -> bool:
    """Whether positions are 3-D, ``[3, b, s]``, by the config of a model; None has none."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    ropes = (getattr(text, key, None) for key in ("rope_parameters", "rope_scaling"))
    return any(isinstance(rope, Mapping) and "mrope_section" in rope for rope in ropes)
