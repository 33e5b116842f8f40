from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tangram.align.batch import IMAGES, VIDEOS, blank_like, check_batch, media_per_row, micro_batches, read_batch, write_batch
from tangram.align.pack import MULTIPLE, by_rows, pack_rows
from tangram.config.model import ModelConfig
from tangram.data.collate import Collator
from tangram.data.encode import EncodedSample
from tangram.data.media import Medium
from tangram.errors import DataError
from tangram.families.base import get_family

IMAGE, VIDEO, START = 61, 62, 60
WIDTH = 3 * 2 * 14 * 14


@pytest.fixture(scope="module")
def model() -> ModelConfig:
    text = {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_theta": 1e4,
        "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
    }
    vision = {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "in_channels": 3,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2,
        "hidden_act": "silu",
    }
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START}
    return get_family("qwen2_5_vl").from_hf_config({"model_type": "qwen2_5_vl", "text_config": text, "vision_config": vision, **ids})


def example() -> dict[str, torch.Tensor]:
    """Three rows: one image of 2 x 4 patches (2 tokens), no image, two images of 2 x 2 (1 token each)."""
    ids = torch.tensor([[1, START, IMAGE, IMAGE, 2, 3], [4, 5, 6, 7, 0, 0], [START, IMAGE, START, IMAGE, 8, 0]])
    labels = torch.full_like(ids, -100)
    labels[0, 5], labels[1, 2:4], labels[2, 4] = 3, torch.tensor([6, 7]), 8
    return {
        "input_ids": ids,
        "labels": labels,
        "attention_mask": torch.tensor([[1] * 6, [1] * 4 + [0] * 2, [1] * 5 + [0]]),
        "position_ids": torch.arange(6).expand(3, 3, 6).contiguous(),
        "pixel_values": torch.arange(16.0)[:, None].expand(16, WIDTH).contiguous(),
        "image_grid_thw": torch.tensor([[1, 2, 4], [1, 2, 2], [1, 2, 2]]),
    }


def test_a_batch_survives_the_file(tmp_path: Path, model: ModelConfig):
    path = write_batch(example(), tmp_path)
    read = read_batch(path, model)
    assert read.keys() == example().keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in example().items())


def test_integers_of_any_width_and_pixels_of_any_precision_are_read(tmp_path: Path, model: ModelConfig):
    narrow = {k: v.half() if k == "pixel_values" else v.int() for k, v in example().items()}
    read = read_batch(write_batch(narrow, tmp_path), model)
    assert read["input_ids"].dtype == torch.int64 and read["pixel_values"].dtype == torch.float32


def with_videos() -> dict[str, torch.Tensor]:
    """The example and a row before it: a video of 2 x 2 x 4 patches (4 tokens) and one of 3 x 2 x 2 (3 tokens)."""
    row = torch.tensor([[START, *[VIDEO] * 4, START, *[VIDEO] * 3]])
    fills = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    wide = {name: torch.nn.functional.pad(example()[name], (0, 3), value=fill) for name, fill in fills.items()}
    batch = {**example(), "video_grid_thw": torch.tensor([[2, 2, 4], [3, 2, 2]]), "second_per_grid_ts": torch.tensor([0.5, 2.0])}
    batch["pixel_values_videos"] = torch.arange(100.0, 128.0)[:, None].expand(28, WIDTH).contiguous()
    batch["input_ids"] = torch.cat([row, wide["input_ids"]])
    batch["labels"] = torch.cat([torch.full_like(row, -100), wide["labels"]])
    batch["attention_mask"] = torch.cat([torch.ones_like(row), wide["attention_mask"]])
    batch["position_ids"] = torch.arange(9).expand(3, 4, 9).contiguous()
    return batch


def test_media_belong_to_rows_by_their_placeholders(model: ModelConfig):
    assert media_per_row(example(), model, IMAGES) == [1, 0, 2] and media_per_row(example(), model, VIDEOS) == [0, 0, 0]
    assert media_per_row(with_videos(), model, IMAGES) == [0, 1, 0, 2] and media_per_row(with_videos(), model, VIDEOS) == [2, 0, 0, 0]


def test_videos_survive_the_file_and_go_with_their_rows(tmp_path: Path, model: ModelConfig):
    path = write_batch(with_videos(), tmp_path)
    read = read_batch(path, model)
    assert read.keys() == with_videos().keys() and all(torch.equal(read[name], tensor) for name, tensor in with_videos().items())
    first, second = micro_batches(read, model, 1)[:2]
    assert first["video_grid_thw"].tolist() == [[2, 2, 4], [3, 2, 2]] and first["second_per_grid_ts"].tolist() == [0.5, 2.0]
    assert first["pixel_values_videos"][:, 0].tolist() == list(range(100, 128)) and "pixel_values" not in first
    assert not {"video_grid_thw", "pixel_values_videos", "second_per_grid_ts"} & second.keys() and len(second["pixel_values"]) == 8


