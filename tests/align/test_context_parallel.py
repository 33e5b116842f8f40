"""Ranks that share the tokens of a micro-batch give what transformers gives, whatever stands in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from tangram.align.batch import write_batch
from tangram.align.run import Outcome, align, open_subject
from tangram.align.task import Split
from tangram.errors import ConfigError

pytestmark = pytest.mark.timeout(300)
SMALL = {"hidden": 32, "text_layers": 2, "vision_layers": 2, "weight_std": 0.1}
SPLITS = [Split(context=3, context_algo="ring"), Split(context=2, pipeline=2)]
"""Beside those of ``tests.align.matrix``."""


def passed(outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        assert outcome.report.passed, f"{outcome.split}: {outcome.report.failures}"
        assert outcome.report.tolerance == 1e-5


@pytest.mark.slow
def test_pictures_videos_and_text_are_what_transformers_makes_of_them(tiny_hf: Callable[..., Path]) -> None:
    passed(align(tiny_hf("qwen3_vl", **SMALL), SPLITS, micro_batch_size=1))


@pytest.mark.slow
def test_pictures_in_one_half_padding_on_the_left_and_a_row_shorter_than_the_ranks(tiny_hf: Callable[..., Path], tmp_path: Path) -> None:
    """The first micro-batch has all pictures in its first half; the next is padded on the left and has none, and few real tokens."""
    hf = tiny_hf("qwen2_5_vl", **SMALL)
    model, generator = open_subject(hf, tmp_path).model, torch.Generator().manual_seed(0)
    ids = torch.randint(0, 150, (2, 23), generator=generator)
    ids[0, :10] = torch.tensor([model.vision_start_token_id, *[model.img_context_token_id] * 6, model.vision_start_token_id, 5, 6])
    ids[0, 8:10] = model.img_context_token_id
    labels, mask = torch.full_like(ids, -100), torch.ones_like(ids)
    labels[:, 21:], mask[1, :20] = ids[:, 21:], 0
    pictures = {"pixel_values": torch.randn(32, 1176, generator=generator), "image_grid_thw": torch.tensor([[1, 4, 6], [1, 2, 4]])}
    file = write_batch({"input_ids": ids, "labels": labels, "attention_mask": mask, **pictures}, tmp_path)
    splits = [Split(context=2), Split(context=2, context_algo="ring")]
    for size in (1, 2):
        passed(align(hf, splits, batch_file=file, micro_batch_size=size))


def test_heads_that_ranks_cannot_share_are_refused_before_a_process_starts(tiny_hf: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="3 Ulysses ranks cannot share 4 attention heads and 2 key/value heads = 4 and 2"):
        align(tiny_hf("qwen2_5_vl", **SMALL), [Split(context=3)])
    with pytest.raises(ConfigError, match="hybrid_cp_algo needs ulysses_degree_in_cp"):
        align(tiny_hf("qwen2_5_vl", **SMALL), [Split(context=4, context_algo="hybrid")])
