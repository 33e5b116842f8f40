"""Splits and sizes of experts: what ``tangram check`` says of them, before a process starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tangram.align.run import Subject as Model
from tangram.align.run import make_task, open_subject
from tangram.align.task import Split
from tangram.backends.megatron.parallel import data_parallel_size
from tangram.config.preflight_rules import GATES, Subject, experts, tensor_parallel, world_size
from tangram.errors import ConfigError

TWO_OF_FOUR = Split(context=2, expert=4, data=2)


@pytest.fixture
def model(tiny_hf: Callable[..., Path], tmp_path: Path) -> Model:
    return open_subject(tiny_hf("qwen3_vl_moe"), tmp_path)


def subject(model: Model, split: Split, folder: Path, world: int, text: dict[str, Any] | None = None, **parallel: Any) -> Subject:
    """The run that ``tangram check`` looks at."""
    decoder = model.model.text_decoder.model_copy(update=text or {})
    changed = replace(model, model=model.model.model_copy(update={"text_decoder": decoder}))
    run = make_task(changed, split, folder / "batch", folder, micro_batch_size=1).run_config()
    return Subject(run.model_copy(update={"parallel": run.parallel.model_copy(update=parallel)}), world)


def test_experts_are_divided_over_context_and_data_parallel_ranks(model: Model, tmp_path: Path) -> None:
    found = subject(model, TWO_OF_FOUR, tmp_path, 4)
    assert world_size(found) == "4 processes = TP 1 x CP 2 x PP 1 x DP 2, of which 4 share the experts"
    assert experts(found) == "2 of 4 for a token, one after the other, 1 on each of 4 ranks by alltoall"
    assert world_size(replace(found, world_size=None)) == "a multiple of 4 processes is needed"
    assert found.topology.process_unit == 4 and data_parallel_size(8, found.topology) == 4


def test_a_number_of_processes_that_experts_do_not_divide_is_refused(model: Model, tmp_path: Path) -> None:
    found = subject(model, TWO_OF_FOUR, tmp_path, 6)
    with pytest.raises(
        ConfigError,
        match="6 processes cannot be split into tensor-parallel 1 x context-parallel 2 x pipeline-parallel 1 = 2, and their context- and "
        "data-parallel ranks by expert-parallel 4; start a multiple of 4 processes",
    ):
        world_size(found)
    with pytest.raises(ConfigError, match="makes 3 data-parallel x 2 context-parallel ranks, which expert-parallel size 4 does not divide; start a "):
        data_parallel_size(6, found.topology)


@pytest.mark.parametrize(
    ("text", "parallel", "message"),
    [
        ({}, {"expert_model_parallel_size": 3}, "expert_model_parallel_size 3 does not divide num_moe_experts 4; use one of 1, 2, 4"),
        ({"num_moe_experts": 5}, {"expert_model_parallel_size": 2}, "size 2 does not divide num_moe_experts 5; use one of 1, 5"),
        ({"moe_router_topk": 1}, {}, "moe_router_topk 1: the weight of the only expert is always 1, so the router cannot learn; use 2 or more"),
        ({"moe_intermediate_size": 27}, {"tensor_model_parallel_size": 2, "sequence_parallel": True}, "does not divide text_decoder.moe_interm"),
        ({"moe_intermediate_size": 27}, {"moe_grouped_gemm": True}, "of moe_intermediate_size 27 / tensor-parallel size 1 have 108; set it to false"),
    ],
)
def test_sizes_that_do_not_run_are_refused_with_the_numbers(
    model: Model, tmp_path: Path, text: dict[str, Any], parallel: dict[str, Any], message: str
) -> None:
    rules = [*(rule for _, rule in GATES), tensor_parallel, experts]
    found = subject(model, Split(), tmp_path, 2)
    assert all(rule(found) for rule in rules)
    decoder = found.model.text_decoder.model_copy(update=text)
    source = found.run.model.model_copy(update={"config": found.run.described.model_copy(update={"text_decoder": decoder})})
    changed = {"parallel": found.run.parallel.model_copy(update=parallel), "model": source}
    with pytest.raises(ConfigError, match=message):
        [rule(Subject(found.run.model_copy(update=changed), 2)) for rule in rules]


def test_settings_of_experts_are_refused_for_a_model_without_them(tiny_hf: Callable[..., Path], tmp_path: Path) -> None:
    dense = open_subject(tiny_hf("qwen2_5_vl"), tmp_path)
    found = subject(dense, Split(), tmp_path, 1, moe_grouped_gemm=False, moe_token_dispatcher_type="allgather")
    with pytest.raises(ConfigError, match="parallel.moe_token_dispatcher_type allgather, parallel.moe_grouped_gemm False: the model qwen2_5_vl"):
        experts(found)
