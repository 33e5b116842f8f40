"""One gloo process with megatron-core's parallel state, and small Hugging Face models to compare with."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tangram.align.reference import token_types
from tangram.data.encode import EncodedSample
from tangram.data.media import Medium

SPECIAL = {"image_token_id": 310, "video_token_id": 311, "vision_start_token_id": 308, "vision_end_token_id": 309}
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 4096,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@pytest.fixture(scope="module")
def one_process() -> Iterator[None]:
    """Parallel state of one process, all parallel sizes 1; gone after the module, since other tests fork."""
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    started = not dist.is_initialized()
    if started:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(1, 1)
    yield
    if started:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def make_hf(family: str, tied: bool = False) -> Any:
    """A small random Hugging Face model, every parameter drawn."""
    import transformers

    torch.manual_seed(0)
    if family == "qwen2_5_vl":
        vision = {"depth": 4, "hidden_size": 32, "intermediate_size": 40, "num_heads": 4, "out_hidden_size": 64}
        windows = {"window_size": 56, "fullatt_block_indexes": [1, 3], "tokens_per_second": 2}
        config = transformers.Qwen2_5_VLConfig(text_config=dict(TEXT), vision_config=vision | windows, tie_word_embeddings=tied, **SPECIAL)
        model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    elif family == "qwen3_vl":
        # Heads are wider than hidden_size / num_attention_heads = 16, as those of the published models with experts are.
        # transformers 4 reads the tie from the text's part.
        text = {**TEXT, "head_dim": 24, "tie_word_embeddings": tied}
        text |= {"rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [6, 3, 3]}}
        tower = {"depth": 4, "hidden_size": 32, "intermediate_size": 40, "num_heads": 4, "out_hidden_size": 64, "patch_size": 14}
        deepstack = {"num_position_embeddings": 36, "deepstack_visual_indexes": [0, 1, 3]}
        config = transformers.Qwen3VLConfig(text_config=text, vision_config=tower | deepstack, tie_word_embeddings=tied, **SPECIAL)
        model = transformers.Qwen3VLForConditionalGeneration(config)
    else:
        vision = {"depth": 4, "embed_dim": 32, "mlp_ratio": 2, "num_heads": 4, "hidden_size": 64}
        config = transformers.Qwen2VLConfig(text_config=dict(TEXT), vision_config=vision, tie_word_embeddings=tied, **SPECIAL)
        model = transformers.Qwen2VLForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.float().train()


def hf_config(model: Any) -> dict[str, Any]:
    return json.loads(model.config.to_json_string())


def run_hf(model: Any, batch: dict[str, Any], positions: torch.Tensor) -> Any:
    """Hugging Face's forward with explicit 3-D positions, under either transformers version."""
    extra = {}
    if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
        extra["mm_token_type_ids"] = token_types(batch["input_ids"], SPECIAL["image_token_id"], SPECIAL["video_token_id"])
    return model(**batch, position_ids=positions, **extra)


def hf_positions(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Hugging Face's own 3-D positions."""
    extra = {}
    if "mm_token_type_ids" in inspect.signature(model.model.get_rope_index).parameters:
        extra["mm_token_type_ids"] = (batch["input_ids"] == SPECIAL["image_token_id"]).int()
    positions, _ = model.model.get_rope_index(
        batch["input_ids"], image_grid_thw=batch.get("image_grid_thw"), attention_mask=batch["attention_mask"], **extra
    )
    return positions


def make_batch(grids: list[tuple[int, int, int]], rows: list[list[int]], left_pad: bool = False) -> dict[str, Any]:
    """A batch from grids and rows of token ids, where -k stands for the k-th image (from 1) with its start and end marks."""
    generator = torch.Generator().manual_seed(1)
    expanded = []
    for row in rows:
        ids: list[int] = []
        for token in row:
            if token < 0:
                t, h, w = grids[-token - 1]
                ids += [SPECIAL["vision_start_token_id"], *[SPECIAL["image_token_id"]] * (t * h * w // 4), SPECIAL["vision_end_token_id"]]
            else:
                ids.append(token)
        expanded.append(ids)
    length = max(map(len, expanded))
    input_ids = torch.zeros(len(rows), length, dtype=torch.int64)
    mask = torch.zeros_like(input_ids)
    for i, ids in enumerate(expanded):
        where = slice(length - len(ids), length) if left_pad else slice(0, len(ids))
        input_ids[i, where] = torch.tensor(ids)
        mask[i, where] = 1
    labels = torch.where((mask == 1) & (input_ids < 300) & (input_ids % 3 != 0), input_ids, -100)
    # What would be predicted from padding on the left is not defined.
    labels[torch.arange(len(rows)), mask.argmax(dim=1)] = -100
    batch: dict[str, Any] = {"input_ids": input_ids, "attention_mask": mask, "labels": labels}
    if grids:
        batch["pixel_values"] = torch.randn(sum(t * h * w for t, h, w in grids), 1176, generator=generator)
        batch["image_grid_thw"] = torch.tensor(grids)
    return batch


def make_sample(number: int, *parts: list[int] | tuple[int, int, int], seed: int = 0, timed: bool = False) -> EncodedSample:
    """A sample of words (lists), images and videos (grids; more than one step is a video); words divisible by 3 and media are not learnt.

    Args:
        timed: each step of a video is a run of tokens after a time of two words, as Qwen3-VL writes it.
    """
    generator = np.random.default_rng([number, seed])
    image, video, start, end = (SPECIAL[name] for name in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"))
    sample = EncodedSample(number, image_pixels=[], video_pixels=[])
    for part in parts:
        if isinstance(part, list):
            sample.input_ids += part
            continue
        t, h, w = part
        media, pixels, token = (sample.images, sample.image_pixels, image) if t == 1 else (sample.videos, sample.video_pixels, video)
        media.append(Medium(part, None if t == 1 else 1.5))
        pixels.append(generator.standard_normal((t * h * w, 1176), dtype=np.float32))
        if timed and t > 1:
            for step in range(t):
                sample.input_ids += [200 + step, 207, start, *[token] * (h * w // 4), end]
        else:
            sample.input_ids += [start, *[token] * (t * h * w // 4), end]
    sample.labels = [token if token < 300 and token % 3 else -100 for token in sample.input_ids]
    return sample
