"""3-D rotary positions (mRoPE) of Qwen2.5-VL: Qwen2-VL's, with the time axis of videos in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tangram.config.model import ModelConfig
from tangram.errors import DataError
from tangram.families.qwen2_vl.positions import mrope_positions

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
    """As Qwen2-VL's ``rope_index``; frame group i of a video stands at ``floor(i * second_per_grid_ts * tokens_per_second)``.

    Args:
        second_per_grid_ts: seconds per frame group of each video; None: one second.

    Source: ``Qwen2_5_VLModel.get_rope_index`` of transformers 5.x.
    """
    videos = 0 if video_grid_thw is None else len(video_grid_thw)
    seconds = [1.0] * videos if second_per_grid_ts is None else [float(s) for s in second_per_grid_ts]
    if len(seconds) != videos:
        raise DataError(f"second_per_grid_ts holds {len(seconds)} numbers for {videos} videos")
    encoder = model.image_encoder.vision_encoder if model.image_encoder else None
    rate = (encoder.tokens_per_second if encoder else None) or 1
    return mrope_positions(input_ids, attention_mask, image_grid_thw, model, video_grid_thw, [s * rate for s in seconds])
