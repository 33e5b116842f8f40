"""3-D rotary positions (mRoPE) of Qwen2-VL.

Text advances all three axes by one a token. An image or video of ``[t, h, w]`` merged cells that begins at position p gives its tokens
``p + (frame, row, column)``, and the text after it resumes at the largest of these plus one. Source: section 2.1 of the Qwen2-VL report
(arXiv 2409.12191) and ``Qwen2VLModel.get_rope_index`` of transformers, to which it is equal for text and images. For videos whose time axis
reaches further than their rows and columns, transformers 4.57 resumes as here and 5.x at ``p + max(h, w)``, inside the video's own range.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tangram.config.model import ModelConfig
from tangram.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    import torch

PAD_POSITION = 1
"""Position of padding on all axes; nothing attends to it."""


def rope_index(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    image_grid_thw: torch.Tensor | None,
    model: ModelConfig,
    video_grid_thw: torch.Tensor | None = None,
    second_per_grid_ts: Sequence[float] | torch.Tensor | None = None,
) -> torch.Tensor:
    """Positions of Qwen2-VL: one temporal position per frame group, whatever the frame rate.

    Args:
        input_ids: ``[b, s]``.
        attention_mask: ``[b, s]``, 1 at real tokens, padding on either side; None: all are real.
        image_grid_thw: ``[images, 3]`` patches per axis before merging, images in the order of their tokens, row after row.
        model: the special ids and the merge size.
        video_grid_thw: ``[videos, 3]``, as for images.
        second_per_grid_ts: not used by Qwen2-VL, which has no notion of seconds; taken so that the families are called alike.

    Returns:
        ``[3, b, s]`` int64: time, height, width; 1 at padding.

    Raises:
        DataError: image or video tokens do not fit the grids; the message holds both numbers.
    """
    return mrope_positions(input_ids, attention_mask, image_grid_thw, model, video_grid_thw, None)


def mrope_positions(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    image_grid_thw: torch.Tensor | None,
    model: ModelConfig,
    video_grid_thw: torch.Tensor | None,
    video_steps: Sequence[float] | None,
) -> torch.Tensor:
    """As ``rope_index``, with ``video_steps``: temporal positions per frame group of each video, whole or broken; None: one."""
    import numpy as np
    import torch

    # In numpy: the arrays are small, and a call costs torch several times as much as the work in it.
    ids = input_ids.numpy(force=True)
    real = np.ones_like(ids, dtype=np.bool_) if attention_mask is None else attention_mask.numpy(force=True) != 0
    merge = model.image_encoder.vision_encoder.spatial_merge_size if model.image_encoder else 1
    advance = real.astype(np.int64)
    offset = np.zeros((3, *ids.shape), dtype=np.int64)
    for kind, token_id, grids, steps in (
        ("image", model.img_context_token_id, image_grid_thw, None),
        ("video", model.video_token_id, video_grid_thw, video_steps),
    ):
        spans = _spans(kind, (ids == token_id) & real, grids, merge)
        for index, (row, start, (frames, height, width)) in enumerate(spans):
            stop = start + frames * height * width
            times = _times(frames, 1 if steps is None else steps[index])
            cells = offset[:, row, start:stop].reshape(3, frames, height, width)
            cells[0], cells[1], cells[2] = times[:, None, None], np.arange(height)[:, None], np.arange(width)
            advance[row, start:stop] = 0
            advance[row, stop - 1] = max(int(times.max()) + 1, height, width)
    offset += advance.cumsum(axis=-1) - advance
    np.copyto(offset, PAD_POSITION, where=~real)
    return torch.from_numpy(offset).to(input_ids.device)


def _times(frames: int, step: float) -> np.ndarray:
    """Time of every frame group, from zero.

    It is multiplied out before it is cut to a whole number, in the precision that torch multiplies in. (transformers 4.57 cuts the step
    first, so that steps below one put all frames at the same time; 5.x and Qwen's own code do as here.)
    """
    import numpy as np

    return (np.arange(frames, dtype=np.float32) * np.float32(step)).astype(np.int64)


def _spans(kind: str, is_media: np.ndarray, grids: torch.Tensor | None, merge: int) -> list[tuple[int, int, tuple[int, int, int]]]:
    """Row, first column and merged grid of every image or video; ``is_media`` is ``[b, s]``.

    Raises:
        DataError: the tokens do not fit the grids.
    """
    import numpy as np

    places = is_media.ravel().nonzero()[0]
    merged = [(t, h // merge, w // merge) for t, h, w in (grids.tolist() if grids is not None else [])]
    needed = sum(t * h * w for t, h, w in merged)
    if needed != len(places):
        raise DataError(
            f"the micro-batch holds {len(places)} {kind} tokens but its {len(merged)} {kind} grids need {needed}; "
            "a placeholder was cut or expanded for another size"
        )
    spans, done, length = [], 0, is_media.shape[1]
    for index, (t, h, w) in enumerate(merged):
        run = places[done : done + t * h * w]
        row, column = divmod(int(run[0]), length)
        if run[-1] - run[0] != len(run) - 1 or run[-1] // length != row:
            breaks = (np.diff(run) != 1) | (run[1:] // length != row)
            raise DataError(
                f"{kind} {index} of the micro-batch needs {len(run)} tokens in one run but row {row} has a run of {int(breaks.argmax()) + 1} "
                f"at column {column}"
            )
        spans.append((row, column, (t, h, w)))
        done += len(run)
    return spans
