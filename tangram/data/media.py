"""The media of a sample: what their headers say, and their pixels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tangram.config.data import PreprocessParameters
from tangram.config.model import VisionEncoderConfig
from tangram.data.conversation import Video
from tangram.data.images import ImageProcessor, of
from tangram.data.medium import Grid, Medium
from tangram.data.patches import PixelBytes
from tangram.data.video import VideoProcessor
from tangram.errors import DataError

__all__ = ["Images", "Media", "Medium", "image_processor"]


class Images(Protocol):
    """What reads the still images of a vision encoder. Its ``str`` is a line for the log: the sizes in force."""

    def grid(self, path: str, where: str = "") -> Grid:
        """Grid of an image from the header of its file."""

    def patches(self, path: str, where: str = "") -> tuple[PixelBytes, Grid]:
        """Patches of an image, ``[t * h * w, C * T * P * P]``, and its grid."""

    def tokens(self, grid: Grid) -> int:
        """Tokens of an image, or of a video, after merging."""


def image_processor(preprocess: PreprocessParameters, vision: VisionEncoderConfig) -> Images:
    """The image processor that a vision encoder's pictures need.

    Raises:
        ConfigError: as its ``from_config``.
    """
    from tangram.data.clip_images import ClipImageProcessor
    from tangram.families.llava.config import ClipEncoderConfig

    if isinstance(vision, ClipEncoderConfig):
        return ClipImageProcessor.from_config(preprocess, vision)
    return ImageProcessor.from_config(preprocess, vision)


@dataclass(frozen=True)
class Media:
    """Reads the media of samples.

    Args:
        images: of the model's vision encoder.
        videos: of the same; None: the model takes no videos.
    """

    images: Images
    videos: VideoProcessor | None = None

    @classmethod
    def from_config(cls, preprocess: PreprocessParameters, vision: VisionEncoderConfig) -> Media:
        """The readers of a model's media.

        Raises:
            ConfigError: as the processors' ``from_config``.
        """
        images = image_processor(preprocess, vision)
        return cls(images, VideoProcessor.from_config(preprocess, vision) if isinstance(images, ImageProcessor) else None)

    def __str__(self) -> str:
        """The limits in force, for the log."""
        return f"{self.images}; {self.videos}" if self.videos else f"{self.images}"

    def image(self, path: str, where: str) -> Medium:
        """What the header of an image file says.

        Raises:
            DataError: as ``ImageProcessor.grid``.
        """
        return Medium(self.images.grid(path, where))

    def image_pixels(self, path: str, where: str) -> PixelBytes:
        """Patches of an image, ``[t * h * w, C * T * P * P]``.

        Raises:
            DataError: as ``ImageProcessor.patches``.
        """
        return self.images.patches(path, where)[0]

    def video(self, video: Video, where: str) -> Medium:
        """What the header of a video says, or of its frames' files; no frame is decoded.

        Raises:
            DataError: as ``VideoProcessor.medium``, or the model takes no videos.
        """
        return self._videos(video, where).medium(video, where)

    def video_pixels(self, video: Video, where: str) -> PixelBytes:
        """Patches of a video, ``[t * h * w, C * T * P * P]``.

        Raises:
            DataError: as ``VideoProcessor.patches``, or the model takes no videos.
        """
        return self._videos(video, where).patches(video, where)[0]

    def tokens(self, medium: Medium) -> int:
        """Tokens of a medium after merging."""
        return self.images.tokens(medium.grid)

    def _videos(self, video: Video, where: str) -> VideoProcessor:
        if self.videos is None:
            raise DataError(f"{video.paths[0]}: a video{of(where)}, but this model takes images alone; remove the sample")
        return self.videos
