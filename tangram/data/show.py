"""A sample as the model gets it: tokens, labels, positions, and the pictures after resizing and cropping."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from tangram.data.collate import Collator
from tangram.data.encode import IGNORE
from tangram.data.media import Media, Medium
from tangram.data.subject import Encoding, Subject
from tangram.data.tokenizer import Tokenizer
from tangram.errors import ConfigError, DataError

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

    from tangram.config.model import VisionEncoderConfig

Position = tuple[int, int, int]
"""Time, height, width."""

HALF_A_CHARACTER = "\ufffd"
LONGEST_CHARACTER = 4
"""Bytes, and so tokens at most, of one character."""


@dataclass(frozen=True)
class Token:
    id: int
    text: str
    """Empty where the token is a part of a character that a later one ends."""
    learnt: bool
    medium: int | None
    """Number of the image or video, among ``SampleView.media``, that it stands for a part of."""
    position: Position


@dataclass(frozen=True)
class MediumView:
    """An image or a video."""

    kind: str
    path: str
    grid: tuple[int, int, int]
    """Patches along time, height and width, before merging."""
    cell: int
    """Side of what one token stands for, pixels."""
    places: tuple[int, ...]
    """Of its tokens, in raster order of the cells, step after step of the time axis."""
    pictures: tuple[Image.Image, ...]
    """What the vision encoder sees: one of an image, of a video the first frame of each step."""


@dataclass(frozen=True)
class Run:
    """Neighbours that are all learnt or all not, of one medium or of none."""

    start: int
    tokens: tuple[Token, ...]

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    @property
    def places(self) -> str:
        return as_range(self.start, self.stop - 1)

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)

    @property
    def positions(self) -> str:
        """Range of each axis; one where they are alike."""
        axes = [as_range(min(axis), max(axis)) for axis in zip(*(token.position for token in self.tokens), strict=True)]
        return axes[0] if len(set(axes)) == 1 else " ".join(f"{name} {axis}" for name, axis in zip("thw", axes, strict=True))


def as_range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


@dataclass(frozen=True)
class SampleView:
    """All there is to show of one sample."""

    id: int
    where: str
    tokens: tuple[Token, ...]
    media: tuple[MediumView, ...]
    turns_dropped: int

    @property
    def learnt(self) -> int:
        return sum(token.learnt for token in self.tokens)

    @property
    def positions(self) -> int:
        """One more than the highest, on any axis."""
        return 1 + max(max(token.position) for token in self.tokens)

    def runs(self) -> Iterator[Run]:
        """The tokens, joined where they are alike."""
        start = 0
        for _, group in groupby(self.tokens, key=lambda token: (token.learnt, token.medium)):
            run = Run(start, tuple(group))
            yield run
            start = run.stop


def view_sample(subject: Subject, index: int) -> SampleView:
    """Encode sample ``index``.

    Raises:
        ConfigError: no tokenizer was given.
        DataError: there is no such sample, or it cannot be used.
    """
    import numpy as np

    encoding, dataset = subject.encoding, subject.dataset
    if encoding is None:
        raise ConfigError("tokens need a tokenizer: give --tokenizer HF, or --config FILE with a run file or data.json")
    if not 0 <= index < len(dataset):
        raise DataError(f"sample {index}: the dataset has {len(dataset)} samples, 0 to {len(dataset) - 1}")
    sample = dataset[index]
    encoded = encoding.encoder(sample)
    collator = Collator(encoding.family.rope_index, encoding.model, encoding.encoder.tokenizer.pad_id)
    positions = [tuple(values) for values in collator([[encoded]])["position_ids"][:, 0].T.tolist()]
    owners = _owners(encoding, encoded.input_ids, encoded.images, encoded.videos)
    texts = token_texts(encoding.encoder.tokenizer, encoded.input_ids)
    learnt = [label != IGNORE for label in encoded.labels]
    tokens = tuple(Token(*values) for values in zip(encoded.input_ids, texts, learnt, owners, positions, strict=True))
    paths = [*sample.images[: len(encoded.images)], *(_name(video.paths) for video in sample.videos[: len(encoded.videos)])]
    pixels = [np.asarray(patches) for patches in (*(encoded.image_pixels or ()), *(encoded.video_pixels or ()))]
    kinds = ["image"] * len(encoded.images) + ["video"] * len(encoded.videos)
    media = _views(encoding, list(zip(kinds, paths, [*encoded.images, *encoded.videos], pixels, strict=True)), owners)
    return SampleView(sample.id, sample.where, tokens, media, encoded.turns_dropped)


def _name(paths: Sequence[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Text of each token; of a character that several tokens make up, the last of them has it and the others are empty."""
    texts: list[str] = []
    pending: list[int] = []
    for token in ids:
        pending.append(token)
        text = tokenizer.decode(pending)
        whole = not text.endswith(HALF_A_CHARACTER) or len(pending) == LONGEST_CHARACTER
        texts.append(text if whole else "")
        pending = [] if whole else pending
    if pending:
        texts[-1] = tokenizer.decode(pending)
    return texts


