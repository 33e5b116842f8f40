"""Micro-batches between processes: how small they are, and that nothing of them is lost."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data._utils.pin_memory import pin_memory

from tangram.config.run import RunConfig
from tangram.data.build import build_loader, build_source
from tangram.data.compact import CompactBatch
from tangram.data.patches import CHUNK, ByteValues, PixelBytes
from tangram.families.base import get_family

FAMILY = get_family("qwen2_5_vl")
MakeRun = Callable[..., RunConfig]
HALVES = ByteValues(mean=(0.5, 0.5, 0.0), std=(0.5, 1.0, 0.25))


def hf_pixels(paths: list[str], high: int) -> torch.Tensor:
    try:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil as Processor
    except ImportError:
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor as Processor
    pictures = [Image.open(path).convert("RGB") for path in paths]
    found: torch.Tensor = Processor(min_pixels=3136, max_pixels=high)(images=pictures, return_tensors="pt")["pixel_values"]
    return found


@pytest.mark.compat
@pytest.mark.parametrize("workers", [0, 2])
def test_what_arrives_are_the_values_of_transformers_bit_for_bit(
    make_run: MakeRun, record: Any, write_json: Any, photo: Callable[[str], str], workers: int
) -> None:
    """Two micro-batches of two pictures; large ones, so that a message is longer than a pipe holds."""
    high = 448 * 448
    paths = [photo(name) for name in ("astronaut.png", "camera.png", "rocket.jpg", "chelsea.png")]
    dataset = write_json([record("<image>?", "a", images=[path]) for path in paths])
    sizes = {"micro_batch_size": 2, "global_batch_size": 4, "num_workers": workers, "seq_length": 1024}
    run = make_run(dataset, preprocess={"image_min_pixels": 3136, "image_max_pixels": high}, loading={"shuffle": False}, **sizes)
    (step,) = islice(build_loader(run, FAMILY, 0, 1), 1)
    assert [batch["sample_ids"] for batch in step] == [[0, 1], [2, 3]]
    for batch, pair in zip(step, (paths[:2], paths[2:]), strict=True):
        assert batch["pixel_values"].dtype == torch.float32 and torch.equal(batch["pixel_values"], hf_pixels(pair, high))
        batch["pixel_values"][0] = 0  # memory that is the consumer's own
        assert all(entry.is_contiguous() for entry in batch.values() if torch.is_tensor(entry))


def test_a_picture_travels_in_an_eighth_of_its_values(make_run: MakeRun, record: Any, write_json: Any, photo: Callable[[str], str]) -> None:
    dataset = write_json([record("<image>?", "a", images=[photo("astronaut.png")])])
    source = build_source(make_run(dataset, preprocess={"image_max_pixels": 448 * 448}, seq_length=1024), FAMILY)
    reading = source.read([((0, 0),)])
    values = reading.tensors()["pixel_values"]
    assert values.shape == (1024, 1176)
    assert len(pickle.dumps(reading)) < values.nbytes / 8 + 20_000, "the rest are ids, labels and positions of 280 tokens"


def test_bytes_become_values_patch_by_patch() -> None:
    """By hand: (byte / 255 - mean) / std; more patches than are looked up at a time, and the last of them alone."""
    data = np.zeros((2 * CHUNK + 1, 3, 1, 4), dtype=np.uint8)
    data[-1, :, 0, 3] = 255
    still = PixelBytes(data, 2, HALVES)
    values = np.asarray(still).reshape(-1, 3, 2, 4)
    assert still.shape == (2 * CHUNK + 1, 24) and len(still) == 2 * CHUNK + 1
    assert values[0, :, 0, 0].tolist() == [-1.0, -0.5, 0.0]
    assert values[-1, :, :, 3].tolist() == [[1.0, 1.0], [0.5, 0.5], [4.0, 4.0]]
    moving = PixelBytes(np.concatenate([data, 255 - data], axis=2), 2, HALVES).expand().reshape(-1, 3, 2, 4)
    assert moving[0, :, :, 0].tolist() == [[-1.0, 1.0], [-0.5, 0.5], [0.0, 4.0]]


def test_pixels_of_two_processors_are_not_joined() -> None:
    one = PixelBytes(np.zeros((1, 3, 1, 4), dtype=np.uint8), 2, HALVES)
    assert len(PixelBytes.join([one, one])) == 2
    with pytest.raises(AssertionError, match="pixels of several processors"):
        PixelBytes.join([one, PixelBytes(one.data, 2, ByteValues((0.0,) * 3, (1.0,) * 3))])


def test_torch_pins_the_tensors_that_arrive(make_run: MakeRun, mixed_dataset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a device nothing can be pinned, so what is asked for is noted instead."""
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor, *device: pinned.append(tensor) or tensor)
    reading = build_source(make_run(mixed_dataset), FAMILY).read([((0, 0),)])
    assert isinstance(reading.batch, CompactBatch)
    found = pin_memory(reading)
    tensors = [entry for entry in found.tensors().values() if torch.is_tensor(entry)]
    assert {id(tensor) for tensor in tensors} == {id(tensor) for tensor in pinned} and len(tensors) == 6
    assert found.tensors()["pixel_values"].dtype == torch.float32 and found.tensors()["sample_ids"] == [0]
