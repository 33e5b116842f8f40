"""Tiny runs that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.trial import Trial, write_trial

Trials = Callable[[bool], Trial]


@pytest.fixture(scope="session")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Trials:
    """``trials(tied)``: the run's folder; read it only."""
    made: dict[bool, Trial] = {}

    def make(tied: bool = False) -> Trial:
        if tied not in made:
            made[tied] = write_trial(tmp_path_factory.mktemp("trial") / ("tied" if tied else "untied"), tied=tied)
        return made[tied]

    return make


@pytest.fixture(scope="session")
def trial(trials: Trials) -> Trial:
    """Untied embeddings."""
    return trials(False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"
