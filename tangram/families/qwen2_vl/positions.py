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
    import torch

    real = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    merge = model.image_encoder.vision_encoder.spatial_merge_size if model.image_encoder else 1
    advance = real.long()
    offset = torch.zeros(3, *input_ids.shape, dtype=torch.long, device=input_ids.device)
    for kind, token_id, grids, steps in (
        ("image", model.img_context_token_id, image_grid_thw, None),
        ("video", model.video_token_id, video_grid_thw, video_steps),
    ):
        spans = _spans(kind, (input_ids == token_id) & real, grids, merge)
        for index, (row, start, (frames, height, width)) in enumerate(spans):
            cells = _cell_offsets(frames, height, width, 1 if steps is None else steps[index], input_ids.device)
            stop = start + cells.shape[1]
            offset[:, row, start:stop] = cells
            advance[row, start:stop] = 0
            advance[row, stop - 1] = int(cells.max()) + 1
    base = advance.cumsum(dim=-1) - advance
    return (base + offset).masked_fill(~real, PAD_POSITION)


def _cell_offsets(frames: int, height: int, width: int, step: float, device: torch.device) -> torch.Tensor:
    """Time, row and column of every merged cell, ``[3, frames * height * width]``, from zero.

    The time is multiplied out before it is cut to a whole number. (transformers 4.57 cuts the step first, so that steps below one put all
    frames at the same time; 5.x and Qwen's own code do as here.)
    """
    import torch

    time = (torch.arange(frames, device=device) * step).long()
    axes = torch.meshgrid(time, torch.arange(height, device=device), torch.arange(width, device=device), indexing="ij")
    return torch.stack(axes).reshape(3, -1)


def _spans(kind: str, is_media: torch.Tensor, grids: torch.Tensor | None, merge: int) -> list[tuple[int, int, tuple[int, int, int]]]:
    """Row, first column and merged grid of every image or video; ``is_media`` is ``[b, s]``.

    Raises:
        DataError: the tokens do not fit the grids.
    """
    rows, columns = (axis.tolist() for axis in is_media.nonzero(as_tuple=True))
    merged = [(t, h // merge, w // merge) for t, h, w in (grids.tolist() if grids is not None else [])]
    needed = sum(t * h * w for t, h, w in merged)
    if needed != len(rows):
        raise DataError(
            f"the micro-batch holds {len(rows)} {kind} tokens but its {len(merged)} {kind} grids need {needed}; "
            "a placeholder was cut or expanded for another size"
        )
    spans, done = [], 0
    for index, (t, h, w) in enumerate(merged):
        count = t * h * w
        first, last = done, done + count - 1
        if rows[first] != rows[last] or columns[last] - columns[first] != count - 1:
            run = next(n for n in range(1, count) if rows[first + n] != rows[first] or columns[first + n] != columns[first] + n)
            raise DataError(
                f"{kind} {index} of the micro-batch needs {count} tokens in one run but row {rows[first]} has a run of {run} "
                f"at column {columns[first]}"
            )
        spans.append((rows[first], columns[first], (t, h, w)))
        done += count
    return spans
