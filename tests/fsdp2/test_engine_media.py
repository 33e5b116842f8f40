"""Ranks of the engine whose micro-batches differ in media."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tangram.backends.fsdp2.vision import VisionBalance
from tangram.errors import ConfigError
from tests.ranks import on_ranks

CASES = Path(__file__).with_name("cases_media.py")
SIZES = {"text_layers": 2, "vision_layers": 2, "hidden": 32, "vision_hidden": 16, "heads": 2, "kv_heads": 1, "vision_heads": 2}


@pytest.mark.compat
def test_every_family_gives_the_gradients_of_one_process_whatever_media_ranks_hold(tiny_hf: Callable[..., Path], tmp_path: Path) -> None:
    on_ranks(2, CASES, "families", [tiny_hf(name, **SIZES) for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")], tmp_path)


def test_the_tower_may_be_frozen_recomputed_or_in_the_root(tiny_hf: Callable[..., Path], tmp_path: Path) -> None:
    on_ranks(2, CASES, "towers", tiny_hf("qwen2_5_vl", **SIZES), tmp_path)


def test_a_model_that_cannot_make_up_for_others_pictures_is_refused() -> None:
    balance = VisionBalance(torch.nn.Linear(2, 2), torch.device("cpu"))
    assert balance.passes({"pixel_values": 0, "pixel_values_videos": 0}) == 2
    balance.check([0, 1], [0, 1])
    with pytest.raises(ConfigError, match="some ranks hold pictures in a micro-batch where others hold none, and Linear cannot make up for it"):
        balance.check([0, 1], [1, 1])
