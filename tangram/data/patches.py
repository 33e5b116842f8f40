"""From pixels to patches: sizes, normalised values and their order, the same for pictures and for frames of a video."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

MAX_ASPECT_RATIO = 200


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
    def table(self) -> list[list[float]]:
        """Value of every byte, fp32, ``[3][256]``, in transformers' order of operations: scale in fp64, round to fp32, normalise."""
        import numpy as np

        scaled = (np.arange(256, dtype=np.float64) * self.rescale).astype(np.float32)
        mean, std = (np.array(values, dtype=np.float32)[:, None] for values in (self.mean, self.std))
        table: list[list[float]] = ((scaled - mean) / std).tolist()
        return table

    def look_up(self, channel: int, data: np.ndarray) -> np.ndarray:
        """Values of bytes of a channel, fp32 ``[rows, columns]`` like the bytes."""
        import numpy as np
        from PIL import Image

        rows, columns = data.shape
        # Pillow looks bytes up several times faster than numpy, whose indices are 8 bytes wide.
        picture = Image.frombuffer("L", (columns, rows), data, "raw", "L", 0, 1)
        return np.asarray(picture.point(self.table[channel], "F"))


def cut_patches(frames: Sequence[Image.Image], values: ByteValues, patch_size: int, merge_size: int, depth: int, out: np.ndarray) -> None:
    """Cut the frames of one step of the time axis into patches.

    Args:
        frames: ``depth`` RGB pictures of one size, or one that is repeated.
        merge_size: patches lie in squares of this side, square after square; 1: in raster order.
        depth: frames per patch.
        out: filled; fp32 ``[rows * columns, 3 * depth * patch_size^2]``.
    """
    import numpy as np

    width, height = frames[0].size
    rows, columns = height // patch_size, width // patch_size
    patches = out.reshape(rows * columns, 3, depth, patch_size**2)
    for time, frame in enumerate(frames):
        times = slice(None) if len(frames) == 1 else slice(time, time + 1)
        for channel, band in enumerate(frame.split()):
            squares = np.asarray(band).reshape(rows // merge_size, merge_size, patch_size, columns // merge_size, merge_size, patch_size)
            # Put in order as bytes, a quarter as many as of the values.
            data = np.ascontiguousarray(squares.transpose(0, 3, 1, 4, 2, 5)).reshape(rows * columns, patch_size**2)
            patches[:, channel, times] = values.look_up(channel, data)[:, None]