def test_padding_on_the_left_stays_and_labels_begin_after_the_first_token(model: ModelConfig):
    batch = example()
    for name in ("input_ids", "labels", "attention_mask"):
        batch[name][1] = batch[name][1].roll(2)
    check_batch(batch, model, "the file")
    (alone,) = micro_batches(batch, model, 1)[1:2]
    assert alone["attention_mask"].tolist() == [[0, 0, 1, 1, 1, 1]] and alone["input_ids"].tolist() == [[0, 0, 4, 5, 6, 7]]
    batch["labels"][1, 2] = 4
    with pytest.raises(DataError, match=r"labels supervise the first token of row 1 \(column 2\), which follows padding"):
        check_batch(batch, model, "the file")


def test_micro_batches_are_as_long_as_their_longest_row_and_take_their_images(model: ModelConfig):
    first, second = micro_batches(example(), model, 2)
    assert first["input_ids"].shape == (2, 6) and second["input_ids"].shape == (1, 5)
    assert first["position_ids"].shape == (3, 2, 6) and second["position_ids"].shape == (3, 1, 5)
    assert first["image_grid_thw"].tolist() == [[1, 2, 4]] and second["image_grid_thw"].tolist() == [[1, 2, 2], [1, 2, 2]]
    assert first["pixel_values"][:, 0].tolist() == list(range(8)) and second["pixel_values"][:, 0].tolist() == list(range(8, 16))
    assert first["sample_ids"] == [0, 1] and second["sample_ids"] == [2]
    alone = micro_batches(example(), model, 1)[1]
    assert "pixel_values" not in alone and alone["input_ids"].tolist() == [[4, 5, 6, 7]]


def samples() -> list[EncodedSample]:
    """An image between words, text alone with a label on its first token, a video of two steps and an image."""
    pixels = np.arange(64 * WIDTH, dtype=np.float32).reshape(64, WIDTH)
    return [
        EncodedSample(0, [1, START, IMAGE, IMAGE, 2, 3], [-100] * 5 + [3], [Medium((1, 2, 4))], image_pixels=[pixels[:8]], video_pixels=[]),
        EncodedSample(1, [4, 5, 6, 7], [4, 5, -100, 7], image_pixels=[], video_pixels=[]),
        EncodedSample(
            2,
            [START, *[VIDEO] * 4, 9, START, IMAGE, 8],
            [-100] * 8 + [8],
            [Medium((1, 2, 2))],
            [Medium((2, 2, 4), 2.0)],
            image_pixels=[pixels[8:12]],
            video_pixels=[pixels[12:28]],
        ),
    ]


@pytest.mark.parametrize("side", ["right", "left"])
def test_rows_are_packed_as_the_collator_packs_samples(model: ModelConfig, side: str) -> None:
    rope_index = get_family("qwen2_5_vl").rope_index
    apart, wanted = Collator(rope_index, model, 0), Collator(rope_index, model, 0, pad_to_multiple_of=MULTIPLE, packing=True)
    batch, expected = apart([[one] for one in samples()]), wanted([samples()])
    shifts = [0, 5, 0] if side == "left" else [0, 0, 0]
    for name in ("input_ids", "labels", "attention_mask", "position_ids"):
        batch[name] = torch.stack([batch[name].select(-2, row).roll(shift, -1) for row, shift in enumerate(shifts)], dim=-2)
    packed = pack_rows(batch)
    assert packed.pop("sample_ids") == [3, 4, 5] and packed.pop("first_columns") == shifts and expected.pop("sample_ids") == [0, 1, 2]
    assert packed.keys() == expected.keys() and packed["cu_seqlens_padded"].tolist() == [0, 8, 12, 24]
    real = expected["attention_mask"].bool()
    assert torch.equal(packed.pop("position_ids")[:, real], expected.pop("position_ids")[:, real]), "those of padding mean nothing"
    assert all(packed[name].dtype == tensor.dtype and torch.equal(packed[name], tensor) for name, tensor in expected.items())


def test_logits_of_a_packed_row_go_back_to_the_columns_of_its_samples(model: ModelConfig) -> None:
    batch = Collator(get_family("qwen2_5_vl").rope_index, model, 0)([[one] for one in samples()])
    for name in ("input_ids", "labels", "attention_mask"):
        batch[name][1] = batch[name][1].roll(2)
    packed = pack_rows(batch)
    found = dict(by_rows(packed, packed["input_ids"][..., None].float(), 9))
    assert {row: logits[0, :, 0].int().tolist() for row, logits in found.items()} == {3 + row: batch["input_ids"][row].tolist() for row in range(3)}
    assert not list(by_rows(blank_like(packed), packed["input_ids"][..., None].float(), 9))
    plain = micro_batches(batch, model, 3)[0]
    ((first, logits),) = by_rows(plain, torch.ones(3, 9, 5), 11)
    assert first == 0 and logits.shape == (3, 11, 5) and not logits[:, 9:].any()


