"""Positions of LLaVA: one axis, images counted token by token as text is, in the form that the other families' 3-D positions have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tangram.config.model import ModelConfig
from tangram.errors import DataError
from tangram.families.qwen2_vl.positions import PAD_POSITION

if TYPE_CHECKING:
    import torch


def rope_index(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    image_grid_thw: torch.Tensor | None,
    model: ModelConfig,
    video_grid_thw: torch.Tensor | None = None,
    second_per_grid_ts: Sequence[float] | torch.Tensor | None = None,
) -> torch.Tensor:
    """Number of each real token in its row, from 0.

    Args:
        input_ids: ``[b, s]``.
        attention_mask: ``[b, s]``, 1 at real tokens, padding on either side; None: all are real.
        image_grid_thw: ``[images, 3]`` patches per axis; the image tokens must be as many. None: not compared.
        model: the id of image tokens.
        video_grid_thw, second_per_grid_ts: taken so that the families are called alike; LLaVA has no videos.

    Returns:
        ``[3, b, s]`` int64, the three axes alike; 1 at padding.

    Raises:
        DataError: image tokens do not fit the grids, or there are videos.
    """
    import torch

    if video_grid_thw is not None and len(video_grid_thw):
        raise DataError(f"the micro-batch holds {len(video_grid_thw)} videos but LLaVA takes images alone")
    real = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    if image_grid_thw is not None:
        assert model.image_encoder is not None
        found = int(((input_ids == model.img_context_token_id) & real).sum())
        needed = sum(model.image_encoder.vision_encoder.tokens((t, h, w)) for t, h, w in image_grid_thw.tolist())
        if found != needed:
            raise DataError(f"the micro-batch holds {found} image tokens but its {len(image_grid_thw)} image grids need {needed}")
    positions = (real.long().cumsum(dim=-1) - 1).masked_fill(~real, PAD_POSITION)
    return positions.expand(3, *positions.shape)
