"""The batch of a comparison where the user gives none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tangram.align.batch import VIDEOS, check_batch, media_per_row
from tangram.align.default_batch import default_batch
from tangram.config.model import ModelConfig
from tangram.config.parsing import read_mapping
from tangram.families.base import Family, get_family
from tests.conftest import TinyHF


def subject(tiny_hf: TinyHF, family: str, **sizes: Any) -> tuple[Any, Family, ModelConfig]:
    folder = tiny_hf(family, **sizes)
    return folder, get_family(family), get_family(family).from_hf_config(read_mapping(folder / "config.json"))


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("vocab", [160, None], ids=["made up", "photographs"])
def test_one_row_of_the_batch_has_a_video(tiny_hf: TinyHF, family: str, vocab: int | None) -> None:
    folder, found, model = subject(tiny_hf, family, vocab=vocab)
    batch, note = default_batch(folder, found, model)
    check_batch(batch, model, note)
    assert note.startswith("batch: 5 ") and batch["input_ids"].shape[0] == 5
    assert media_per_row(batch, model, VIDEOS) == [0, 0, 0, 0, 1]
    steps, rows, columns = batch["video_grid_thw"][0].tolist()
    first, second = batch["pixel_values_videos"].chunk(steps)
    assert steps == 2 and len(first) == rows * columns and not torch.equal(first, second), "steps that are alike would hide a wrong window"
    learnt = batch["labels"][4] != -100
    assert learnt.any() and not learnt[batch["input_ids"][4] == model.video_token_id].any()
    # The second step is two seconds after the first: four positions of Qwen2.5-VL, one of Qwen2-VL.
    times = batch["position_ids"][0, 4][batch["input_ids"][4] == model.video_token_id].unique_consecutive()
    assert (times - times[0]).tolist() == [0, 4 if family == "qwen2_5_vl" else 1]


def test_the_camera_moves_down_by_a_row_of_cells(tiny_hf: TinyHF) -> None:
    folder, found, model = subject(tiny_hf, "qwen2_5_vl", vocab=None)
    batch, _ = default_batch(folder, found, model)
    _, rows, columns = batch["video_grid_thw"][0].tolist()
    first, second = (step.unflatten(0, (rows // 2, 2 * columns)) for step in batch["pixel_values_videos"].chunk(2))
    assert torch.equal(second[:-1], first[1:])


def test_a_model_without_videos_gets_none(tiny_hf: TinyHF) -> None:
    for vocab in (160, None):
        folder, found, model = subject(tiny_hf, "qwen2_5_vl", vocab=vocab)
        batch, note = default_batch(folder, found, model.model_copy(update={"video_token_id": None}))
        assert note.startswith("batch: 4 ") and not [name for name in batch if "video" in name] and "second_per_grid_ts" not in batch
