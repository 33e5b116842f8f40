"""The batch of a comparison where the user gives none: real photographs and text, or made-up tokens for a model without tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from tangram.align.batch import IGNORE, Tensors
from tangram.config.data import PreprocessParameters
from tangram.config.model import ModelConfig
from tangram.data.collate import Collator
from tangram.data.conversation import Conversation, Message
from tangram.data.encode import EncodedSample, SampleEncoder
from tangram.data.images import ImageProcessor
from tangram.data.media import Media, Medium
from tangram.data.template import get_template
from tangram.data.tokenizer import PAD, load_tokenizer
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

PHOTO_CELLS = 24
"""Most tokens per photograph: enough for several attention windows, few enough for the logits of a large vocabulary."""

SYNTHETIC_ROWS: Sequence[tuple[tuple[tuple[int, int], ...], int, int]] = (
    (((8, 12),), 5, 4),
    ((), 9, 6),
    (((4, 4), (6, 10)), 7, 3),
    (((10, 6),), 3, 8),
)
"""Rows of the made-up batch: patches (height, width) of the images, tokens of the question, tokens of the answer."""


def with_positions(batch: Mapping[str, torch.Tensor], family: Family, model: ModelConfig) -> Tensors:
    """The batch with the family's 3-D positions, where it does not hold positions already."""
    if "position_ids" in batch:
        return dict(batch)
    positions = family.rope_index(batch["input_ids"], batch["attention_mask"], batch.get("image_grid_thw"), model)
    return {**batch, "position_ids": positions}


def synthetic_batch(family: Family, model: ModelConfig) -> Tensors:
    """Four rows of random tokens within the vocabulary: with an image, without, with two images of different size, with an image."""
    generator = torch.Generator().manual_seed(0)
    special = {model.img_context_token_id, model.video_token_id, model.vision_start_token_id}
    ordinary = torch.tensor([token for token in range(model.text_decoder.vocab_size) if token not in special])

    def words(count: int) -> list[int]:
        found: list[int] = ordinary[torch.randint(len(ordinary), (count,), generator=generator)].tolist()
        return found

    vision = model.image_encoder.vision_encoder if model.image_encoder else None
    merge = vision.spatial_merge_size**2 if vision else 1
    rows, grids = [], []
    for images, question, answer in SYNTHETIC_ROWS:
        prompt = words(2)
        for height, width in images if vision else ():
            grids.append((1, height, width))
            start = [] if model.vision_start_token_id is None else [model.vision_start_token_id]
            prompt += [*start, *[model.img_context_token_id] * (height * width // merge), *words(1)]
        rows.append((prompt + words(question), words(answer)))
    samples = [
        EncodedSample(id=number, input_ids=prompt + answer, labels=[IGNORE] * len(prompt) + answer) for number, (prompt, answer) in enumerate(rows)
    ]
    samples[0].images = [Medium(grid) for grid in grids]
    batch = Collator(family.rope_index, model, pad_id=0)([[sample] for sample in samples])
    if vision:
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        batch["pixel_values"] = torch.randn(sum(h * w for _, h, w in grids), width, generator=generator)
    return _tensors(batch)


def default_batch(hf_dir: Path, family: Family, model: ModelConfig) -> tuple[Tensors, str]:
    """The batch for a directory, and a line that says what it is.

    Raises:
        ConfigError: the directory has a tokenizer but it, the image processor or the photographs cannot be used.
    """
    if (hf_dir / "tokenizer.json").is_file():
        return photo_batch(hf_dir, family, model), f"batch: {len(PHOTO_ROWS)} conversations over photographs of scikit-image"
    made_up = f"batch: {len(SYNTHETIC_ROWS)} rows of made-up tokens and pixels, since the directory has no tokenizer.json"
    return synthetic_batch(family, model), made_up


def photo_batch(hf_dir: Path, family: Family, model: ModelConfig) -> Tensors:
    """Four conversations: with a photograph, without, with two of different size, with a photograph over two turns.

    For a model without vision encoder: those without photographs.

    Raises:
        ConfigError: scikit-image is not installed, or the directory's tokenizer or image processor does not fit the model.
    """
    images, rows = None, [row for row in PHOTO_ROWS if model.image_encoder or not row[0]]
    if model.image_encoder:
        vision = model.image_encoder.vision_encoder
        cell = (vision.patch_size * vision.spatial_merge_size) ** 2
        limits = PreprocessParameters(model_name_or_path=str(hf_dir), image_min_pixels=cell, image_max_pixels=PHOTO_CELLS * cell)
        images = ImageProcessor.from_config(limits, vision)
    tokenizer = load_tokenizer(hf_dir, model)
    media = Media(images) if images else None
    encode = SampleEncoder(tokenizer, get_template(family.template), media, cutoff=model.text_decoder.max_position_embeddings)
    samples = []
    for number, (photos, turns) in enumerate(rows):
        messages = [message for question, answer in turns for message in (Message("user", question), Message("assistant", answer))]
        paths = tuple(str(photo_folder() / name) for name in photos)
        samples.append([encode(Conversation(number, f"sample {number}", None, tuple(messages), paths))])
    return _tensors(Collator(family.rope_index, model, tokenizer.id(PAD))(samples))


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
