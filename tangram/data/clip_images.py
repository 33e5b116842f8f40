"""Still images of CLIP towers: one size for all, with the arithmetic of transformers' ``CLIPImageProcessor`` (PIL backend).

The shorter edge is scaled to the tower's side with the file's filter, the middle is cut out, bytes are scaled and normalised. What lies outside
the middle square is lost, as in transformers. How a picture is read says ``tangram.data.images``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tangram.config.data import PreprocessParameters
from tangram.data.images import decode_rgb, of, open_image
from tangram.data.medium import Grid
from tangram.data.patches import ByteValues, PixelBytes, check_sides, cut_patches
from tangram.data.processor_file import ProcessorFile
from tangram.errors import ConfigError, DataError
from tangram.families.llava.config import ClipEncoderConfig


@dataclass(frozen=True)
class ClipImageProcessor:
    """Turns image files into patches of one square.

    Args:
        image_size: side of the square, pixels.
        patch_size: side of a patch, pixels; divides ``image_size``.
        values: what bytes become.
        resample: Pillow's number of the resampling filter.
    """

    image_size: int
    patch_size: int
    values: ByteValues
    resample: int = 3

    @classmethod
    def from_config(cls, preprocess: PreprocessParameters, vision: ClipEncoderConfig) -> ClipImageProcessor:
        """The processor of a Hugging Face folder.

        Raises:
            ConfigError: its file is missing or lacks a key, resizes otherwise than to the tower's square, switches a step off or pads; or
                the square lies outside the pixel limits of data.json.
        """
        file = ProcessorFile.read(preprocess.model_name_or_path, "image_processor")
        file.require("do_resize", "do_center_crop", "do_rescale", "do_normalize", "do_convert_rgb")
        if file.settings.get("do_pad"):
            raise ConfigError(f"{file.path}: do_pad is {file.settings['do_pad']!r}; pictures are cropped to a square here, not padded")
        side = vision.image_size
        size, crop = file.get("size"), file.get("crop_size")
        if size not in (side, {"shortest_edge": side}) or crop not in (side, {"height": side, "width": side}):
            raise ConfigError(
                f"{file.path}: size is {size!r} and crop_size {crop!r} but model.json's vision encoder has image_size {side}; "
                f"they must be {{'shortest_edge': {side}}} and {{'height': {side}, 'width': {side}}}"
            )
        low, high = preprocess.image_min_pixels, preprocess.image_max_pixels
        if not low <= side**2 <= high:
            raise ConfigError(
                f"preprocess_parameters: image_min_pixels {low}, image_max_pixels {high}: this vision encoder takes pictures of one size, "
                f"{side} x {side} = {side**2} pixels, which lies outside; leave the limits out"
            )
        return cls(side, vision.patch_size, file.byte_values(vision), file.resample)

    def __str__(self) -> str:
        return f"images: {self.image_size} x {self.image_size}, patch_size {self.patch_size}"

    def tokens(self, grid: Grid) -> int:
        """Tokens of an image: one per patch."""
        return math.prod(grid)

    def grid(self, path: str, where: str = "") -> Grid:
        """Grid of an image, the same for all; the header of the file is read, no pixel is decoded.

        Raises:
            DataError: the file is missing, empty, no image, of a refused kind or too thin.
        """
        with open_image(path, where) as image:
            self._resized(image.size, path, where)
        return self._grid

    def patches(self, path: str, where: str = "") -> tuple[PixelBytes, Grid]:
        """Patches of an image, ``[h * w, channels * patch_size^2]`` in raster order, and its grid.

        Raises:
            DataError: as ``grid``, and where the file is truncated or damaged.
        """
        with open_image(path, where) as image:
            width, height = self._resized(image.size, path, where)
            resized = decode_rgb(image, path, where).resize((width, height), resample=self.resample)
        left, top = (width - self.image_size) // 2, (height - self.image_size) // 2
        square = resized.crop((left, top, left + self.image_size, top + self.image_size))
        return PixelBytes(cut_patches([square], self.patch_size, merge_size=1), 1, self.values), self._grid

    @property
    def _grid(self) -> Grid:
        patches = self.image_size // self.patch_size
        return 1, patches, patches

    def _resized(self, size: tuple[int, int], path: str, where: str) -> tuple[int, int]:
        """Width and height after resizing, before the crop."""
        width, height = size
        try:
            check_sides(height, width)
        except ValueError as error:
            raise DataError(f"{path}: {error}{of(where)}; crop the picture or remove the sample") from None
        longer = int(self.image_size * max(size) / min(size))
        return (self.image_size, longer) if width <= height else (longer, self.image_size)
