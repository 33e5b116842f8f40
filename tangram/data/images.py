"""Still images: from a file to patches, with the arithmetic of transformers' ``Qwen2VLImageProcessor`` (PIL backend).

How a picture is read, everywhere in Tangram:

- EXIF orientation is not applied, as in transformers and LLaMA-Factory.
- Of an animation the first frame counts.
- Palettes, grey and CMYK become RGB and an alpha channel is dropped, by ``PIL.Image.convert("RGB")``. (transformers 4.57 does the same; 5.x
  composites transparent pictures onto white.)
- One-channel pictures of 16 or 32 bits are refused: ``convert`` would clip them to white.
- A truncated file is an error; Pillow's ``LOAD_TRUNCATED_IMAGES`` is not touched.
- Pixel limits act once, in ``smart_resize``, with bicubic resampling. (MindSpeed-MM and LLaMA-Factory first shrink larger pictures to the limit
  with the nearest-pixel filter; transformers does not, and equality with it is what is promised here.)
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tangram.config.data import PreprocessParameters
from tangram.config.model import VisionEncoderConfig
from tangram.errors import ConfigError, DataError

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

MAX_ASPECT_RATIO = 200
PROCESSOR_FILE = "preprocessor_config.json"
WHOLE_PROCESSOR_FILE = "processor_config.json"
"""What transformers 5 writes instead when a whole processor is saved; its ``image_processor`` is what the other file holds."""
DEEP_MODES = ("I", "F")
"""Pillow modes, or beginnings of them, of one channel with 16 or 32 bits."""

Grid = tuple[int, int, int]
"""Patches along time, height and width, before merging."""


def smart_resize(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Height and width near the given ones that are multiples of ``factor`` and whose product lies within the limits.

    Each side is at least one ``factor``; for a very thin picture this may exceed ``max_pixels``. Where transformers' ``smart_resize`` gives a
    side above zero, this is equal to it.

    Raises:
        ValueError: the sides are to each other as more than 200 to 1.
    """
    if max(height, width) / min(height, width) > MAX_ASPECT_RATIO:
        ratio = max(height, width) / min(height, width)
        raise ValueError(f"its sides {width} x {height} are to each other as {ratio:.2f} to 1; at most {MAX_ASPECT_RATIO}")
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if rows * columns < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        rows, columns = math.ceil(height * scale / factor) * factor, math.ceil(width * scale / factor) * factor
    elif max(factor, rows) * max(factor, columns) > max_pixels:
        scale = math.sqrt(height * width / max_pixels)
        rows, columns = math.floor(height / scale / factor) * factor, math.floor(width / scale / factor) * factor
    return max(factor, rows), max(factor, columns)


def _processor_file(folder: Path) -> Path:
    """The file with the image processor's settings; as in transformers, that of the whole processor comes first if it holds them."""
    whole = folder / WHOLE_PROCESSOR_FILE
    if whole.is_file() and b'"image_processor"' in whole.read_bytes():
        return whole
    if not (folder / PROCESSOR_FILE).is_file():
        raise ConfigError(
            f"{folder / PROCESSOR_FILE}: no such file; preprocess_parameters.model_name_or_path must name a Hugging Face folder with "
            f"{PROCESSOR_FILE}, or with a {WHOLE_PROCESSOR_FILE} that holds an image_processor"
        )
    return folder / PROCESSOR_FILE


