"""The processor files of a Hugging Face folder: what they say of pictures and videos."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tangram.config.model import VisionEncoderConfig
from tangram.data.patches import ByteValues
from tangram.errors import ConfigError

PROCESSOR_FILE = "preprocessor_config.json"
VIDEO_PROCESSOR_FILE = "video_preprocessor_config.json"
WHOLE_PROCESSOR_FILE = "processor_config.json"
"""What transformers 5 writes instead when a whole processor is saved; its ``image_processor`` and ``video_processor`` are what the other files
hold."""

Kind = Literal["image_processor", "video_processor"]


@dataclass(frozen=True)
class ProcessorFile:
    """The settings of one processor, and the file that they come from."""

    path: Path
    settings: Mapping[str, Any]

    @classmethod
    def read(cls, folder: str | Path, kind: Kind) -> ProcessorFile:
        """The settings in a folder, from where transformers takes them: the file of the whole processor if it holds them, then
        video_preprocessor_config.json for videos, then preprocessor_config.json.

        Raises:
            ConfigError: there is no such file, or it is not JSON.
        """
        folder = Path(folder)
        whole = folder / WHOLE_PROCESSOR_FILE
        if whole.is_file() and kind in (content := _json(whole)):
            return cls(whole, _mapping(content[kind], whole))
        names = [VIDEO_PROCESSOR_FILE, PROCESSOR_FILE] if kind == "video_processor" else [PROCESSOR_FILE]
        path = next((folder / name for name in names if (folder / name).is_file()), None)
        if path is None:
            raise ConfigError(
                f"{folder / PROCESSOR_FILE}: no such file; preprocess_parameters.model_name_or_path must name a Hugging Face folder with "
                f"{PROCESSOR_FILE}, or with a {WHOLE_PROCESSOR_FILE} that holds an image_processor"
            )
        return cls(path, _json(path))

    def byte_values(self, vision: VisionEncoderConfig) -> ByteValues:
        """How bytes become values.

        Raises:
            ConfigError: a key is missing or of a wrong type, or there are not three channels everywhere.
        """
        mean, std = (tuple(map(self._float, self._list(key))) for key in ("image_mean", "image_std"))
        if not len(mean) == len(std) == vision.in_channels == 3:
            raise ConfigError(
                f"{self.path}: image_mean and image_std hold {len(mean)} and {len(std)} numbers and the vision encoder takes "
                f"{vision.in_channels} channels; all three must be 3"
            )
        if min(std) <= 0:
            raise ConfigError(f"{self.path}: image_std holds {min(std)}; every number must be above 0")
        return ByteValues(mean, std, self._float(self.settings.get("rescale_factor", 1 / 255)))

    @property
    def resample(self) -> int:
        """Pillow's number of the resampling filter.

        Raises:
            ConfigError: no such filter.
        """
        number = self.settings.get("resample", 3)
        if type(number) is not int or not 0 <= number <= 5:
            raise ConfigError(f"{self.path}: resample is {number!r}; Pillow's filters have the numbers 0 to 5")
        return number

    def check_geometry(self, vision: VisionEncoderConfig) -> None:
        """Compare patch and merge sizes with the vision encoder's.

        Raises:
            ConfigError: a key is missing, or differs.
        """
        wanted = {"patch_size": vision.patch_size, "temporal_patch_size": vision.temporal_patch_size, "merge_size": vision.spatial_merge_size}
        for key, value in wanted.items():
            if self.get(key) != value:
                raise ConfigError(f"{self.path}: {key} is {self.get(key)!r} but model.json's vision encoder has {value}; take both from one model")

    def require(self, *steps: str) -> None:
        """Refuse a file that switches one of these steps off.

        Raises:
            ConfigError: it does.
        """
        for key in steps:
            if self.settings.get(key, True) is not True:
                names = ", ".join(step.removeprefix("do_") for step in steps)
                raise ConfigError(f"{self.path}: {key} is {self.settings[key]!r}; the vision encoder needs all of {names}")

    def get(self, key: str) -> Any:
        """The value of a key.

        Raises:
            ConfigError: it is missing.
        """
        if key not in self.settings:
            raise ConfigError(f"{self.path}: key {key!r} is missing")
        return self.settings[key]

    def _list(self, key: str) -> list[Any]:
        value = self.get(key)
        if not isinstance(value, list):
            raise ConfigError(f"{self.path}: {key} is {value!r}, a value of the wrong type; a list of numbers must stand there")
        return value

    def _float(self, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{self.path}: {value!r} is a value of the wrong type; a number must stand there")
        return float(value)


def check_limits(kind: Literal["image", "video"], low: int, high: int, cell: int) -> None:
    """Refuse pixel limits that leave no size.

    Args:
        cell: pixels of one merged cell.

    Raises:
        ConfigError: they leave none.
    """
    if high < cell or low > high:
        raise ConfigError(
            f"preprocess_parameters: {kind}_min_pixels {low}, {kind}_max_pixels {high}: the maximum must be at least {cell} (one merged cell) "
            "and at least the minimum"
        )


def _json(path: Path) -> Mapping[str, Any]:
    try:
        return _mapping(json.loads(path.read_text(encoding="utf-8-sig")), path)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: line {error.lineno}: not valid JSON: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from None


def _mapping(value: Any, path: Path) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path}: a value of the wrong type: a JSON object must stand there, not {value!r:.40}")
    return value
