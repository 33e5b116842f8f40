"""Memory features on two ranks: the engine's gradients with them are those without, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fsdp2.memory_kit import BLOCKS, LAYERS, offload, recompute
from tests.ranks import on_ranks

CASES = Path(__file__).with_name("cases_memory.py")
INNER = {"fsdp_plan": {"apply_modules": [*BLOCKS, "model.language_model.layers.{*}.mlp", *LAYERS]}}


def test_two_ranks_have_the_gradients_of_a_run_without(tiny_hf: Callable[..., Path], tmp_path: Path) -> None:
    both = recompute(*LAYERS, *BLOCKS)
    variants: dict[str, Any] = {
        "recompute": {"features": both},
        "offload": {"features": offload(*LAYERS, *BLOCKS), "parallel": INNER},
        "both": {"features": both | offload(*LAYERS, *BLOCKS)},
        "unit_within_reentrant": {"features": recompute(*LAYERS, *BLOCKS, use_reentrant=True), "parallel": INNER},
    }
    for rank in on_ranks(2, CASES, "against_none", tiny_hf("qwen2_5_vl", text_layers=2, vision_layers=2), tmp_path, variants, {}):
        for name in ("none", *variants):
            assert rank[name]["different"] == [], name
            assert rank[name]["names"] == rank["none"]["names"]
            assert rank[name]["layer"] == 1, name  # the unit's hooks run once: its weights are gathered outside
            assert rank[name]["validation"] == 1, name


def test_router_losses_are_those_of_a_run_without(tiny_hf: Callable[..., Path], tmp_path: Path) -> None:
    """Routers run again in the backward pass, when nobody collects what they say."""
    aux = {"loss_cfg": {"router_aux_loss_coef": 0.1}}
    variants = {"both": {"features": aux | recompute(*LAYERS, *BLOCKS) | offload(*LAYERS, *BLOCKS)}}
    hf = tiny_hf("qwen3_vl_moe", text_layers=2, vision_layers=2)
    (found,) = on_ranks(1, CASES, "against_none", hf, tmp_path, variants, {"features": aux})
    assert found["both"]["different"] == []
    assert any(name.endswith("mlp.gate.weight") for name in found["both"]["names"])
