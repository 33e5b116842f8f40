"""Attention windows of Qwen2.5-VL's vision encoder."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tangram.config.model import Grid


def frame_lengths(grids: Sequence[Grid]) -> list[int]:
    """Patches of every frame of every image."""
    return [h * w for t, h, w in grids for _ in range(t)]


def window_order(grids: Sequence[Grid], merge: int, window: int) -> tuple[Tensor, list[int]]:
    """Order that brings the cells of each window together, and the windows' sizes.

    Windows are squares of ``window * window`` cells, cut at the lower and right edges; they never cross frames.

    Args:
        merge: side of a cell, patches.
        window: side of a window, cells.

    Returns:
        Permutation of the cells of all images, and the number of cells of each window in that order.

    Source: Bai et al. 2025 (Qwen2.5-VL), section 2.1.1; transformers ``get_window_index``.
    """
    keys = []
    windows = 0
    for t, h, w in grids:
        rows, columns = h // merge, w // merge
        down, across = -(-rows // window), -(-columns // window)
        frame = torch.arange(t)[:, None, None] * (down * across)
        row = torch.arange(rows)[None, :, None] // window * across
        column = torch.arange(columns)[None, None, :] // window
        keys.append((frame + row + column).flatten() + windows)
        windows += t * down * across
    key = torch.cat(keys)
    return torch.argsort(key, stable=True), torch.bincount(key, minlength=windows).tolist()
