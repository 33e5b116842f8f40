"""Qwen3-VL with experts, pictures and all, against transformers: experts over copies, stages and virtual stages, one launch for all splits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tangram.align.reference import load_reference
from tangram.align.run import align
from tangram.align.task import Split
from tangram.errors import ConfigError
from tangram.families.base import get_family
from tangram.families.tiny import TinySpec

SPLITS = {
    "experts over two of four copies, sharded optimizer": Split(data=4, expert=2, distributed_optimizer=True),
    "virtual stages": Split(pipeline=2, virtual=2, data=2, expert=2, vit_pp_layers=[[1, 1], [0, 0]], llm_pp_layers=[[0, 1], [1, 1]]),
}
SPEC = TinySpec(hidden=32, vocab=515, weight_std=0.1, text_layers=3, vision_layers=2, deepstack=(0, 1), experts=4)


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe") / "hf"
    get_family("qwen3_vl_moe").tiny(folder, 0, False, SPEC)
    return folder


@pytest.mark.compat
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_split_gives_the_loss_logits_and_gradients_of_transformers(hf: Path):
    names = set(load_reference(hf).state_dict())
    for name, outcome in zip(SPLITS, align(hf, list(SPLITS.values()), micro_batch_size=1), strict=True):
        assert outcome.report.passed, f"{name}: {outcome.report.failures}"
        assert outcome.report.tolerance == 1e-5
        compared = {row.name: row for row in outcome.report.rows if row.kind == "gradient"}
        assert compared.keys() == names and all(row.norm > 0 for row in compared.values()), name


@pytest.mark.slow
def test_bf16_stays_near_transformers_in_fp32_routers_included(hf: Path):
    (outcome,) = align(hf, [Split()], dtype="bf16")
    assert outcome.report.passed, outcome.report.failures
    routers = [row for row in outcome.report.rows if row.name.endswith(".mlp.gate.weight")]
    assert len(routers) == 3 and all(1e-3 < row.error for row in routers)


def test_a_split_that_experts_do_not_allow_is_refused_before_a_process_starts(hf: Path):
    with pytest.raises(ConfigError, match="expert_model_parallel_size 3 does not divide num_moe_experts 4; use one of 1, 2, 4"):
        align(hf, [Split(data=3, expert=3)])
    with pytest.raises(ConfigError, match="--dp 3 ranks cannot be divided into expert-parallel groups of 2; change --dp or --ep"):
        align(hf, [Split(data=3, expert=2)])
    with pytest.raises(ConfigError, match="--dp 1 x --cp 2 ranks cannot be divided into expert-parallel groups of 4; change --dp or --ep"):
        align(hf, [Split(context=2, expert=4)])
    with pytest.raises(ConfigError, match="tensor_model_parallel_size 2 with 4 experts needs sequence_parallel: "):
        align(hf, [Split(tensor=2)])
