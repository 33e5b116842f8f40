"""The media of a sample: what their headers say, and their pixels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tangram.data.images import Grid, ImageProcessor

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Medium:
    """An image or video as its tokens and positions need it; known without decoding a pixel."""

    grid: Grid
    """Patches along time, height and width, before merging."""
    seconds_per_grid: float | None = None
    """Of a video: seconds between two steps of the time axis."""
    timestamps: tuple[float, ...] = ()
    """Of a video: seconds at the middle of each step of the time axis."""


@dataclass(frozen=True)
class Media:
    """Reads the media of samples.

    Args:
        images: of the model's vision encoder.
    """

    images: ImageProcessor

    def image(self, path: str, where: str) -> Medium:
        """What the header of an image file says.

        Raises:
            DataError: as ``ImageProcessor.grid``.
        """
        return Medium(self.images.grid(path, where))

    def image_pixels(self, path: str, where: str) -> np.ndarray:
        """Patches of an image, ``[t * h * w, C * T * P * P]`` fp32.

        Raises:
            DataError: as ``ImageProcessor.patches``.
        """
        return self.images.patches(path, where)[0]

    def tokens(self, medium: Medium) -> int:
        """Tokens of a medium after merging."""
        return self.images.tokens(medium.grid)
