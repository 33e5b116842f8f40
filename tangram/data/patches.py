"""From pixels to patches: sizes, order and values, the same for pictures and for frames of a video.

Patches stay bytes until a model takes them: their values are four times as large, and of a still picture, whose only frame stands for all of a
patch, eight times. To make, join and hand over that much between processes takes longer than to decode and to resize together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

MAX_ASPECT_RATIO = 200
CHUNK = 256
"""Patches whose values are looked up at a time: few enough that what lies between bytes and values stays in the processor's cache."""


def check_sides(height: int, width: int) -> None:
    """Refuse a picture that has no pixels or is too thin.

    Raises:
        ValueError: a side is zero, or the sides are to each other as more than 200 to 1.
    """
    if min(height, width) < 1:
        raise ValueError(f"its sides are {width} x {height}, so it has no pixels")
    ratio = max(height, width) / min(height, width)
    if ratio > MAX_ASPECT_RATIO:
        raise ValueError(f"its sides {width} x {height} are to each other as {ratio:.2f} to 1; at most {MAX_ASPECT_RATIO}")


def smart_resize(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Height and width near the given ones that are multiples of ``factor`` and whose product lies within the limits.

    Each side is at least one ``factor``; for a very thin picture this may exceed ``max_pixels``. Where transformers' ``smart_resize`` gives a
    side above zero, this is equal to it.

    Raises:
        ValueError: as ``check_sides``.
    """
    check_sides(height, width)
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if rows * columns < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        rows, columns = math.ceil(height * scale / factor) * factor, math.ceil(width * scale / factor) * factor
    elif max(factor, rows) * max(factor, columns) > max_pixels:
        scale = math.sqrt(height * width / max_pixels)
        rows, columns = math.floor(height / scale / factor) * factor, math.floor(width / scale / factor) * factor
    return max(factor, rows), max(factor, columns)


@dataclass(frozen=True)
class ByteValues:
    """What every byte of a picture becomes.

    Args:
        mean, std: per channel, of values in 0..1.
        rescale: factor from bytes to 0..1.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    rescale: float = 1 / 255

    @cached_property
    def table(self) -> np.ndarray:
        """Value of every byte, fp32 ``[3, 256]``, in transformers' order of operations: scale in fp64, round to fp32, normalise."""
        import numpy as np

        scaled = (np.arange(256, dtype=np.float64) * self.rescale).astype(np.float32)
        mean, std = (np.array(values, dtype=np.float32)[:, None] for values in (self.mean, self.std))
        table: np.ndarray = (scaled - mean) / std
        return table


@dataclass(frozen=True, eq=False)
class PixelBytes:
    """Patches of pictures before they are scaled and normalised. To numpy it is the array of their values.

    Args:
        data: uint8 ``[patches, 3, frames, patch_size^2]``; ``frames`` is ``depth``, or 1 where all frames of a patch are one still picture.
        depth: frames per patch.
        values: what the bytes become.
    """

    data: np.ndarray
    depth: int
    values: ByteValues

    @classmethod
    def join(cls, parts: Sequence[PixelBytes]) -> PixelBytes:
        """The patches of all parts, which come from one processor, one after another."""
        import numpy as np

        first = parts[0]
        assert all((part.depth, part.values) == (first.depth, first.values) for part in parts), "pixels of several processors"
        return replace(first, data=np.concatenate([part.data for part in parts]))

    def __len__(self) -> int:
        return len(self.data)

    @property
    def shape(self) -> tuple[int, int]:
        """That of the values."""
        patches, channels, _, area = self.data.shape
        return patches, channels * self.depth * area

    def expand(self) -> np.ndarray:
        """The values, fp32 ``[patches, 3 * depth * patch_size^2]``."""
        import numpy as np

        patches, channels, _, area = self.data.shape
        # numpy asks the system for large pages, torch does not: touching 4 KiB ones for the first time takes longer than filling them.
        out = np.empty((patches, channels, self.depth, area), dtype=np.float32)
        for start in range(0, patches, CHUNK):
            part = slice(start, start + CHUNK)
            for channel, table in enumerate(self.values.table):
                out[part, channel] = table.take(self.data[part, channel])
        return out.reshape(self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("the values of PixelBytes are made anew each time")
        values = self.expand()
        return values if dtype is None else values.astype(dtype)


def cut_patches(frames: Sequence[Image.Image], patch_size: int, merge_size: int) -> np.ndarray:
    """Cut the frames of one step of the time axis into patches.

    Args:
        frames: RGB pictures of one size.
        merge_size: patches lie in squares of this side, square after square; 1: in raster order.

    Returns:
        uint8 ``[rows * columns, 3, frames, patch_size^2]``.
    """
    import numpy as np

    width, height = frames[0].size
    rows, columns = height // patch_size, width // patch_size
    squares = (rows // merge_size, columns // merge_size, merge_size, merge_size)
    out = np.empty((*squares, 3, len(frames), patch_size, patch_size), dtype=np.uint8)
    for time, frame in enumerate(frames):
        for channel, band in enumerate(frame.split()):
            cells = np.asarray(band).reshape(rows // merge_size, merge_size, patch_size, columns // merge_size, merge_size, patch_size)
            out[:, :, :, :, channel, time] = cells.transpose(0, 3, 1, 4, 2, 5)
    return out.reshape(rows * columns, 3, len(frames), patch_size**2)
