"""Odd models, odd batches and splits drawn at random, against transformers: a fixed slice of what ``tests.align.odd`` draws without end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.align.odd import draw

SLICE = {"llava": 203, "qwen3_vl": 203}
"""Seeds: a tower with layers that take no part, at TP4 and over six chunks; DeepStack over six chunks; context ranks of every kind."""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", SLICE)
def test_what_the_check_accepts_gives_the_loss_logits_and_gradients_of_transformers(family: str, tmp_path: Path) -> None:
    drawn = draw(SLICE[family], family, tmp_path, splits=5)
    assert len(drawn.splits) == 5
    for outcome in drawn.compare():
        assert outcome.report.passed and outcome.report.tolerance == 1e-5, f"{outcome.split}: {outcome.report.failures}"
