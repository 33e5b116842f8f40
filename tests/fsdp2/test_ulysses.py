"""Ranks that share the tokens of a sample, against transformers in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tangram.backends.fsdp2.ulysses import check_heads, shares
from tangram.errors import ConfigError
from tests.fsdp2.cases_parallel import Case, check
from tests.ranks import on_ranks

CASES = Path(__file__).with_name("cases_parallel.py")
SMALL = {"text_layers": 2, "vision_layers": 2, "hidden": 32, "vision_hidden": 32, "kv_heads": 2}
"""Four heads in text and vision, two for keys and values."""
ULYSSES = {"parallel": {"ulysses_parallel_size": 2}}
TinyHF = Callable[..., Path]


def test_two_ranks_share_text_and_patches_of_every_family(tiny_hf: TinyHF, tmp_path: Path) -> None:
    models = {name: tiny_hf(name, **SMALL) for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava")}
    recompute = {"recompute": True, "recompute_plan": {"apply_modules": ["model.language_model.layers.{*}", "model.visual"]}}
    one_size = ((("square", 3, 5), ("text", 8, 6)), (("square", 4, 4),))
    watch = ("model.language_model.layers.0.mlp", "model.visual.blocks.0.mlp")
    cases = {
        "windows": Case("qwen2_5_vl", {**ULYSSES, "model": {"attn_implementation": "eager"}}),
        "packed": Case("qwen2_vl", ULYSSES, packing=True, loss_type="per_sample_loss"),
        "deepstack": Case("qwen3_vl", {**ULYSSES, "features": recompute}),
        "counted": Case("qwen3_vl", ULYSSES, ((("image", 2, 4),),), watch=watch),
        "llava": Case(
            "llava", {**ULYSSES, "parallel": {**ULYSSES["parallel"], "fsdp_plan": {"apply_modules": ["model.language_model.layers.{*}"]}}}, one_size
        ),
    }
    results = on_ranks(2, CASES, "compare", models, tmp_path, cases)
    for found in results:
        check(found)
    # Two words, a start, six placeholders, a word, two of the question, four of the answer: 16 columns. 24 patches.
    assert [found["counted"]["seen"] for found in results] == [{watch[0]: [8], watch[1]: [12]}] * 2


def test_four_ranks_with_fewer_key_value_heads_and_as_two_pairs(tiny_hf: TinyHF, tmp_path: Path) -> None:
    models = {"qwen2_5_vl": tiny_hf("qwen2_5_vl", **SMALL)}
    cases = {
        "one group": Case("qwen2_5_vl", {"parallel": {"ulysses_parallel_size": 4}}),
        "pairs": Case("qwen2_5_vl", ULYSSES, loss_type="per_sample_loss"),
        "copies": Case("qwen2_5_vl", {"parallel": {**ULYSSES["parallel"], "fully_shard_parallel_size": 2}}, loss_type="default"),
    }
    for found in on_ranks(4, CASES, "compare", models, tmp_path, cases):
        check(found)


def test_parts_of_uneven_size_travel_with_their_gradients() -> None:
    first, second = on_ranks(2, CASES, "exchanges")
    assert first["columns"] == [[0, 1, 2], [4, 5, 6], [8, 9, 10]]
    assert second["columns"] == [[3], [7], [11]]
    assert first["everything"] == second["everything"] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    # Columns 0 to 2 count once, on rank 0, and column 3 twice, on rank 1; what was gathered counts once there and twice here.
    assert first["by_exchange"] == [[1, 1, 1, 2]] * 2
    assert second["by_exchange"] == [[1, 1, 1, 2]]
    assert first["by_gather"] == [[3] * 4] * 2
    assert second["by_gather"] == [[3] * 4]
    assert first["summed"] == [[0, 3, 6, 9], [12, 15, 18, 21]]
    assert second["summed"] == [[24, 27, 30, 33]]


def test_logits_are_put_together_from_all_columns(tiny_hf: TinyHF, tmp_path: Path) -> None:
    assert max(on_ranks(2, CASES, "columns", tiny_hf("qwen3_vl", **SMALL), tmp_path)) < 1e-5


def test_what_cannot_be_shared_is_refused(tiny_hf: TinyHF, tmp_path: Path) -> None:
    moe = tiny_hf("qwen3_vl_moe", **SMALL)
    changes = (
        {**ULYSSES, "features": {"loss_cfg": {"loss_type": "raw"}}},
        {**ULYSSES, "features": {"loss_cfg": {"router_aux_loss_coef": 0.1}}},
    )
    said = on_ranks(2, CASES, "refusals", [(moe, tmp_path / str(number), change) for number, change in enumerate(changes)])
    assert said[0] == said[1]
    assert "loss_type raw: the model's own loss needs whole samples, which parallel.ulysses_parallel_size 2 cuts; use default" in said[0][0]
    assert "router_aux_loss_coef 0.1: the routers' loss is one of whole micro-batches" in said[0][1]


def test_heads_must_be_shared_evenly() -> None:
    check_heads(28, 4, 4)
    check_heads(16, 2, 8)
    with pytest.raises(ConfigError, match=r"ulysses_parallel_size 8 must divide the 28 attention heads"):
        check_heads(28, 4, 8)
    with pytest.raises(ConfigError, match=r"ulysses_parallel_size 6 must divide the 4 key/value heads of the text model, or be a multiple"):
        check_heads(12, 4, 6)


def test_the_first_ranks_have_one_column_more() -> None:
    assert shares(11, 4) == [3, 3, 3, 2]
    assert shares(8, 4) == [2, 2, 2, 2]