@dataclass(frozen=True)
class ImageProcessor:
    """Turns image files into grids and patches.

    Args:
        patch_size, temporal_patch_size, merge_size: geometry of the vision encoder.
        min_pixels, max_pixels: limits on height times width after resizing.
        mean, std: per channel, of values in 0..1.
        rescale: factor from bytes to 0..1.
        resample: Pillow's number of the resampling filter.
    """

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    rescale: float = 1 / 255
    resample: int = 3

    @classmethod
    def from_config(cls, preprocess: PreprocessParameters, vision: VisionEncoderConfig) -> ImageProcessor:
        """The processor of a Hugging Face folder, with the pixel limits of data.json in place of the folder's.

        Raises:
            ConfigError: preprocessor_config.json and processor_config.json are missing or lack a key, do not fit the vision encoder, switch a
                step off, or the limits leave no size.
        """
        path = _processor_file(Path(preprocess.model_name_or_path))
        try:
            raw: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8-sig"))
            if path.name == WHOLE_PROCESSOR_FILE:
                raw = raw["image_processor"]
            geometry = {key: int(raw[key]) for key in ("patch_size", "temporal_patch_size", "merge_size")}
            mean, std = tuple(map(float, raw["image_mean"])), tuple(map(float, raw["image_std"]))
            rescale, resample = float(raw.get("rescale_factor", 1 / 255)), int(raw.get("resample", 3))
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}: line {error.lineno}: not valid JSON: {error.msg}") from None
        except KeyError as error:
            raise ConfigError(f"{path}: key {error} is missing") from None
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{path}: a value of the wrong type: {error}") from None
        for key in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
            if raw.get(key, True) is not True:
                raise ConfigError(f"{path}: {key} is {raw[key]!r}; the vision encoder needs all of resize, rescale, normalize and RGB")
        wanted = {"patch_size": vision.patch_size, "temporal_patch_size": vision.temporal_patch_size, "merge_size": vision.spatial_merge_size}
        for key, value in geometry.items():
            if value != wanted[key]:
                raise ConfigError(f"{path}: {key} is {value} but model.json's vision encoder has {wanted[key]}; take both from one model")
        if not len(mean) == len(std) == vision.in_channels == 3:
            raise ConfigError(
                f"{path}: image_mean and image_std hold {len(mean)} and {len(std)} numbers and the vision encoder takes "
                f"{vision.in_channels} channels; all three must be 3"
            )
        low, high, cell = preprocess.image_min_pixels, preprocess.image_max_pixels, (vision.patch_size * vision.spatial_merge_size) ** 2
        if high < cell or low > high:
            raise ConfigError(
                f"preprocess_parameters: image_min_pixels {low}, image_max_pixels {high}: the maximum must be at least {cell} (one merged cell) "
                "and at least the minimum"
            )
        return cls(**geometry, min_pixels=low, max_pixels=high, mean=mean, std=std, rescale=rescale, resample=resample)

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

    def patches(self, path: str, where: str = "") -> tuple[np.ndarray, Grid]:
        """Patches of an image, ``[t * h * w, channels * temporal_patch_size * patch_size^2]`` fp32 in merge order, and its grid.

        Raises:
            DataError: as ``grid``, and where the file is truncated or damaged.
        """
        import numpy as np
        from PIL import Image

        with open_image(path, where) as image:
            grid = self._grid_of(image, path, where)
            try:
                rgb = image.convert("RGB")
            except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
                raise DataError(f"{path}: cannot decode this image ({error}){_of(where)}; replace the file") from None
        _, rows, columns = grid
        pixels = np.asarray(rgb.resize((columns * self.patch_size, rows * self.patch_size), resample=Image.Resampling(self.resample)))
        patch, merge = self.patch_size, self.merge_size
        cells = pixels.reshape(rows // merge, merge, patch, columns // merge, merge, patch, 3).transpose(0, 3, 1, 4, 6, 2, 5)
        patches = np.empty((*cells.shape[:5], self.temporal_patch_size, patch, patch), dtype=np.float32)
        for channel, values in enumerate(self._table):
            patches[:, :, :, :, channel] = values[cells[:, :, :, :, channel]][:, :, :, :, None]
        return patches.reshape(rows * columns, -1), grid

    def _grid_of(self, image: Image.Image, path: str, where: str) -> Grid:
        if image.mode.startswith(DEEP_MODES):
            raise DataError(f"{path}: a picture of mode {image.mode!r} (one channel, more than 8 bits){_of(where)}; save it with 8 bits")
        try:
            height, width = smart_resize(image.height, image.width, self.factor, self.min_pixels, self.max_pixels)
        except ValueError as error:
            raise DataError(f"{path}: {error}{_of(where)}; crop the picture or remove the sample") from None
        return 1, height // self.patch_size, width // self.patch_size

    @cached_property
    def _table(self) -> np.ndarray:
        """Normalised value of every byte, ``[3, 256]``, in transformers' order of operations: scale in fp64, round to fp32, normalise."""
        import numpy as np

        scaled = (np.arange(256, dtype=np.float64) * self.rescale).astype(np.float32)
        mean, std = (np.array(values, dtype=np.float32)[:, None] for values in (self.mean, self.std))
        table: np.ndarray = (scaled - mean) / std
        return table


def open_image(path: str, where: str = "") -> Image.Image:
    """Open an image file and read its header.

    Raises:
        DataError: with the path and the sample.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(path)
    except FileNotFoundError:
        raise DataError(f"{path}: no such image file{_of(where)}") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = "not an image, or an empty file" if isinstance(error, UnidentifiedImageError) else str(error)
        raise DataError(f"{path}: cannot open this image ({reason}){_of(where)}; replace the file") from None


def _of(where: str) -> str:
    return f", in {where}" if where else ""
