"""Pictures and videos dealt out to ranks."""

from __future__ import annotations

import torch

from tangram.config.parsing import read_mapping
from tangram.families.base import get_family
from tangram.models.media_share import MediaShare, deal
from tests.conftest import TinyHF


def test_the_largest_go_first_to_the_rank_that_has_least() -> None:
    assert deal([4, 16, 6, 8], 2) == [[1], [0, 2, 3]]
    assert deal([4, 4, 4, 4, 4], 2) == [[0, 2, 4], [1, 3]]
    assert deal([5], 3) == [[0], [], []]
    assert deal([], 2) == [[], []]


def test_without_context_ranks_one_has_all_and_without_media_a_blank_picture(tiny_hf: TinyHF) -> None:
    model = get_family("qwen2_5_vl").from_hf_config(read_mapping(tiny_hf("qwen2_5_vl", hidden=32) / "config.json"))
    assert model.image_encoder is not None
    section = model.image_encoder.vision_encoder
    share = MediaShare(section, [(1, 4, 4), (2, 2, 4)])
    pixels = torch.randn(32, section.patch_width)
    assert share.own_grids == [(1, 4, 4), (2, 2, 4)]
    assert torch.equal(share.own_pixels([pixels[:16], pixels[16:]], torch.device("cpu")), pixels)
    none = MediaShare(section, [])
    assert none.own_grids == [(1, 2, 2)]
    assert none.own_pixels([], torch.device("cpu")).shape == (4, section.patch_width)
