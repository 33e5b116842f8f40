"""Stacked experts on ranks: as they are placed, and dealt out (expert parallel), against transformers in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tangram.backends.fsdp2 import experts
from tangram.backends.fsdp2.expert_weights import check_stack, holds_out_in
from tangram.config.fsdp2 import Fsdp2Parallel
from tangram.errors import ConfigError, PlacementError
from tangram.placement.blocks import Block
from tangram.platform import NpuPlatform
from tests.fsdp2.cases_parallel import Case, check
from tests.ranks import on_ranks

CASES = Path(__file__).with_name("cases_parallel.py")
SMALL = {"text_layers": 2, "vision_layers": 2, "hidden": 32, "vision_hidden": 32, "kv_heads": 2}
"""Four experts, two for each token."""
EXPERTS = "model.language_model.layers.{*}.mlp.experts"
TinyHF = Callable[..., Path]


def _parallel(ranks: int = 2, dispatcher: str = "alltoall", **more: Any) -> dict[str, Any]:
    return {"parallel": {"expert_parallel_size": ranks, "ep_plan": {"apply_modules": [EXPERTS], "dispatcher": dispatcher}, **more}}


def test_experts_dealt_out_to_two_ranks(tiny_hf: TinyHF, tmp_path: Path) -> None:
    models = {"moe": tiny_hf("qwen3_vl_moe", **SMALL), "many": tiny_hf("qwen3_vl_moe", **SMALL, experts=32)}
    few = ((("text", 1, 2),), (("image", 1, 2),))
    recompute = {"features": {"recompute": True, "recompute_plan": {"apply_modules": [EXPERTS]}}}
    cases = {
        "allgather": Case("moe", _parallel(dispatcher="allgather")),
        "alltoall, recomputed": Case("moe", {**_parallel(), **recompute}),
        "experts without tokens": Case("many", _parallel(), few),
        "gathered, experts without tokens": Case("many", _parallel(dispatcher="allgather"), few),
    }
    for found in on_ranks(2, CASES, "compare", models, tmp_path, cases):
        check(found)


def test_experts_on_four_ranks_sharded_copied_and_with_shared_tokens(tiny_hf: TinyHF, tmp_path: Path) -> None:
    cases = {
        "two shards of each": Case("moe", _parallel()),
        "two copies of each": Case("moe", _parallel(expert_fully_shard_parallel_size=1, fully_shard_parallel_size=2)),
        "one expert each, and shared tokens": Case("moe", _parallel(4, ulysses_parallel_size=2)),
    }
    for found in on_ranks(4, CASES, "compare", {"moe": tiny_hf("qwen3_vl_moe", **SMALL)}, tmp_path, cases):
        check(found)


def test_a_checkpoint_goes_on_at_another_expert_parallel_size(tiny_hf: TinyHF, tmp_path: Path) -> None:
    hf = tiny_hf("qwen3_vl_moe", **SMALL)
    went_on = on_ranks(4, CASES, "steps", hf, tmp_path, _parallel(), False)[0]
    assert went_on["axes"] == {"fully_shard": 4, "ulysses": 1, "experts": 2}
    (found,) = on_ranks(1, CASES, "steps", hf, tmp_path, {}, True)
    for key in ("loss", "norm", "after"):
        assert found[key] == pytest.approx(went_on[key], rel=1e-6), key


def test_plans_that_cannot_be_carried_out_are_refused(tiny_hf: TinyHF, tmp_path: Path) -> None:
    hf, odd = tiny_hf("qwen3_vl_moe", **SMALL), tiny_hf("qwen3_vl_moe", **SMALL, experts=3)
    layers = "model.language_model.layers.{*}"
    cases: list[tuple[Path, dict[str, Any], str]] = [
        (hf, {"parallel": {"expert_parallel_size": 2}}, "expert_parallel_size 2, but parallel.ep_plan.apply_modules is empty; name the experts"),
        (hf, {"parallel": {"ep_plan": {"apply_modules": [EXPERTS]}}}, "is given, but parallel.expert_parallel_size is 1"),
        (hf, {"parallel": {"expert_parallel_size": 2, "ep_plan": {"apply_modules": ["model.layers.{*}.experts"]}}}, "matches no module"),
        (hf, {"parallel": {"expert_parallel_size": 2, "ep_plan": {"apply_modules": [f"{layers}.mlp"]}}}, "not experts that are stacked as"),
        (odd, _parallel(), "parallel.expert_parallel_size 2 does not divide the 3 experts of model.language_model.layers.0.mlp.experts"),
        (hf, _parallel(fsdp_plan={"apply_modules": [EXPERTS]}), "but parallel.ep_plan shards model.language_model.layers.0.mlp.experts"),
    ]
    said = on_ranks(2, CASES, "refusals", [(model, tmp_path / str(number), changes) for number, (model, changes, _) in enumerate(cases)])
    for (_, _, expected), first, second in zip(cases, *said, strict=True):
        assert first == second
        assert first.startswith("ConfigError")
        assert expected in first


def test_fused_operators_are_refused_on_npus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "current", NpuPlatform)
    settings = _parallel()["parallel"]
    with pytest.raises(ConfigError, match=r"parallel.ep_plan.use_npu_fused_ops: this backend has no fused operators for experts; set it to false"):
        experts.split_experts(torch.nn.Linear(2, 2), Fsdp2Parallel(**settings), torch.device("cpu"))


def test_the_class_says_which_way_round_it_holds_experts() -> None:
    assert holds_out_in(SimpleNamespace(is_transposed=False))  # type: ignore[arg-type]
    assert not holds_out_in(SimpleNamespace(is_transposed=True))  # type: ignore[arg-type]
    with pytest.raises(PlacementError, match=r"torch.nn.modules.linear.Linear does not tell whether it holds experts as \[experts, in, out\] or"):
        holds_out_in(torch.nn.Linear(2, 2))


def test_a_stack_of_another_shape_is_refused_even_where_turning_would_fit() -> None:
    check_stack("experts.up", (4, 6, 3), (4, 3, 6), out_in=True)
    with pytest.raises(
        PlacementError, match=r"experts.up: the model has shape \(4, 3, 6\), but its config.json asks for \(4, 6, 3\) \(\[experts, out, in\]\)"
    ):
        check_stack("experts.up", (4, 3, 6), (4, 3, 6), out_in=True)


def test_a_block_of_several_experts_turns_the_last_two_axes() -> None:
    canonical = torch.arange(24).view(2, 3, 4)
    block = Block("local", (0, 0, 0), "canonical", (0, 1, 0), (2, 4, 2), stacked=True)
    assert block.canonical_shape == (2, 2, 4)
    local = block.to_local(canonical[block.canonical_slices])
    assert local.tolist() == [[[4, 8], [5, 9], [6, 10], [7, 11]], [[16, 20], [17, 21], [18, 22], [19, 23]]]
    assert torch.equal(block.to_canonical(local), canonical[:, 1:])
    part = block.part((1, 2, 1), (1, 2, 1))
    assert (part.canonical_start, part.canonical_shape) == ((1, 2, 2), (1, 1, 2))
    assert part.to_local(canonical[part.canonical_slices]).tolist() == local[1:, 2:, 1:].tolist() == [[[22], [23]]]
