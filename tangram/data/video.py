"""Videos: which frames are taken, and their patches.

Frames are chosen as in LLaMA-Factory and MindSpeed-MM: ``max(1, floor(duration * fps))`` of them, at most as many as there are and at most
``video_maxlen``, evenly spaced by number from the first to the last, rounded down. ``video_num_frames`` takes the place of the first term.
Of a list of frames, which somebody chose already, all are taken up to these two limits, whatever the rate. If the number is no multiple of
``temporal_patch_size``, the last frame is repeated.

The pixel limits hold for each frame, in ``smart_resize``, like those of images. This is what ``Qwen2VLVideoProcessor`` of transformers does unless it
is told to share a budget between the frames (``cap_pixels_per_frame``); ``Qwen3VLVideoProcessor`` holds frames times height times width against
its limits. Neither is done here: a frame's size does not depend on how many there are. transformers also chooses frames in a way of its own,
unless they are handed over. On the same frames and sizes the patches are equal to transformers' within one step of a byte: torchvision resizes
with another rounding than Pillow, with which the frames here are resized like still pictures, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tangram.config.data import PreprocessParameters
from tangram.config.model import VisionEncoderConfig
from tangram.data.conversation import Video
from tangram.data.frame_list import FrameList
from tangram.data.images import of
from tangram.data.medium import Medium
from tangram.data.patches import ByteValues, PixelBytes, cut_patches, smart_resize
from tangram.data.processor_file import ProcessorFile, check_limits
from tangram.data.video_file import Timeline, VideoFile
from tangram.errors import DataError

if TYPE_CHECKING:
    from PIL import Image

DEFAULT_FPS = 2.0


def choose_frames(total: int, count: int) -> list[int]:
    """``count`` numbers from 0 to ``total - 1``, evenly spaced and rounded down; of one alone, 0.

    Equal to ``numpy.linspace(0, total - 1, count).astype(int)``.
    """
    if count == 1:
        return [0]
    step = (total - 1) / (count - 1)
    return [int(number * step) for number in range(count - 1)] + [total - 1]


@dataclass(frozen=True)
class VideoProcessor:
    """Turns videos into grids and patches.

    Args:
        patch_size, temporal_patch_size, merge_size: geometry of the vision encoder.
        min_pixels, max_pixels: limits on height times width of a frame after resizing.
        fps: frames taken from each second.
        num_frames: frames taken from every video, instead.
        max_frames: most frames taken from a video.
        values: what bytes become.
        resample: Pillow's number of the resampling filter.
    """

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    fps: float
    num_frames: int | None
    max_frames: int
    values: ByteValues
    resample: int = 3

    @classmethod
    def from_config(cls, preprocess: PreprocessParameters, vision: VisionEncoderConfig) -> VideoProcessor:
        """The video processor of a Hugging Face folder, with the limits and numbers of frames of data.json.

        Raises:
            ConfigError: the folder's file is missing or lacks a key, does not fit the vision encoder or switches a step off, or the limits leave
                no size.
        """
        file = ProcessorFile.read(preprocess.model_name_or_path, "video_processor")
        file.require("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
        file.check_geometry(vision)
        low, high = preprocess.video_min_pixels, preprocess.video_max_pixels
        check_limits("video", low, high, (vision.patch_size * vision.spatial_merge_size) ** 2)
        return cls(
            vision.patch_size,
            vision.temporal_patch_size,
            vision.spatial_merge_size,
            low,
            high,
            preprocess.video_fps or DEFAULT_FPS,
            preprocess.video_num_frames,
            preprocess.video_maxlen,
            file.byte_values(vision),
            file.resample,
        )

    def __str__(self) -> str:
        frames = f"fps {self.fps:g}" if self.num_frames is None else f"{self.num_frames} frames"
        sizes = f"min_pixels {self.min_pixels}, max_pixels {self.max_pixels}, patch_size {self.patch_size}, merge_size {self.merge_size}"
        return f"videos: {frames}, at most {self.max_frames} frames, of each {sizes}"

    def medium(self, video: Video, where: str = "") -> Medium:
        """Grid and times of a video from the header of its file and, where that does not tell of every frame, the time stamps of its packets.

        Args:
            where: the sample, for messages.

        Raises:
            DataError: the file is missing, no video, without frames or times, or too thin; or a frame of a list is.
        """
        source = _source(video, where)
        if isinstance(source, FrameList):
            source.check(self._chosen(source))
        return self._medium(source)

    def patches(self, video: Video, where: str = "") -> tuple[PixelBytes, Medium]:
        """Patches of a video, ``[t * h * w, channels * temporal_patch_size * patch_size^2]`` in merge order, and its medium.

        Only as many frames are decoded as are taken, and those between them and the key frame before; no more than ``temporal_patch_size``
        lie in memory at a time.

        Raises:
            DataError: as ``medium``; a frame that is damaged or of another size; a file that holds another number of frames than its header says.
        """
        import numpy as np

        source = _source(video, where)
        medium = self._medium(source)
        steps, rows, columns = medium.grid
        size = (columns * self.patch_size, rows * self.patch_size)
        data = np.empty((steps, rows * columns, 3, self.temporal_patch_size, self.patch_size**2), dtype=np.uint8)
        step = 0
        waiting: list[Image.Image] = []
        for picture in source.pictures(self._chosen(source)):
            waiting.append(picture.resize(size, resample=self.resample))
            if len(waiting) == self.temporal_patch_size:
                data[step] = cut_patches(waiting, self.patch_size, self.merge_size)
                step, waiting = step + 1, []
        if waiting:
            repeated = waiting + [waiting[-1]] * (self.temporal_patch_size - len(waiting))
            data[step] = cut_patches(repeated, self.patch_size, self.merge_size)
        return PixelBytes(data.reshape(-1, *data.shape[2:]), self.temporal_patch_size, self.values), medium

    def _chosen(self, source: VideoFile | FrameList) -> list[int]:
        """Numbers of the frames that are taken."""
        timeline = source.timeline
        if self.num_frames is not None:
            wanted = self.num_frames
        elif isinstance(source, FrameList):
            wanted = timeline.frames
        else:
            wanted = max(1, math.floor(timeline.duration * self.fps))
        return choose_frames(timeline.frames, min(wanted, timeline.frames, self.max_frames))

    def _medium(self, source: VideoFile | FrameList) -> Medium:
        factor, depth = self.patch_size * self.merge_size, self.temporal_patch_size
        chosen = self._chosen(source)
        try:
            height, width = smart_resize(source.height, source.width, factor, self.min_pixels, self.max_pixels)
        except ValueError as error:
            raise DataError(f"{source.path}: {error}{of(source.where)}; crop the video or remove the sample") from None
        grid = (-(-len(chosen) // depth), height // self.patch_size, width // self.patch_size)
        return Medium(grid, depth / (len(chosen) / source.timeline.duration), _middles(source.timeline, chosen, depth))


def _source(video: Video, where: str) -> VideoFile | FrameList:
    return FrameList(video.paths, video.sample_fps, where) if video.is_frames else VideoFile(video.paths[0], where)


def _middles(timeline: Timeline, chosen: Sequence[int], depth: int) -> tuple[float, ...]:
    """Seconds half way between the first and the last frame of each group of ``depth``."""
    times = [timeline.time(index) for index in chosen]
    times += times[-1:] * (-len(times) % depth)
    return tuple((first + last) / 2 for first, last in zip(times[::depth], times[depth - 1 :: depth], strict=True))
