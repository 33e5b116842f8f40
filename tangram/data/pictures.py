"""Patches put together to the pictures that they were cut from, for models that take whole pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tangram.errors import DataError

if TYPE_CHECKING:
    import torch


def pictures(patches: torch.Tensor, grids: torch.Tensor, patch_size: int | Sequence[int]) -> torch.Tensor:
    """Pictures of one size, ``[n, channels, height, width]``.

    Args:
        patches: ``[all patches, channels * patch_size^2]`` in raster order, as ``tangram.data.clip_images`` cuts them.
        grids: ``[n, 3]``, patches per axis; one step of time.
        patch_size: side of a patch, pixels; some files of transformers give it for each axis.

    Raises:
        DataError: pictures of different sizes.
    """
    sizes = {tuple(grid) for grid in grids.tolist()}
    if len(sizes) != 1:
        raise DataError(f"pictures of {len(sizes)} sizes in one micro-batch, {sorted(sizes)}; this model takes one size")
    _, rows, columns = sizes.pop()
    high, wide = (patch_size, patch_size) if isinstance(patch_size, int) else patch_size
    cut = patches.view(len(grids), rows, columns, -1, high, wide)
    return cut.permute(0, 3, 1, 4, 2, 5).reshape(len(grids), cut.shape[3], rows * high, columns * wide)
