"""What follows in a run file when a replay has another split."""

from __future__ import annotations

from typing import Any

import pytest

from tangram.align.gate.replay_split import Wishes, split_fsdp2, split_megatron
from tangram.config.model import ModelConfig
from tangram.errors import ConfigError

TWO_BY_TWO = {
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
    "pipeline_model_parallel_size": 2,
    "vit_pp_layers": [4, 0],
    "llm_pp_layers": [1, 3],
}


def content_of(experts: int | None = None, **parallel: Any) -> dict[str, Any]:
    text = {"num_layers": 4, "pipeline_num_layers": [1, 3], **({"num_moe_experts": experts} if experts else {})}
    return {"parallel": parallel, "training": {}, "model": {"config": {"image_encoder": None, "text_decoder": text}}}


def nobody_asks() -> ModelConfig:
    raise AssertionError("the run file describes the model")


def split(content: dict[str, Any], wishes: Wishes, copies: int = 1, accumulation: int = 8) -> dict[str, Any]:
    before = dict(content["parallel"])
    split_megatron(content, wishes, copies, accumulation, nobody_asks)
    return {key: value for key, value in content["parallel"].items() if before.get(key) != value}


def test_sequence_parallelism_goes_with_tensor_parallelism() -> None:
    assert split(content_of(**TWO_BY_TWO), Wishes(tensor=1)) == {"tensor_model_parallel_size": 1, "sequence_parallel": False}
    assert split(content_of(**TWO_BY_TWO), Wishes(tensor=4)) == {"tensor_model_parallel_size": 4}
    assert split(content_of(**TWO_BY_TWO), Wishes(tensor=2, pipeline=2)) == {}
    # Experts on tensor-parallel ranks need it.
    changed = split(content_of(8, tensor_model_parallel_size=1), Wishes(tensor=2))
    assert changed == {"tensor_model_parallel_size": 2, "sequence_parallel": True}


def test_the_vision_encoder_keeps_the_largest_part_of_its_size_that_divides() -> None:
    content = content_of(tensor_model_parallel_size=4, vision_tensor_model_parallel_size=2)
    assert split(content, Wishes(tensor=2)) == {"tensor_model_parallel_size": 2}
    assert split(content, Wishes(tensor=1))["vision_tensor_model_parallel_size"] == 1


@pytest.mark.parametrize(("copies", "context", "experts"), [(4, 1, 4), (2, 1, 2), (1, 1, 1), (1, 4, 4), (3, 2, 2), (6, 1, 2)])
def test_experts_are_divided_over_the_ranks_that_are_there(copies: int, context: int, experts: int) -> None:
    content = content_of(8, expert_model_parallel_size=4, context_parallel_size=context)
    split(content, Wishes(data=copies), copies)
    assert content["parallel"]["expert_model_parallel_size"] == experts and content["parallel"]["context_parallel_size"] == context


def test_virtual_stages_need_micro_batches_that_fill_them() -> None:
    virtual = {"pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 2, "llm_pp_layers": [[1, 0, 0, 1], [1, 1, 0, 0]]}
    assert split(content_of(**virtual), Wishes(data=2), 2, accumulation=8) == {}
    with pytest.raises(ConfigError, match="6 micro-batches per step on each of 2 data-parallel ranks are no multiple of the 4 stages"):
        split(content_of(**virtual), Wishes(data=2), 2, accumulation=6)
    # Other stages have none.
    changed = split(content_of(**virtual), Wishes(pipeline=1), 2, accumulation=6)
    assert changed == {"pipeline_model_parallel_size": 1, "virtual_pipeline_model_parallel_size": None, "llm_pp_layers": None}


def test_shards_and_experts_of_the_other_backend_fit_the_ranks() -> None:
    content = content_of(fully_shard_parallel_size=4, ulysses_parallel_size=2, expert_parallel_size=4, expert_fully_shard_parallel_size=2)
    split_fsdp2(content, Wishes(data=4), 4, 2)
    assert content["parallel"]["fully_shard_parallel_size"] == 4 and content["parallel"]["expert_parallel_size"] == 4
    split_fsdp2(content, Wishes(data=1), 1, 8)
    assert content["parallel"] == {
        "data_parallel_size": 1,
        "fully_shard_parallel_size": "auto",
        "ulysses_parallel_size": 2,
        "expert_parallel_size": 2,
        "expert_fully_shard_parallel_size": None,
    }
    assert content["training"] == {"gradient_accumulation_steps": 8}
