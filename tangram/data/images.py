"""Still images: from a file to patches, with the arithmetic of transformers' ``Qwen2VLImageProcessor`` (PIL backend).

How a picture is read, everywhere in Tangram:

- EXIF orientation is not applied, as in transformers and LLaMA-Factory.
- Of an animation, a TIFF of several pages or an MPO the first picture counts.
- Palettes, grey, black and white, CMYK, YCbCr and Lab become RGB and an alpha channel is dropped, by ``PIL.Image.convert("RGB")``. (transformers
  4.57 does the same; 5.x composites transparent pictures onto white.)
- Of a colour picture with 16 bits a channel Pillow reads the upper eight, as it does for transformers.
- One-channel pictures of 16 or 32 bits are refused: ``convert`` would clip them to white.
- A truncated file is an error; Pillow's ``LOAD_TRUNCATED_IMAGES`` is not touched. So is a picture of more than 178,956,970 pixels, twice
  Pillow's ``MAX_IMAGE_PIXELS``: a file of a few bytes can claim as many.
- Pixel limits act once, in ``smart_resize``, with bicubic resampling. (MindSpeed-MM and LLaMA-Factory first shrink larger pictures to the limit
  with the nearest-pixel filter; transformers does not, and equality with it is what is promised here.)
"""

from __future__ import annotations

import math
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tangram.config.data import PreprocessParameters
from tangram.config.model import VisionEncoderConfig
from tangram.data.medium import Grid
from tangram.data.patches import ByteValues, PixelBytes, cut_patches, smart_resize
from tangram.data.processor_file import ProcessorFile, check_limits
from tangram.errors import DataError

if TYPE_CHECKING:
    from PIL import Image

DEEP_MODES = ("I", "F")
"""Pillow modes, or beginnings of them, of one channel with 16 or 32 bits."""


@dataclass(frozen=True)
class ImageProcessor:
    """Turns image files into grids and patches.

    Args:
        patch_size, temporal_patch_size, merge_size: geometry of the vision encoder.
        min_pixels, max_pixels: limits on height times width after resizing.
        values: what bytes become.
        resample: Pillow's number of the resampling filter.
    """

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    values: ByteValues
    resample: int = 3

    @classmethod
    def from_config(cls, preprocess: PreprocessParameters, vision: VisionEncoderConfig) -> ImageProcessor:
        """The processor of a Hugging Face folder, with the pixel limits of data.json in place of the folder's.

        Raises:
            ConfigError: preprocessor_config.json and processor_config.json are missing or lack a key, do not fit the vision encoder, switch a
                step off, or the limits leave no size.
        """
        file = ProcessorFile.read(preprocess.model_name_or_path, "image_processor")
        file.require("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
        file.check_geometry(vision)
        low, high = preprocess.image_min_pixels, preprocess.image_max_pixels
        check_limits("image", low, high, (vision.patch_size * vision.spatial_merge_size) ** 2)
        values = file.byte_values(vision)
        return cls(vision.patch_size, vision.temporal_patch_size, vision.spatial_merge_size, low, high, values, file.resample)

    def __str__(self) -> str:
        return f"images: min_pixels {self.min_pixels}, max_pixels {self.max_pixels}, patch_size {self.patch_size}, merge_size {self.merge_size}"

    @property
    def factor(self) -> int:
        """Side of one merged cell, pixels."""
        return self.patch_size * self.merge_size

    def tokens(self, grid: Grid) -> int:
        """Tokens of an image after merging."""
        return math.prod(grid) // self.merge_size**2

    def grid(self, path: str, where: str = "") -> Grid:
        """Grid of an image from the header of its file; no pixel is decoded.

        Args:
            where: the sample, for the message.

        Raises:
            DataError: the file is missing, empty or no image, is of a refused kind, or too thin.
        """
        with open_image(path, where) as image:
            return self._grid_of(image, path, where)

    def patches(self, path: str, where: str = "") -> tuple[PixelBytes, Grid]:
        """Patches of an image, ``[t * h * w, channels * temporal_patch_size * patch_size^2]`` in merge order, and its grid.

        Raises:
            DataError: as ``grid``, and where the file is truncated or damaged.
        """
        with open_image(path, where) as image:
            grid = self._grid_of(image, path, where)
            rgb = decode_rgb(image, path, where)
        _, rows, columns = grid
        resized = rgb.resize((columns * self.patch_size, rows * self.patch_size), resample=self.resample)
        return PixelBytes(cut_patches([resized], self.patch_size, self.merge_size), self.temporal_patch_size, self.values), grid

    def _grid_of(self, image: Image.Image, path: str, where: str) -> Grid:
        try:
            height, width = smart_resize(image.height, image.width, self.factor, self.min_pixels, self.max_pixels)
        except ValueError as error:
            raise DataError(f"{path}: {error}{of(where)}; crop the picture or remove the sample") from None
        return 1, height // self.patch_size, width // self.patch_size


def open_image(path: str, where: str = "") -> Image.Image:
    """Open an image file and read its header.

    Raises:
        DataError: with the path and the sample; also where the picture is of a refused kind.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        if _never_ends(path):
            raise DataError(f"{path}: a pipe or a device, no image file{of(where)}; give the path of a file")
        image = Image.open(path)
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError(f"{path}: no such image file{of(where)}") from None
    except UnidentifiedImageError:
        raise DataError(f"{path}: cannot open this image (not an image, or an empty file){of(where)}; replace the file") from None
    except Image.DecompressionBombError as error:
        raise DataError(f"{path}: {error}{of(where)}; shrink the picture or remove the sample") from None
    except Exception as error:  # damaged headers make Pillow's readers raise almost anything
        raise DataError(f"{path}: cannot open this image ({error or type(error).__name__}){of(where)}; replace the file") from None
    if image.mode.startswith(DEEP_MODES):
        image.close()
        raise DataError(f"{path}: a picture of mode {image.mode!r} (one channel, more than 8 bits){of(where)}; save it with 8 bits")
    return image


def _never_ends(path: str) -> bool:
    """Whether opening or reading ``path`` may wait, or go on, for ever."""
    mode = Path(path).stat().st_mode
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def decode_rgb(image: Image.Image, path: str, where: str = "") -> Image.Image:
    """The pixels of an opened image, as RGB.

    Raises:
        DataError: the file is truncated or damaged.
    """
    try:
        if image.mode == "RGB":
            image.load()
            return image
        return image.convert("RGB")
    except Exception as error:  # damaged files make Pillow's decoders raise almost anything
        raise DataError(f"{path}: cannot decode this image ({error or type(error).__name__}){of(where)}; replace the file") from None


def of(where: str) -> str:
    """The sample at the end of a message."""
    return f", in {where}" if where else ""
