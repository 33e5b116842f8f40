"""Pictures and videos dealt out to ranks."""

from __future__ import annotations

from pathlib import Path

import torch

from tangram.config.parsing import read_mapping
from tangram.families.base import get_family
from tangram.models.media_share import MediaShare, deal
from tests.conftest import TinyHF
from tests.ranks import on_ranks


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
    assert torch.equal(share.own_pixels([pixels[:16], pixels[16:]], torch.float32, torch.device("cpu")), pixels)
    none = MediaShare(section, [])
    assert none.own_grids == [(1, 2, 2)]
    assert none.own_pixels([], torch.float32, torch.device("cpu")).shape == (4, section.patch_width)


def test_ranks_without_pictures_encode_those_of_others_and_give_them_back_in_order(tiny_hf: TinyHF) -> None:
    """Rank 0 has pictures of 64, 4, 32 and 32 patches, rank 1 none: 68 patches for one, 64 for the other, where 132 and a blank one were.

    Copies of the encoder all have rank 0's, which are dealt out to them alike. The gradient is the same on all, and counts once.
    """
    found = on_ranks(2, Path(__file__).with_name("cases_media.py"), "dealt", str(tiny_hf("qwen2_5_vl", hidden=32) / "config.json"))
    whole = [*range(0, 64, 4), 100, *range(200, 232, 4), *range(300, 332, 4)]
    for kind, rows in (("ranks", [0]), ("copies, balanced", whole), ("copies", whole)):  # a blank picture's row, or the other's too
        assert found[0][kind] == ((68, whole, [1, 0, 0, 0] * 17), [0, 1]), kind
        assert found[1][kind] == ((64, rows, [1, 0, 0, 0] * 16), [2, 3]), kind
