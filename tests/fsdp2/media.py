"""Micro-batches by what media their rows hold, of made-up tokens and pixels."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tangram.data.collate import Collator
from tangram.data.encode import IGNORE, EncodedSample
from tangram.data.medium import Grid, Medium
from tangram.families import get_family

IMAGE, OTHER_IMAGE, VIDEO = (1, 4, 6), (1, 6, 4), (2, 4, 4)
KINDS: dict[str, tuple[Grid, ...]] = {
    "text": (),
    "square": ((1, 4, 4),),
    "image": (IMAGE,),
    "images": (IMAGE, OTHER_IMAGE),
    "video": (VIDEO,),
    "both": (VIDEO, IMAGE),
}


class Rows:
    """Makes rows for the model in ``hf``, each another."""

    def __init__(self, hf: Path, seed: int = 0) -> None:
        config = json.loads((hf / "config.json").read_text())
        self.family = get_family(config["model_type"])
        self.model = self.family.from_hf_config(config)
        self.random = np.random.default_rng(seed)
        special = {self.model.img_context_token_id, self.model.video_token_id, self.model.vision_start_token_id}
        self.words = [token for token in range(self.model.text_decoder.vocab_size) if token not in special]
        self.made = 0

    def batch(self, *rows: tuple[str, int, int] | str, packing: bool = False, multiple: int = 1) -> dict[str, Any]:
        """A micro-batch.

        Args:
            rows: what a row holds (a key of ``KINDS``), tokens of its question and of its answer.
        """
        samples = [self.sample(*((row, 4, 5) if isinstance(row, str) else row)) for row in rows]
        return Collator(self.family.rope_index, self.model, 0, multiple, packing)([[sample] for sample in samples])

    def sample(self, kind: str, question: int, answer: int) -> EncodedSample:
        sample = EncodedSample(self.made, image_pixels=[], video_pixels=[])
        self.made += 1
        prompt = self._words(2)
        for grid in KINDS[kind]:
            is_image = grid[0] == 1
            prompt += self._placeholders(grid, self.model.img_context_token_id if is_image else self.model.video_token_id) + self._words(1)
            (sample.images if is_image else sample.videos).append(Medium(grid, None if is_image else 2.0))
            (sample.image_pixels if is_image else sample.video_pixels).append(self._pixels(grid))  # type: ignore[union-attr]
        prompt += self._words(question)
        learnt = self._words(answer)
        sample.input_ids, sample.labels = prompt + learnt, [IGNORE] * len(prompt) + learnt
        return sample

    def _words(self, count: int) -> list[int]:
        return [int(token) for token in self.random.choice(self.words, count)]

    def _placeholders(self, grid: Grid, token: int | None) -> list[int]:
        assert self.model.image_encoder is not None
        start = [] if self.model.vision_start_token_id is None else [self.model.vision_start_token_id]
        return [*start, *[int(token or 0)] * (math.prod(grid) // self.model.image_encoder.vision_encoder.spatial_merge_size**2)]

    def _pixels(self, grid: Grid) -> np.ndarray:
        assert self.model.image_encoder is not None
        vision = self.model.image_encoder.vision_encoder
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        return self.random.standard_normal((math.prod(grid), width)).astype(np.float32)


def unlabelled(batch: dict[str, Any]) -> dict[str, Any]:
    """The same without anything to learn."""
    return {**batch, "labels": torch.full_like(batch["labels"], IGNORE)}


def dealt(batches: Sequence[dict[str, Any]], rank: int, size: int) -> list[dict[str, Any]]:
    """A rank's part of ``batches``, which go round the ranks."""
    return list(batches[rank::size])
