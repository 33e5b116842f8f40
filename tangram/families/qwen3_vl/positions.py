"""3-D rotary positions (mRoPE) of Qwen3-VL: Qwen2-VL's, with every frame group of a video on its own.

Qwen3-VL writes a timestamp before each frame group, so a video of t groups is t runs of tokens with text between them, and time is told by
that text. Each run is placed like an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tangram.config.model import ModelConfig
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
    """As Qwen2-VL's ``rope_index``; a video grid ``[t, h, w]`` stands for t runs of ``h * w`` patches.

    Args:
        second_per_grid_ts: not used: the text's timestamps tell the time.

    Source: ``Qwen3VLModel.get_rope_index`` of transformers.
    """
    groups = None
    if video_grid_thw is not None:
        groups = video_grid_thw.repeat_interleave(video_grid_thw[:, 0], dim=0)
        groups[:, 0] = 1
    return mrope_positions(input_ids, attention_mask, image_grid_thw, model, groups, None)
