"""A video that is given as image files, one for each frame."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING

from tangram.data.images import decode_rgb, of, open_image
from tangram.data.video_file import Timeline
from tangram.errors import DataError

if TYPE_CHECKING:
    from PIL import Image

logger = logging.getLogger(__name__)

ASSUMED_FPS = 2.0
"""Of a list of frames that does not say how many there are to a second."""


class FrameList:
    """Image files in the order in which they are shown, at a constant rate.

    Args:
        where: the sample, for messages.
        sample_fps: frames per second; None: 2.0 is assumed, and each process says so once in its log.

    Raises:
        DataError: no frames, a rate that is not positive, or a first frame that cannot be opened.
    """

    def __init__(self, paths: Sequence[str], sample_fps: float | None, where: str = "") -> None:
        if not paths:
            raise DataError(f"a video is an empty list of frames{of(where)}; list its image files or remove the sample")
        if sample_fps is None:
            _say_assumed(where)
            sample_fps = ASSUMED_FPS
        if not 0 < sample_fps < float("inf"):
            raise DataError(f"{paths[0]}: sample_fps of its frames is {sample_fps}{of(where)}; it must be above 0")
        self.paths = paths
        self.where = where
        self.path = paths[0]
        self.timeline = Timeline(len(paths), len(paths) / sample_fps, sample_fps)
        with open_image(self.path, where) as first:
            self.width, self.height = first.size

    def check(self, indexes: Sequence[int]) -> None:
        """Read the headers of these frames.

        Raises:
            DataError: one cannot be opened, or is of another size than the first.
        """
        for index in indexes:
            self._open(index).close()

    def pictures(self, indexes: Sequence[int]) -> Iterator[Image.Image]:
        """RGB pictures of the frames of these numbers; each is decoded when it is asked for.

        Raises:
            DataError: as ``check``, and where a file is truncated or damaged.
        """
        for index in indexes:
            with self._open(index) as image:
                yield decode_rgb(image, self.paths[index], self.where)

    def _open(self, index: int) -> Image.Image:
        image = open_image(self.paths[index], self.where)
        if image.size != (self.width, self.height):
            sizes = f"{image.width} x {image.height} but the video's first frame, {self.path}, {self.width} x {self.height}"
            raise DataError(f"{self.paths[index]}: is {sizes}{of(self.where)}; the frames of a video must have one size")
        return image


@cache
def _say(text: str) -> None:
    logger.warning(text)


def _say_assumed(where: str) -> None:
    if _say.cache_info().currsize == 0:
        _say(f"frames of a video without sample_fps{of(where)}: {ASSUMED_FPS} a second are assumed, here and wherever it is missing")
