"""Every family at every split against transformers: one launch of processes per family."""

from __future__ import annotations

from pathlib import Path

import pytest

from tangram.align.reference import load_reference
from tangram.align.run import align
from tangram.families.base import get_family
from tests.align.matrix import FAMILIES, PAGE, REFUSED, SPLITS, page, refusals, write_model, write_rows


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


def test_the_table_in_the_docs_is_that_of_the_tests() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text, "run python -m tests.align.matrix"
