"""3-D positions of rows that mix images and videos, against transformers' own on random layouts."""

from __future__ import annotations

import random

import pytest
import torch
import transformers

from tangram.families.base import get_family
from tangram.families.qwen2_vl.positions import mrope_positions
from tests.families.test_positions import CLASSES, END, IMG, START, VIDEO, config, hf_positions

TRIALS = 400
OLD = transformers.__version__.startswith("4.")
pytestmark = pytest.mark.compat


def random_row(rng: random.Random, family: str) -> tuple[list[int], list[list[int]], list[list[int]], list[float]]:
    """Tokens, image grids, video grids and seconds per frame group of one row.

    Where the two versions of transformers differ (see ``tangram.families.qwen2_vl.positions``), layouts are drawn that the installed one treats
    as we do: under 5.x no video whose time reaches beyond its rows and columns, under 4.57 whole seconds.
    """
    row = [rng.randrange(1000) for _ in range(rng.randrange(1, 6))]
    images, videos, seconds = [], [], []
    for _ in range(rng.randrange(5)):
        h, w = 2 * rng.randrange(1, 6), 2 * rng.randrange(1, 6)
        if rng.random() < 0.5:
            images.append([1, h, w])
            row += [START, *[IMG] * (h * w // 4), END]
        else:
            t, step = rng.randrange(1, 6), float(rng.randrange(1, 4)) if OLD else rng.choice([0.083, 0.5, 0.7, 1.0])
            if not OLD and family != "qwen3_vl":
                reach = max(h, w) // 2
                t = min(t, reach if family == "qwen2_vl" else int((reach - 1) / (2 * step)) + 1)
            videos.append([t, h, w])
            seconds.append(step)
            frames = t if family.startswith("qwen3") else 1
            for _ in range(frames):
                row += [rng.randrange(1000), START, *[VIDEO] * (t // frames * h * w // 4), END]
        row += [rng.randrange(1000) for _ in range(rng.randrange(4))]
    return row, images, videos, seconds


@pytest.mark.parametrize("family", CLASSES)
def test_images_and_videos_in_one_batch_stand_where_transformers_puts_them(family: str) -> None:
    rng, model = random.Random(1), config(family)
    rope_index = get_family(family).rope_index
    mixed = 0
    for trial in range(TRIALS):
        rows = [random_row(rng, family) for _ in range(rng.randrange(1, 4))]
        length = max(len(row) for row, *_ in rows) + rng.randrange(3)
        ids, mask = torch.zeros(len(rows), length, dtype=torch.long), torch.zeros(len(rows), length, dtype=torch.long)
        for index, (row, *_) in enumerate(rows):
            place = slice(length - len(row), length) if trial % 2 else slice(0, len(row))
            ids[index, place], mask[index, place] = torch.tensor(row), 1
        images, videos = ([grid for row in rows for grid in row[kind]] for kind in (1, 2))
        image_grids, video_grids = (torch.tensor(grids) if grids else None for grids in (images, videos))
        seconds = torch.tensor([step for *_, steps in rows for step in steps]) if videos else None
        ours = rope_index(ids, mask, image_grids, model, video_grids, seconds)
        timed = {"second_per_grid_ts": seconds} if family == "qwen2_5_vl" else {}
        theirs = hf_positions(family, ids, mask, image_grids, video_grid_thw=None if video_grids is None else video_grids.clone(), **timed)
        real = mask.bool()
        assert torch.equal(ours[:, real], theirs[:, real]), (trial, rows)
        mixed += bool(images) and bool(videos)
    assert mixed > TRIALS // 3


def test_times_of_long_videos_are_rounded_as_torch_rounds_them() -> None:
    """In ``(torch.arange(frames) * time_interval).long()`` of transformers the product has 32 bits; with 64 some frames come one earlier or later."""
    ids, mask, grids = torch.full((1, 400), VIDEO), torch.ones(1, 400, dtype=torch.long), torch.tensor([[400, 2, 2]])
    model = config("qwen2_5_vl")
    for step in (number / 97 * 1.7 for number in range(1, 600, 7)):
        found = mrope_positions(ids, mask, None, model, grids, [step])
        assert torch.equal(found[0, 0], (torch.arange(400) * step).long()), step
