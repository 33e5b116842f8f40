"""Qwen3-VL's DeepStack wherever the pipeline is cut, against transformers: one launch of processes, all splits inside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tangram.align.reference import load_reference
from tangram.align.run import align
from tangram.align.task import Split
from tangram.families.base import get_family
from tangram.families.tiny import TinySpec

SPLITS = {
    False: {
        "three uneven stages": Split(pipeline=3, vit_pp_layers=[2, 2, 0], llm_pp_layers=[0, 1, 3]),
        "features over four stages": Split(pipeline=4, vit_pp_layers=[2, 2, 0, 0], llm_pp_layers=[0, 1, 1, 2]),
    },
    True: {
        "two features cross to the second stage": Split(tensor=2, pipeline=2, llm_pp_layers=[1, 3]),
        "virtual stages": Split(pipeline=2, virtual=2, vit_pp_layers=[[3, 1], [0, 0]], llm_pp_layers=[[0, 1], [1, 2]]),
        "text from the third stage": Split(pipeline=4, vit_pp_layers=[1, 3, 0, 0], llm_pp_layers=[0, 0, 1, 3]),
    },
}
"""Of models with and without tied embeddings, beside those of ``tests.align.matrix``."""
SPEC = TinySpec(hidden=32, vocab=515, weight_std=0.1, deepstack=(0, 1, 3))
"""Three features, two of them from the tower's first half, and the last from its last block."""


@pytest.mark.compat
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_every_split_gives_the_loss_logits_and_gradients_of_transformers(tied: bool, tmp_path: Path):
    """Micro-batches of one row each: images, a video, and text alone."""
    get_family("qwen3_vl").tiny(tmp_path / "hf", 0, tied, SPEC)
    outcomes = align(tmp_path / "hf", list(SPLITS[tied].values()), micro_batch_size=1)
    names = set(load_reference(tmp_path / "hf").state_dict()) - ({"lm_head.weight"} if tied else set())
    for name, outcome in zip(SPLITS[tied], outcomes, strict=True):
        assert outcome.report.passed, f"{name}: {outcome.report.failures}"
        assert outcome.report.tolerance == 1e-5
        compared = {row.name: row for row in outcome.report.rows if row.kind == "gradient"}
        assert compared.keys() == names, name
        assert all(row.norm > 0 for row in compared.values()), name