def _owners(encoding: Encoding, ids: Sequence[int], images: Sequence[Medium], videos: Sequence[Medium]) -> list[int | None]:
    """Which medium each token stands for a part of: images are counted first, then videos."""
    media, model = encoding.encoder.media, encoding.model
    owners: list[int | None] = [None] * len(ids)
    if media is None:
        return owners
    for token, first, of_kind in ((model.img_context_token_id, 0, images), (model.video_token_id, len(images), videos)):
        numbers = iter([first + number for number, medium in enumerate(of_kind) for _ in range(media.tokens(medium))])
        for place in (place for place, found in enumerate(ids) if found == token):
            owners[place] = next(numbers)
    return owners


def _views(encoding: Encoding, media: Sequence[tuple[str, str, Medium, np.ndarray]], owners: Sequence[int | None]) -> tuple[MediumView, ...]:
    if not media:
        return ()
    encoder = encoding.model.image_encoder
    assert encoder is not None and encoding.encoder.media is not None, "a sample with media was encoded"
    vision = encoder.vision_encoder
    black, white = _ends(encoding.encoder.media)
    views = []
    for number, (kind, path, medium, pixels) in enumerate(media):
        pictures = _pictures(pixels, medium.grid, vision, black, white)
        places = tuple(place for place, owner in enumerate(owners) if owner == number)
        views.append(MediumView(kind, path, medium.grid, vision.patch_size * vision.spatial_merge_size, places, pictures))
    return tuple(views)


def _ends(media: Media) -> tuple[np.ndarray, np.ndarray]:
    """What black and white become, ``[channels]`` each: found by asking, since every processor has its own numbers."""
    from PIL import Image

    found = []
    with TemporaryDirectory() as folder:
        for level in (0, 255):
            path = Path(folder, f"{level}.png")
            Image.new("RGB", (64, 64), (level, level, level)).save(path)
            found.append(media.image_pixels(str(path), "").expand()[0].reshape(3, -1)[:, 0])
    return found[0], found[1]


def _pictures(
    pixels: np.ndarray, grid: tuple[int, int, int], vision: VisionEncoderConfig, black: np.ndarray, white: np.ndarray
) -> tuple[Image.Image, ...]:
    """Patches back to pictures: the first frame of each step of the time axis.

    Args:
        pixels: ``[t * h * w, C * T * P * P]`` in merge order.
    """
    import numpy as np
    from PIL import Image

    (steps, rows, columns), patch, merge = grid, vision.patch_size, vision.spatial_merge_size
    cells = pixels.reshape(steps, rows // merge, columns // merge, merge, merge, 3, -1, patch, patch)[:, :, :, :, :, :, 0]
    frames = cells.transpose(0, 1, 3, 6, 2, 4, 7, 5).reshape(steps, rows * patch, columns * patch, 3)
    levels = np.rint((frames - black) / (white - black) * 255).clip(0, 255).astype(np.uint8)
    return tuple(Image.fromarray(frame) for frame in levels)
