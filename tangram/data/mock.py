"""Datasets of made-up pictures and text of a given size, for trials of speed and memory.

Everything is a function of the arguments and the seed: the same arguments give the same files (pictures: with one version of Pillow).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from tangram.checkpoints.publish import new_directory, new_file
from tangram.config.parsing import Section
from tangram.data.conversation import IMAGE_PLACEHOLDER
from tangram.data.tokenizer import Tokenizer
from tangram.errors import ConfigError, DataError

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

EVERYDAY = (
    "the a red blue green small large old new round tall bright dark quiet open river house tree road table window garden picture street bridge "
    "boat horse bird cloud stone light water hand door book lamp chair field hill stands lies moves shows holds looks near under over behind "
    "before with and then again there slowly often always today"
)
"""Text is made of those of these words that are one token each."""
LEAST_WORDS = 8
DIFFERENT_PICTURES = 64
"""So many pictures are drawn, unless fewer are needed; samples take them in turn."""
JPEG_QUALITY = 90


class MockOptions(Section):
    """What to make."""

    save_dir: str
    tokenizer_path: str
    """Folder with tokenizer.json."""
    num_samples: int = Field(default=512, ge=1)
    num_pics: int = Field(default=10, ge=0)
    """Pictures of each sample."""
    pic_width: int = Field(default=1024, ge=1, le=65500)
    pic_height: int = Field(default=1024, ge=1, le=65500)
    text_length: int = Field(default=16384, ge=2)
    """Tokens of question and answer together, without the template's and those of pictures; the answer has a quarter of them."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    overwrite: bool = False

    @model_validator(mode="after")
    def _sides_fit(self) -> MockOptions:
        if self.num_pics and max(self.pic_width, self.pic_height) > 200 * min(self.pic_width, self.pic_height):
            raise ValueError(f"pictures of {self.pic_width} x {self.pic_height}: sides may be to each other as 200 to 1 at most")
        return self

    @property
    def name(self) -> str:
        """File name without its ending, which the public tool uses too."""
        return f"mock_data_pic_num_{self.num_pics}_textlen_{self.text_length}"


@dataclass(frozen=True)
class Mock:
    """What was written."""

    dataset: Path
    pictures: int
    """Different ones."""


def write_mock(options: MockOptions) -> Mock:
    """Write ``<name>.json`` and the folder of its pictures into ``save_dir``.

    Raises:
        ConfigError: the tokenizer cannot be read, or knows too few words as one token.
        DataError: the dataset exists and ``overwrite`` is off.
    """
    folder = Path(options.save_dir)
    dataset, pictures = folder / f"{options.name}.json", folder / f"{options.name}_pictures"
    for path in (dataset, pictures):
        if path.exists() and not options.overwrite:
            raise DataError(f"{path}: exists already; give --overwrite to replace it, or write elsewhere")
    words = _Words(Tokenizer.from_folder(options.tokenizer_path))
    different = min(DIFFERENT_PICTURES, options.num_samples * options.num_pics)
    if different:
        with new_directory(pictures, replace=options.overwrite) as temporary:
            for number in range(different):
                picture = draw(options.pic_width, options.pic_height, options.seed, number)
                picture.save(temporary / _file_name(number), quality=JPEG_QUALITY)
    with new_file(dataset, replace=options.overwrite) as file:
        for index in range(options.num_samples):
            record = _record(options, words, index, [f"{pictures.name}/{_file_name(n)}" for n in _turn(index, options.num_pics, different)])
            file.write(("[\n" if index == 0 else ",\n").encode() + json.dumps(record).encode())
        file.write(b"\n]\n")
    return Mock(dataset, different)


def _turn(index: int, count: int, different: int) -> list[int]:
    return [(index * count + place) % different for place in range(count)]


def _file_name(number: int) -> str:
    return f"{number:04d}.jpg"


def _record(options: MockOptions, words: _Words, index: int, images: list[str]) -> dict[str, Any]:
    random = _random(options.seed, 1, index)
    answer = max(1, options.text_length // 4)
    question = words.text(options.text_length - answer, random)
    return {
        "images": images,
        "messages": [
            {"role": "user", "content": IMAGE_PLACEHOLDER * len(images) + question},
            {"role": "assistant", "content": words.text(answer, random)},
        ],
    }


class _Words:
    """Words of which a text of n words has n tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        everyday = EVERYDAY.split()
        self._words = [word for word in everyday if len(tokenizer.encode(word)) == 1 and len(tokenizer.encode(f"{word} {word}")) == 2]
        if len(self._words) < LEAST_WORDS:
            raise ConfigError(
                f"{tokenizer.where}: only {len(self._words)} of {len(everyday)} everyday English words are one token; "
                "text of an exact length cannot be made with this tokenizer"
            )

    def text(self, count: int, random: np.random.Generator) -> str:
        chosen = (random.bit_generator.random_raw(count) % len(self._words)).tolist()
        text = " ".join(self._words[number] for number in chosen)
        tokens = len(self._tokenizer.encode(text))
        if tokens != count:
            raise ConfigError(f"{self._tokenizer.where}: a text of {count} words has {tokens} tokens; this tokenizer joins words")
        return text


def draw(width: int, height: int, seed: int, number: int) -> Image.Image:
    """A picture with a gradient, shapes and grain, so that it compresses and resizes much as a photograph does."""
    import numpy as np
    from PIL import Image, ImageDraw

    random = _random(seed, 0, number)
    numbers = iter(random.bit_generator.random_raw(200).tolist())
    first, second = (np.array([next(numbers) % 256 for _ in range(3)], dtype=np.float32) for _ in range(2))
    slope = np.linspace(0, 1, width, dtype=np.float32)[None, :, None] * 0.5 + np.linspace(0, 1, height, dtype=np.float32)[:, None, None] * 0.5
    ground = first + (second - first) * slope
    grain = (random.bit_generator.random_raw(-(-width * height // 8)).view(np.uint8)[: width * height] % 17).astype(np.float32) - 8
    picture = Image.fromarray(np.clip(ground + grain.reshape(height, width, 1), 0, 255).astype(np.uint8))
    pen = ImageDraw.Draw(picture)
    for _ in range(3 + number % 6):
        left, top = next(numbers) % width, next(numbers) % height
        box = (left, top, left + 1 + next(numbers) % (width // 2 + 1), top + 1 + next(numbers) % (height // 2 + 1))
        colour = tuple(next(numbers) % 256 for _ in range(3))
        (pen.ellipse, pen.rectangle)[next(numbers) % 2](box, fill=colour)
    return picture


def _random(seed: int, kind: int, number: int) -> np.random.Generator:
    """numpy promises the raw output of its generators in every version, not what is made of it."""
    import numpy as np

    return np.random.Generator(np.random.Philox(key=np.array([seed, (kind << 40) + number], dtype=np.uint64)))
