"""``fsdp_plan`` on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.ranks import on_ranks

CASES = Path(__file__).with_name("cases_plan.py")
SIZES = {"text_layers": 2, "vision_layers": 2, "hidden": 32, "vision_hidden": 16, "heads": 2, "kv_heads": 1, "vision_heads": 2}
TinyHF = Callable[..., Path]


def test_whatever_the_plan_says_loss_gradients_and_norm_are_those_of_one_process(tiny_hf: TinyHF, tmp_path: Path) -> None:
    on_ranks(2, CASES, "options", tiny_hf("qwen2_5_vl", **SIZES), tmp_path)


def test_the_loss_stays_fp32_whatever_type_units_give(tiny_hf: TinyHF, tmp_path: Path) -> None:
    on_ranks(1, CASES, "outputs", tiny_hf("qwen2_5_vl", **SIZES), tmp_path)


def test_a_tied_head_lies_in_one_unit_with_the_embedding_and_stays_tied(tiny_hf: TinyHF, tmp_path: Path) -> None:
    on_ranks(2, CASES, "tied", tiny_hf("qwen2_5_vl", tied=True, **SIZES), tmp_path)


def test_uneven_shards_are_updated_in_place(tiny_hf: TinyHF, tmp_path: Path) -> None:
    on_ranks(2, CASES, "uneven", tiny_hf("qwen2_5_vl", **SIZES, ffn=65, vision_ffn=33, vocab=161), tmp_path)


def test_two_copies_of_two_shards_give_the_gradients_of_one_process(tiny_hf: TinyHF, tmp_path: Path) -> None:
    on_ranks(4, CASES, "copies", tiny_hf("qwen2_5_vl", **SIZES), tmp_path)


def test_weights_are_computed_with_in_bf16_and_held_in_fp32(tiny_hf: TinyHF, tmp_path: Path) -> None:
    for found in on_ranks(2, CASES, "bf16", tiny_hf("qwen2_5_vl", **SIZES), tmp_path):
        assert found["computed"] == ["(torch.bfloat16, torch.bfloat16)", "(torch.float32, torch.float32)"], "the ignored merger computes in fp32"
        assert found["held"] == {"torch.float32"}
        assert 1e-7 < found["loss"] < 0.02
        assert 1e-4 < found["gradients"] < 0.2


def test_what_is_not_finite_on_one_rank_changes_nothing_anywhere(tiny_hf: TinyHF, tmp_path: Path) -> None:
    assert on_ranks(2, CASES, "not_finite", tiny_hf("qwen2_5_vl", **SIZES), tmp_path) == [[True, True, False, True]] * 2
