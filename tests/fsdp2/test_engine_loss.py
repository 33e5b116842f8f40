"""Losses and packing on ranks, against a loop over transformers written by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ranks import on_ranks

CASES = Path(__file__).with_name("cases_loss.py")
SIZES = {"text_layers": 2, "vision_layers": 2, "hidden": 32, "vision_hidden": 16, "heads": 2, "kv_heads": 1, "vision_heads": 2}
TinyHF = Callable[..., Path]


def test_every_loss_type_is_that_of_the_loop_however_rows_are_cut_and_without_labels(tiny_hf: TinyHF, tmp_path: Path) -> None:
    on_ranks(2, CASES, "losses", tiny_hf("qwen2_5_vl", **SIZES), tmp_path)


@pytest.mark.compat
def test_the_loss_of_routers_is_added_times_its_coefficient(tiny_hf: TinyHF, tmp_path: Path) -> None:
    on_ranks(2, CASES, "routers", tiny_hf("qwen3_vl_moe", **SIZES), tmp_path)


@pytest.mark.compat
def test_packed_samples_see_only_themselves(tiny_hf: TinyHF, tmp_path: Path) -> None:
    on_ranks(2, CASES, "packed", {name: tiny_hf(name, **SIZES) for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")}, tmp_path)


@pytest.mark.compat
def test_attention_kinds_tuples_plain_positions_and_segments(tiny_hf: TinyHF, tmp_path: Path) -> None:
    on_ranks(1, CASES, "alone", tiny_hf("qwen2_5_vl", **SIZES), tmp_path)


def test_ranks_with_different_numbers_of_micro_batches_are_refused(tiny_hf: TinyHF, tmp_path: Path) -> None:
    for message in on_ranks(2, CASES, "unequal_counts", tiny_hf("qwen2_5_vl", **SIZES), tmp_path):
        assert message.startswith("ranks hold [1, 2] micro-batches of one global batch; give each the same number")
