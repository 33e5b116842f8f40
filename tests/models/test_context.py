"""Attention over a sequence that several ranks share gives what one rank would."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import on_ranks

CASES = Path(__file__).with_name("cases_context.py")


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("ranks", "rings"), [(2, [1, 2]), (3, [1, 3]), (4, [1, 2, 4])])
def test_ulysses_ring_and_both_are_attention_over_the_whole(ranks: int, rings: list[int]) -> None:
    for errors in on_ranks(ranks, CASES, "attend", rings):
        assert len(errors) == 8 * len(rings)
        wrong = {name: error for name, error in errors.items() if not error < 1e-12}  # so that NaN is wrong too
        assert not wrong
