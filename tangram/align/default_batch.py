"""The batch of a comparison where the user gives none: real photographs and text, or made-up tokens for a model without tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from tangram.align.batch import IGNORE, KINDS, Tensors
from tangram.config.data import PreprocessParameters
from tangram.config.model import ModelConfig
from tangram.data.collate import Collator
from tangram.data.conversation import Conversation, Message
from tangram.data.encode import EncodedSample, SampleEncoder
from tangram.data.images import Grid, ImageProcessor
from tangram.data.media import Media, Medium
from tangram.data.template import get_template
from tangram.data.tokenizer import load_tokenizer
from tangram.errors import ConfigError
from tangram.families.base import Family

PHOTO_ROWS: Sequence[tuple[tuple[str, ...], tuple[tuple[str, str], ...]]] = (
    (("rocket.jpg",), (("<image>What stands on the launch pad?", "A tall white rocket, lit against the evening sky."),)),
    ((), (("Name the three primary colours of light.", "Red, green and blue."),)),
    (
        ("astronaut.png", "coffee.png"),
        (("<image><image>Which picture shows a person?", "The first one: an astronaut in an orange suit. The second shows a cup of coffee."),),
    ),
    (
        ("chelsea.png",),
        (("<image>Which animal is this?", "A cat."), ("What is its fur like?", "Ginger and striped, with long white whiskers.")),
    ),
)
"""Rows of the batch for a model with a tokenizer: photographs, then questions and answers."""

PAN_ROW = ("rocket.jpg", ("<image>What does the camera do?", "It moves down, from the sky to the launch pad."))
"""The row with a video, for a model that has them: the photograph that the camera moves over, and what is asked and answered."""

PHOTO_CELLS = 24
"""Most tokens per photograph: enough for several attention windows, few enough for the logits of a large vocabulary."""

STEPS, SECONDS = 2, 2.0
"""Steps of the video's time axis, and seconds from one to the next. More of either, and its time would reach further than its columns: there
transformers 4.57 and 5 place the text after it differently."""

SyntheticRow = tuple[tuple[Grid, ...], int, int]
"""Patches (time, height, width) of the media, where more than one step is a video, tokens of the question, tokens of the answer."""

SYNTHETIC_ROWS: Sequence[SyntheticRow] = (
    (((1, 8, 12),), 5, 4),
    ((), 9, 6),
    (((1, 4, 4), (1, 6, 10)), 7, 3),
    (((1, 10, 6),), 3, 8),
    (((STEPS, 4, 10), (1, 4, 4)), 4, 5),
)
"""Rows of the made-up batch: with an image, without, with two images of different size, with an image, with a video and an image."""


def with_positions(batch: Mapping[str, torch.Tensor], family: Family, model: ModelConfig) -> Tensors:
    """The batch with the family's 3-D positions, where it does not hold positions already."""
    if "position_ids" in batch:
        return dict(batch)
    videos = (batch.get("video_grid_thw"), batch.get("second_per_grid_ts"))
    positions = family.rope_index(batch["input_ids"], batch["attention_mask"], batch.get("image_grid_thw"), model, *videos)
    return {**batch, "position_ids": positions}


def synthetic_batch(family: Family, model: ModelConfig, rows: Sequence[SyntheticRow] = SYNTHETIC_ROWS) -> Tensors:
    """Rows of random tokens within the vocabulary and random pixels; for a model without videos those without videos."""
    generator = torch.Generator().manual_seed(0)
    special = {model.img_context_token_id, model.video_token_id, model.vision_start_token_id}
    ordinary = torch.tensor([token for token in range(model.text_decoder.vocab_size) if token not in special])

    def words(count: int) -> list[int]:
        found: list[int] = ordinary[torch.randint(len(ordinary), (count,), generator=generator)].tolist()
        return found

    samples, chosen = [], [row for row in rows if has_videos(model) or all(steps == 1 for steps, _, _ in row[0])]
    for number, (grids, question, answer) in enumerate(chosen):
        sample, prompt = EncodedSample(number), words(2)
        for grid in [fixed_grid(model) or grid for grid in grids] if model.image_encoder else ():
            prompt += _placeholders(model, grid) + words(1)
            if grid[0] == 1:
                sample.images.append(Medium(grid))
            else:
                sample.videos.append(Medium(grid, SECONDS))
        prompt, learnt = prompt + words(question), words(answer)
        sample.input_ids, sample.labels = prompt + learnt, [IGNORE] * len(prompt) + learnt
        samples.append([sample])
    batch = Collator(family.rope_index, model, pad_id=0)(samples)
    for kind in KINDS:
        if kind.grids in batch:
            assert model.image_encoder is not None
            vision = model.image_encoder.vision_encoder
            batch[kind.pixels] = torch.randn(int(batch[kind.grids].prod(dim=1).sum()), vision.patch_width, generator=generator)
    return _tensors(batch)