def test_a_blank_micro_batch_supervises_nothing(model: ModelConfig):
    part = micro_batches(example(), model, 3)[0]
    blank = blank_like(part)
    assert (blank["labels"] == -100).all() and torch.equal(blank["input_ids"], part["input_ids"]) and blank["sample_ids"] == []
    assert (part["labels"] != -100).any()


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"labels": torch.zeros(3, 5, dtype=torch.long)}, r"labels has shape \(3, 5\); input_ids of shape \(3, 6\) needs \(3, 6\)"),
    ({"position_ids": torch.zeros(3, 6, dtype=torch.long)}, r"position_ids has shape \(3, 6\); .* needs \(3, 3, 6\)"),
    ({"labels": torch.full((3, 6), -100)}, "labels supervise no token"),
    ({"labels": torch.full((3, 6), 64)}, "labels holds ids 64 to 64, but the vocabulary is 0 to 63"),
    ({"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1]] * 3)}, "must be 1 for the tokens of a row, which follow one another, and 0 for padding"),
    ({"attention_mask": torch.full((3, 6), 2)}, "attention_mask must be 1 for the tokens"),
    ({"labels": torch.full((3, 6), 5)}, "labels supervise padding"),
    ({"image_grid_thw": None}, "pixel_values and image_grid_thw belong together"),
    ({"pixel_values": torch.zeros(15, WIDTH)}, r"pixel_values has shape \(15, 1176\); .* need \(16, 1176\)"),
    ({"image_grid_thw": torch.tensor([[1, 2, 2], [1, 2, 4], [1, 2, 2]])}, "row 0 has 2 image placeholders but its images make 3 tokens"),
    (
        {"image_grid_thw": torch.tensor([[1, 2, 4], [1, 2, 2]]), "pixel_values": torch.zeros(12, WIDTH)},
        "row 2 has 2 image placeholders but its images make 1",
    ),
    (
        {"input_ids": torch.tensor([[1, START, IMAGE, IMAGE, 2, 3], [4, 5, 6, 7, 0, 0], [4, 5, 6, 7, 8, 0]])},
        "3 images but the placeholders in input_ids belong to 1",
    ),
    (
        {"input_ids": torch.tensor([[1, START, IMAGE, IMAGE, 2, 3], [4, VIDEO, 6, 7, 0, 0], [START, IMAGE, START, IMAGE, 8, 0]])},
        "row 1 has 1 video placeholders but its videos make 0 tokens",
    ),
    ({"video_grid_thw": torch.tensor([[2, 2, 2]])}, "pixel_values_videos and video_grid_thw belong together"),
    (
        {"video_grid_thw": torch.tensor([[2, 2, 2]]), "pixel_values_videos": torch.zeros(4, WIDTH)},
        r"pixel_values_videos has shape \(4, 1176\); .* need \(8, 1176\)",
    ),
    (
        {"video_grid_thw": torch.tensor([[2, 2, 2]]), "pixel_values_videos": torch.zeros(8, WIDTH)},
        "1 videos but the placeholders in input_ids belong to 0",
    ),
    ({"second_per_grid_ts": torch.ones(1)}, r"second_per_grid_ts has shape \(1,\) for 0 videos"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_a_batch_that_cannot_run_is_refused_with_the_numbers(model: ModelConfig, change: dict[str, Any], message: str):
    batch = {name: tensor for name, tensor in {**example(), **change}.items() if tensor is not None}
    with pytest.raises(DataError, match=f"^the file: .*{message}"):
        check_batch(batch, model, "the file")


def test_an_unknown_or_missing_tensor_or_file_is_named(tmp_path: Path, model: ModelConfig):
    with pytest.raises(DataError, match="no such file"):
        read_batch(tmp_path / "batch.safetensors", model)
    with pytest.raises(DataError, match="unknown tensor 'pixel_value' .did you mean 'pixel_values'"):
        read_batch(write_batch({**example(), "pixel_value": torch.zeros(1)}, tmp_path), model)
    save_file({"input_ids": torch.zeros(1, 2, dtype=torch.long)}, tmp_path / "batch.safetensors")
    with pytest.raises(DataError, match="tensor 'labels' is missing"):
        read_batch(tmp_path / "batch.safetensors", model)
    (tmp_path / "batch.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(DataError, match="not a safetensors file"):
        read_batch(tmp_path / "batch.safetensors", model)
