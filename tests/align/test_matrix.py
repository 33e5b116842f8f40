"""Every family at every split against transformers: one launch of processes per family."""

from __future__ import annotations

from pathlib import Path

import pytest

from tangram.align.reference import load_reference
from tangram.align.run import align
from tangram.families.base import get_family
from tests.align.matrix import FAMILIES, PAGE, REFUSED, ROWS, SPLITS, page, refusals, write_model, write_rows


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_split_gives_the_loss_logits_and_gradients_of_transformers_or_is_refused(family: str, tmp_path: Path) -> None:
    hf = write_model(family, tmp_path / "hf")
    refused = set(refusals(family, hf))
    assert refused == REFUSED[family]
    names = [name for name in SPLITS if name not in refused]
    tensors = {get_family(family).canonical_name(name) for name in load_reference(hf).state_dict()} - {"lm_head.weight"}
    outcomes = align(hf, [SPLITS[name] for name in names], batch_file=write_rows(family, hf, tmp_path), micro_batch_size=2, pack=True)
    for name, outcome in zip(names, outcomes, strict=True):
        assert outcome.report.passed, f"{name}: {outcome.report.failures}"
        assert outcome.report.tolerance == 1e-5
        assert {row.name for row in outcome.report.rows if row.kind == "gradient"} - {"lm_head.weight"} == tensors, name
        assert {row.name for row in outcome.report.rows if row.kind == "logits"} == {"logits", "logits of the packed row"}, name


WITHOUT_PICTURES = {
    "llava": ["DP2, distributed optimizer", "DP2 x PP2, vision balanced"],
    "qwen3_vl_moe": ["DP2 x CP2, vision balanced", "PP2 x EP2"],
}
"""By family, splits over two copies. Of Qwen2.5-VL, ``test_packing`` has some."""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", WITHOUT_PICTURES)
def test_a_copy_of_the_model_may_have_text_alone(family: str, tmp_path: Path) -> None:
    """The copies' micro-batches come in turn, so the second one's have no picture."""
    hf = write_model(family, tmp_path / "hf")
    file = write_rows(family, hf, tmp_path, [ROWS[1], ROWS[2]])
    for outcome in align(hf, [SPLITS[name] for name in WITHOUT_PICTURES[family]], batch_file=file, micro_batch_size=1):
        assert outcome.report.passed and outcome.report.tolerance == 1e-5, f"{outcome.split}: {outcome.report.failures}"


def test_the_table_in_the_docs_is_that_of_the_tests() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text, "run python -m tests.align.matrix"