def fixed_grid(model: ModelConfig) -> Grid | None:
    """The grid of all pictures of a tower that takes one size; None: it takes many."""
    return model.image_encoder.vision_encoder.picture_grid if model.image_encoder else None


def has_videos(model: ModelConfig) -> bool:
    return model.image_encoder is not None and model.video_token_id is not None


def _placeholders(model: ModelConfig, grid: Grid) -> list[int]:
    """The tokens that stand for an image or video of that grid."""
    assert model.image_encoder is not None
    start = [] if model.vision_start_token_id is None else [model.vision_start_token_id]
    token_id = model.img_context_token_id if grid[0] == 1 else model.video_token_id
    assert token_id is not None
    return [*start, *[token_id] * model.image_encoder.vision_encoder.tokens(grid)]


def default_batch(hf_dir: Path, family: Family, model: ModelConfig) -> tuple[Tensors, str]:
    """The batch for a directory, and a line that says what it is.

    Raises:
        ConfigError: the directory has a tokenizer but it, the image processor or the photographs cannot be used.
    """
    if (hf_dir / "tokenizer.json").is_file():
        batch = photo_batch(hf_dir, family, model)
        return batch, f"batch: {len(batch['input_ids'])} conversations over photographs of scikit-image"
    batch = synthetic_batch(family, model)
    return batch, f"batch: {len(batch['input_ids'])} rows of made-up tokens and pixels, since the directory has no tokenizer.json"


def photo_batch(hf_dir: Path, family: Family, model: ModelConfig) -> Tensors:
    """Conversations: with a photograph, without, with two of different size, with a photograph over two turns, and where the model has
    videos, with one in which the camera moves over a photograph.

    For a model without vision encoder: those without photographs.

    Raises:
        ConfigError: scikit-image is not installed, or the directory's tokenizer or image processor does not fit the model.
    """
    rows = [row for row in PHOTO_ROWS if model.image_encoder or not row[0]]
    media = None
    if model.image_encoder and fixed_grid(model):
        media = Media.from_config(PreprocessParameters(model_name_or_path=str(hf_dir)), model.image_encoder.vision_encoder)
    elif model.image_encoder:
        vision = model.image_encoder.vision_encoder
        cell = (vision.patch_size * vision.spatial_merge_size) ** 2
        limits = PreprocessParameters(model_name_or_path=str(hf_dir), image_min_pixels=cell, image_max_pixels=PHOTO_CELLS * cell)
        images = ImageProcessor.from_config(limits, vision)
        media = Media(images)
    tokenizer = load_tokenizer(hf_dir, model)
    encode = SampleEncoder(tokenizer, get_template(family.template), media, cutoff=model.text_decoder.max_position_embeddings)

    def encoded(number: int, photos: Sequence[str], turns: Sequence[tuple[str, str]]) -> EncodedSample:
        messages = [message for question, answer in turns for message in (Message("user", question), Message("assistant", answer))]
        paths = tuple(str(photo_folder() / name) for name in photos)
        return encode(Conversation(number, f"sample {number}", None, tuple(messages), paths))

    samples = [encoded(number, photos, turns) for number, (photos, turns) in enumerate(rows)]
    if has_videos(model):
        photo, turn = PAN_ROW
        samples.append(panned(encoded(len(samples), [photo], [turn]), model))
    return _tensors(Collator(family.rope_index, model, tokenizer.pad_id)([[sample] for sample in samples]))


def panned(sample: EncodedSample, model: ModelConfig) -> EncodedSample:
    """A sample with one photograph as one with a video: at each step the camera has moved down by a row of cells."""
    import numpy as np

    assert model.image_encoder is not None and sample.image_pixels is not None and model.video_token_id is not None
    (photo,), (patches,) = sample.images, sample.image_pixels
    _, rows, columns = photo.grid
    row_of_cells = columns * model.image_encoder.vision_encoder.spatial_merge_size
    start, count = sample.input_ids.index(model.img_context_token_id), sample.input_ids.count(model.img_context_token_id)

    def replaced(values: list[int], placeholder: int) -> list[int]:
        return values[:start] + [placeholder] * count * STEPS + values[start + count :]

    return EncodedSample(
        sample.id,
        replaced(sample.input_ids, model.video_token_id),
        replaced(sample.labels, IGNORE),
        videos=[Medium((STEPS, rows, columns), SECONDS)],
        image_pixels=[],
        video_pixels=[np.concatenate([np.roll(np.asarray(patches), -step * row_of_cells, axis=0) for step in range(STEPS)])],
    )


def photo_folder() -> Path:
    """Folder of the photographs that come with scikit-image.

    Raises:
        ConfigError: it is not installed.
    """
    # find_spec, not import: scikit-image takes a second to import.
    found = find_spec("skimage")
    if found is None or not found.submodule_search_locations:
        raise ConfigError("the sample photographs come with scikit-image, which is not installed: pip install scikit-image, or give --batch")
    return Path(found.submodule_search_locations[0]) / "data"


def _tensors(batch: Mapping[str, Any]) -> Tensors:
    return {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
