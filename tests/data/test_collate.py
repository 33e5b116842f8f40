"""Micro-batches of padded rows and of packed rows. Numbers are worked by hand or come from the public reports that are named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram.config.model import ModelConfig
from tangram.data.collate import Collator
from tangram.data.encode import EncodedSample
from tangram.data.media import Medium
from tangram.errors import DataError
from tangram.families.base import get_family

IMAGE, VIDEO, START, END = 151655, 151656, 151652, 151653
PAD = 151643
ROPE_INDEX = get_family("qwen2_5_vl").rope_index


def sample(number: int, ids: list[int], **media: Any) -> EncodedSample:
    """Every token has a label, but those of media."""
    return EncodedSample(number, ids, [-100 if token in (IMAGE, VIDEO) else token for token in ids], **media)


def picture(number: int = 0) -> EncodedSample:
    """The twelve tokens of the report (huggingface/trl#5785): 4 x 6 patches between words."""
    return sample(number, [10, 11, START, *[IMAGE] * 6, END, 12, 13], images=[Medium((1, 4, 6))])


def film(number: int = 0, seconds: float = 1.0) -> EncodedSample:
    """The sixteen tokens of the report (huggingface/transformers#45381): 3 x 4 x 4 patches, two tokens a second."""
    return sample(number, [10, START, *[VIDEO] * 12, END, 12], videos=[Medium((3, 4, 4), seconds)])


PICTURE_TIME = [0, 1, 2, 3, 3, 3, 3, 3, 3, 6, 7, 8]
PICTURE_WIDTH = [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8]
FILM_TIME = [0, 1, 2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6, 7, 8]
FILM_HEIGHT = [0, 1, 2, 2, 3, 3, 2, 2, 3, 3, 2, 2, 3, 3, 7, 8]


def collate(model: ModelConfig, samples: list[EncodedSample], multiple: int = 1, packing: bool = True) -> dict[str, Any]:
    rows = [samples] if packing else [[one] for one in samples]
    return Collator(ROPE_INDEX, model, PAD, multiple, packing)(rows)


def test_a_packed_sample_has_the_positions_it_has_alone(model: ModelConfig) -> None:
    """hiyouga/LlamaFactory#7754: the second sample of a row got position 1 everywhere, or went on counting from the first."""
    time, height, width = collate(model, [picture(), film(), picture()])["position_ids"][:, 0].tolist()
    assert time == PICTURE_TIME + FILM_TIME + PICTURE_TIME
    assert height[12:28] == FILM_HEIGHT
    assert width[:12] == width[28:] == PICTURE_WIDTH


def test_no_token_learns_the_first_one_of_the_next_sample(model: ModelConfig) -> None:
    """NVIDIA-BioNeMo/bionemo-recipes#1449."""
    labels = collate(model, [sample(0, [0, 1, 2]), sample(1, [3, 4, 5])])["labels"]
    shifted = [*labels[0, 1:].tolist(), -100]
    assert shifted == [1, 2, -100, 4, 5, -100]
    assert int((labels[:, 1:] != -100).sum()) == 4


@pytest.mark.parametrize(("lengths", "real", "padded"), [([4, 8], [0, 4, 12], [0, 4, 12]), ([3, 5], [0, 3, 8], [0, 4, 12])])
def test_where_samples_begin_is_told_padded_or_not(model: ModelConfig, lengths: list[int], real: list[int], padded: list[int]) -> None:
    """NVIDIA-NeMo/Megatron-Bridge#4507: the padded lengths were missing where nothing had to be padded."""
    batch = collate(model, [sample(number, list(range(length))) for number, length in enumerate(lengths)], multiple=4)
    assert batch["cu_seqlens"].tolist() == real and batch["cu_seqlens_padded"].tolist() == padded
    assert batch["cu_seqlens"].dtype == batch["cu_seqlens_padded"].dtype == torch.int32
    assert batch["attention_mask"][0].tolist() == [number for length in lengths for number in [1] * length + [0] * (-length % 4)]


@pytest.mark.parametrize("packing", [False, True])
def test_all_that_is_per_token_is_padded_together(model: ModelConfig, packing: bool) -> None:
    """hiyouga/LlamaFactory#10782: 13 tokens and a multiple of 8 left positions at 13."""
    batch = collate(model, [sample(0, list(range(13)))], multiple=8, packing=packing)
    assert {name: batch[name].shape[-1] for name in ("input_ids", "labels", "attention_mask", "position_ids")} == dict.fromkeys(
        ("input_ids", "labels", "attention_mask", "position_ids"), 16
    )
    assert batch["input_ids"][0, 13:].tolist() == [PAD] * 3 and batch["labels"][0, 13:].tolist() == [-100] * 3
    assert ("cu_seqlens" in batch) == packing


def test_rows_without_packing_are_as_long_as_the_longest(model: ModelConfig) -> None:
    batch = collate(model, [picture(4), film(9)], multiple=1, packing=False)
    assert batch["input_ids"].shape == (2, 16) and batch["position_ids"].shape == (3, 2, 16)
    assert batch["position_ids"][0].tolist() == [PICTURE_TIME + [1] * 4, FILM_TIME]
    assert batch["labels"][0, 0] == 10 and batch["sample_ids"] == [4, 9]


def test_media_stand_in_the_order_of_their_tokens(model: ModelConfig) -> None:
    def patches(count: int, value: float) -> np.ndarray:
        return np.full((count, 2), value, dtype=np.float32)

    both = sample(7, [START, *[IMAGE] * 1, START, *[VIDEO] * 2, START, *[IMAGE] * 2, 5])
    both.images, both.videos = [Medium((1, 2, 2)), Medium((1, 2, 4))], [Medium((2, 2, 2), 0.5)]
    both.image_pixels, both.video_pixels = [patches(4, 1.0), patches(8, 2.0)], [patches(8, 3.0)]
    text = EncodedSample(8, [1, 2], [1, 2], image_pixels=[], video_pixels=[])
    clip = film(9, seconds=2.0)
    clip.image_pixels, clip.video_pixels = [], [patches(48, 4.0)]
    for packing in (False, True):
        batch = collate(model, [both, text, clip], packing=packing)
        assert batch["image_grid_thw"].tolist() == [[1, 2, 2], [1, 2, 4]] and batch["video_grid_thw"].tolist() == [[2, 2, 2], [3, 4, 4]]
        assert batch["pixel_values"][:, 0].tolist() == [1.0] * 4 + [2.0] * 8
        assert batch["pixel_values_videos"][:, 1].tolist() == [3.0] * 8 + [4.0] * 48
        assert batch["second_per_grid_ts"].tolist() == [0.5, 2.0] and batch["second_per_grid_ts"].dtype == torch.float32
        assert batch["pixel_values"].dtype == torch.float32 and batch["video_grid_thw"].dtype == torch.int64
        assert batch["position_ids"][0, -1, -14:-2].tolist() == [2] * 4 + [6] * 4 + [10] * 4, "two seconds are four positions"
        assert batch["sample_ids"] == [7, 8, 9]


def test_a_micro_batch_without_media_or_without_pixels_holds_none(model: ModelConfig) -> None:
    text = collate(model, [sample(0, [1])])
    assert not {"image_grid_thw", "pixel_values", "video_grid_thw", "pixel_values_videos", "second_per_grid_ts"} & text.keys()
    headers = collate(model, [picture(), film()])
    assert "image_grid_thw" in headers and "video_grid_thw" in headers
    assert "pixel_values" not in headers and "pixel_values_videos" not in headers


def test_packing_lays_the_samples_of_all_rows_in_one(model: ModelConfig) -> None:
    """So ``micro_batch_size`` rows of one micro-batch cost what they cost unpacked, and no row is padded to another."""
    collator = Collator(ROPE_INDEX, model, PAD, 4, packing=True)
    one, two = collator([[picture(0), sample(1, [1, 2, 3])], [film(2)]]), collator([[picture(0), sample(1, [1, 2, 3]), film(2)]])
    assert one["input_ids"].shape == (1, 32) and one["cu_seqlens_padded"].tolist() == [0, 12, 16, 32]
    assert all(torch.equal(one[name], two[name]) if torch.is_tensor(one[name]) else one[name] == two[name] for name in two)


def test_several_samples_in_a_row_are_not_taken_for_rows(model: ModelConfig) -> None:
    with pytest.raises(AssertionError, match="need packing=True"):
        Collator(ROPE_INDEX, model, PAD)([[picture(), picture()]])


@pytest.mark.parametrize("packing", [False, True])
def test_media_that_do_not_fit_their_tokens_are_refused_by_sample(model: ModelConfig, packing: bool) -> None:
    """hiyouga/LlamaFactory#6844."""
    cut = sample(31, [10, 11, START, *[IMAGE] * 4], images=[Medium((1, 4, 6))])
    with pytest.raises(DataError, match="^sample 31: .* 4 image tokens but its 1 image grids need 6"):
        collate(model, [picture(), cut], packing=packing)


@st.composite
def samples(draw: st.DrawFn) -> list[EncodedSample]:
    found = []
    for number in range(draw(st.integers(1, 5))):
        ids = draw(st.lists(st.integers(0, 999), min_size=1, max_size=9))
        images, videos = [], []
        for kind in draw(st.lists(st.sampled_from([IMAGE, VIDEO]), max_size=3)):
            steps = draw(st.integers(1, 3)) if kind == VIDEO else 1
            grid = (steps, 2 * draw(st.integers(1, 3)), 2 * draw(st.integers(1, 3)))
            (videos if kind == VIDEO else images).append(Medium(grid, draw(st.sampled_from([0.25, 0.5, 1.7])) if kind == VIDEO else None))
            ids += [START, *[kind] * (grid[0] * grid[1] * grid[2] // 4), END, *draw(st.lists(st.integers(0, 999), max_size=4))]
        learnt = draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
        labels = [token if token < 1000 and wanted else -100 for token, wanted in zip(ids, learnt, strict=True)]
        found.append(EncodedSample(number, ids, labels, images, videos))
    return found


@settings(max_examples=40, deadline=None)
@given(drawn=samples(), multiple=st.sampled_from([1, 2, 3, 8]), cut=st.integers(0, 5))
def test_packed_and_padded_hold_the_same_tokens_labels_and_positions(model: ModelConfig, drawn: list[EncodedSample], multiple: int, cut: int) -> None:
    rows = [part for part in (drawn[:cut], drawn[cut:]) if part]
    packed = Collator(ROPE_INDEX, model, PAD, multiple, packing=True)(rows)
    padded = Collator(ROPE_INDEX, model, PAD, multiple)([[one] for one in drawn])
    assert packed.keys() - padded.keys() == {"cu_seqlens", "cu_seqlens_padded"}
    starts, real = packed["cu_seqlens_padded"].tolist(), packed["cu_seqlens"].tolist()
    width = packed["input_ids"].shape[1]
    assert starts[-1] == width and width % multiple == 0 and len(starts) == len(real) == len(drawn) + 1
    seen = torch.zeros(width, dtype=torch.bool)
    for number, one in enumerate(drawn):
        length, start = len(one.input_ids), starts[number]
        assert real[number + 1] - real[number] == length and start % multiple == 0 and 0 <= starts[number + 1] - start - length < multiple
        here = slice(start, start + length)
        seen[here] = True
        assert packed["input_ids"][0, here].tolist() == padded["input_ids"][number, :length].tolist() == one.input_ids
        assert packed["labels"][0, here].tolist() == [-100, *one.labels[1:]] and padded["labels"][number, :length].tolist() == one.labels
        assert torch.equal(packed["position_ids"][:, 0, here], padded["position_ids"][:, number, :length])
        assert packed["position_ids"][:, 0, start].tolist() == [0, 0, 0]
    assert packed["attention_mask"][0].bool().equal(seen) and int(padded["attention_mask"].sum()) == int(seen.sum())
    assert (packed["labels"][0, ~seen] == -100).all() and (packed["input_ids"][0, ~seen] == PAD).all()
    for name in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts"):
        assert (name in packed) == (name in padded) and (name not in packed or torch.equal(packed[name], padded[name]))
