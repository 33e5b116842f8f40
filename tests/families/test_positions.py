"""3-D positions against transformers' own and against examples worked by hand."""

from __future__ import annotations

import inspect
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tangram.config.model import ModelConfig
from tangram.errors import DataError
from tangram.families.base import get_family
from tangram.families.qwen2_5_vl.positions import rope_index as rope_index_2_5
from tangram.families.qwen2_vl.positions import rope_index as rope_index_2
from tangram.families.qwen3_vl.positions import rope_index as rope_index_3
from tests.families.sizes import QWEN3_VL

IMG, VIDEO, START, END = 151655, 151656, 151652, 151653
CLASSES = {
    "qwen2_vl": ("qwen2_vl", "Qwen2VLModel"),
    "qwen2_5_vl": ("qwen2_5_vl", "Qwen2_5_VLModel"),
    "qwen3_vl": ("qwen3_vl", "Qwen3VLModel"),
    "qwen3_vl_moe": ("qwen3_vl_moe", "Qwen3VLMoeModel"),
}

PUBLISHED = {"qwen3_vl": QWEN3_VL["8b"], "qwen3_vl_moe": QWEN3_VL["30b"]}


def config(family: str) -> ModelConfig:
    if family in PUBLISHED:
        return get_family(family).from_hf_config(PUBLISHED[family])
    text = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "vocab_size": 151936,
        "max_position_embeddings": 4096,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "image_token_id": IMG,
        "video_token_id": VIDEO,
        "vision_start_token_id": START,
    }
    vision = {"depth": 1, "num_heads": 2, "in_chans": 3, "patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2}
    if family == "qwen2_vl":
        vision |= {"embed_dim": 32, "mlp_ratio": 2, "hidden_act": "quick_gelu"}
    else:
        vision |= {
            "hidden_size": 32,
            "intermediate_size": 64,
            "window_size": 112,
            "fullatt_block_indexes": [0],
            "tokens_per_second": 2,
            "hidden_act": "silu",
        }
    return get_family(family).from_hf_config({**text, "vision_config": vision})


def hf_positions(family: str, ids: torch.Tensor, mask: torch.Tensor | None, grids: torch.Tensor | None, **videos: Any) -> torch.Tensor:
    """transformers' ``get_rope_index``, called on a stand-in that has the config it reads."""
    module_name, class_name = CLASSES[family]
    module = __import__(f"transformers.models.{module_name}.modeling_{module_name}", fromlist=[class_name])
    cls = getattr(module, class_name)
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=2)
    this = SimpleNamespace(config=SimpleNamespace(vision_config=vision, image_token_id=IMG, video_token_id=VIDEO, vision_start_token_id=START))
    if hasattr(cls, "get_vision_position_ids"):
        this.get_vision_position_ids = lambda *args, **kwargs: cls.get_vision_position_ids(this, *args, **kwargs)
    kwargs: dict[str, Any] = {"image_grid_thw": grids, "attention_mask": mask, **videos}
    if "mm_token_type_ids" in inspect.signature(cls.get_rope_index).parameters:
        kwargs["mm_token_type_ids"] = (ids == IMG).int() + 2 * (ids == VIDEO).int()
    positions: torch.Tensor = cls.get_rope_index(this, ids, **kwargs)[0]
    return positions


def random_row(rng: random.Random, images: int) -> tuple[list[int], list[list[int]]]:
    row = [rng.randrange(1000) for _ in range(rng.randrange(1, 6))]
    grids = []
    for _ in range(images):
        h, w = 2 * rng.randrange(1, 6), 2 * rng.randrange(1, 6)
        grids.append([1, h, w])
        row += [START, *[IMG] * (h * w // 4), END, *(rng.randrange(1000) for _ in range(rng.randrange(0, 5)))]
    return row, grids


@pytest.mark.parametrize("family", CLASSES)
def test_positions_equal_transformers_on_random_layouts(family: str) -> None:
    rng, model = random.Random(0), config(family)
    rope_index = get_family(family).rope_index
    with_images = 0
    for trial in range(1000):
        rows, grids = [], []
        for _ in range(rng.randrange(1, 4)):
            row, of_row = random_row(rng, rng.choice([0, 0, 1, 2, 3]))
            rows.append(row)
            grids += of_row
        length = max(map(len, rows)) + rng.randrange(3)
        left = trial % 2 == 0
        ids, mask = torch.zeros(len(rows), length, dtype=torch.long), torch.zeros(len(rows), length, dtype=torch.long)
        for index, row in enumerate(rows):
            place = slice(length - len(row), length) if left else slice(0, len(row))
            ids[index, place] = torch.tensor(row)
            mask[index, place] = 1
        thw = torch.tensor(grids) if grids else None
        ours = rope_index(ids, mask, thw, model)
        theirs = hf_positions(family, ids, mask, thw)
        real = mask.bool()
        assert ours.dtype == torch.long and ours.shape == (3, len(rows), length)
        assert torch.equal(ours[:, real], theirs[:, real]), (rows, grids)
        assert (ours[:, ~real] == 1).all()
        with_images += bool(grids)
    assert with_images > 500


def test_positions_without_a_mask_count_every_token() -> None:
    ids = torch.tensor([[5, START, IMG, IMG, END, 6]])
    grids = torch.tensor([[1, 2, 4]])
    assert torch.equal(rope_index_2_5(ids, None, grids, config("qwen2_5_vl")), hf_positions("qwen2_5_vl", ids, None, grids))
    assert rope_index_2_5(torch.arange(4)[None], None, None, config("qwen2_5_vl")).tolist() == [[[0, 1, 2, 3]]] * 3


def test_image_of_two_by_two_cells_by_hand() -> None:
    ids = torch.tensor([[10, 11, START, IMG, IMG, IMG, IMG, END, 12]])
    time, height, width = rope_index_2_5(ids, torch.ones_like(ids), torch.tensor([[1, 4, 4]]), config("qwen2_5_vl"))[:, 0].tolist()
    assert time == [0, 1, 2, 3, 3, 3, 3, 5, 6]
    assert height == [0, 1, 2, 3, 3, 4, 4, 5, 6]
    assert width == [0, 1, 2, 3, 4, 3, 4, 5, 6]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_does_not_move_positions(side: str) -> None:
    ids = [10, 11, START, *[IMG] * 6, END, 12, 13]
    want = [
        [0, 1, 2, 3, 3, 3, 3, 3, 3, 6, 7, 8],
        [0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7, 8],
        [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8],
    ]
    padding, mask = [0, 0], [1] * len(ids)
    row, of_row = (padding + ids, padding + mask) if side == "left" else (ids + padding, mask + padding)
    got = rope_index_2_5(torch.tensor([row]), torch.tensor([of_row]), torch.tensor([[1, 4, 6]]), config("qwen2_5_vl"))[:, 0]
    assert got[:, torch.tensor(of_row).bool()].tolist() == want


def test_video_time_is_seconds_times_tokens_per_second() -> None:
    ids = torch.tensor([[10, START, *[VIDEO] * 12, END, 12]])
    grids = torch.tensor([[3, 4, 4]])
    time, height, width = rope_index_2_5(ids, None, None, config("qwen2_5_vl"), grids, [1.0])[:, 0].tolist()
    assert time == [0, 1, 2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6, 7, 8]
    assert height == [0, 1, 2, 2, 3, 3, 2, 2, 3, 3, 2, 2, 3, 3, 7, 8]
    assert width == [0, 1, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 7, 8]


def test_half_a_second_per_frame_group_keeps_the_time_axis() -> None:
    ids = torch.tensor([[10, START, *[VIDEO] * 12, END]])
    time = rope_index_2_5(ids, None, None, config("qwen2_5_vl"), torch.tensor([[3, 4, 4]]), [0.5])[0, 0].tolist()
    assert time == [0, 1, *[2] * 4, *[3] * 4, *[4] * 4, 5]


@pytest.mark.parametrize("seconds", [0.5, 0.083, 1.0, 1.7])
def test_video_time_equals_transformers_5(seconds: float) -> None:
    import transformers

    if transformers.__version__.startswith("4."):
        pytest.skip("transformers 4.57 cuts seconds to whole numbers before multiplying")
    ids = torch.tensor([[10, START, *[VIDEO] * 60]])
    grids = torch.tensor([[5, 8, 6]])
    theirs = hf_positions("qwen2_5_vl", ids, None, None, video_grid_thw=grids, second_per_grid_ts=torch.tensor([seconds]))
    assert torch.equal(rope_index_2_5(ids, None, None, config("qwen2_5_vl"), grids, [seconds]), theirs)


def test_qwen2_vl_gives_each_frame_group_one_position() -> None:
    ids = torch.tensor([[START, *[VIDEO] * 3, END]])
    got = rope_index_2(ids, None, None, config("qwen2_vl"), torch.tensor([[3, 2, 2]]), [7.0])[:, 0].tolist()
    assert got == [[0, 1, 2, 3, 4], [0, 1, 1, 1, 4], [0, 1, 1, 1, 4]]


def test_cut_image_tokens_are_an_error_with_both_numbers() -> None:
    ids = torch.tensor([[10, 11, START, *[IMG] * 4]])
    with pytest.raises(DataError, match="holds 4 image tokens but its 1 image grids need 6"):
        rope_index_2_5(ids, None, torch.tensor([[1, 4, 6]]), config("qwen2_5_vl"))


def test_tokens_that_fit_only_over_rows_are_an_error() -> None:
    ids = torch.tensor([[START, *[IMG] * 4], [START, IMG, IMG, 3, 4]])
    with pytest.raises(DataError, match="image 0 of the micro-batch needs 6 tokens in one run but row 0 has a run of 4"):
        rope_index_2_5(ids, None, torch.tensor([[1, 4, 6]]), config("qwen2_5_vl"))


def test_tokens_that_go_on_in_the_next_row_are_an_error() -> None:
    ids = torch.tensor([[5, IMG, IMG], [IMG, IMG, 5]])
    with pytest.raises(DataError, match="image 0 of the micro-batch needs 4 tokens in one run but row 0 has a run of 2 at column 1"):
        rope_index_2_5(ids, None, torch.tensor([[1, 4, 4]]), config("qwen2_5_vl"))


def test_qwen3_video_is_one_run_per_frame_group() -> None:
    """A video of 2 groups of 4 x 6 patches between timestamps: each run stands like an image, and the text between them tells the time."""
    group = [START, *[VIDEO] * 6, END]
    ids = torch.tensor([[10, *group, 11, 12, *group, 13]])
    grids = torch.tensor([[2, 4, 6]])
    ours = rope_index_3(ids, None, None, config("qwen3_vl"), grids)
    time, height, width = ours[:, 0].tolist()
    assert time == [0, 1, *[2] * 6, 5, 6, 7, 8, *[9] * 6, 12, 13]
    assert height == [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8, 9, 9, 9, 10, 10, 10, 12, 13]
    assert width == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 9, 10, 11, 12, 13]
    assert torch.equal(ours, hf_positions("qwen3_vl", ids, None, None, video_grid_thw=grids.clone()))
    assert grids.tolist() == [[2, 4, 6]], "the caller's grids are left alone"
