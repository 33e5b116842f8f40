"""The Megatron engine against plain torch: one launch per number of processes, one test per split."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

WORKERS = Path(__file__).parents[1] / "workers"
sys.path.insert(0, str(WORKERS))

from engine_cases import CASES  # noqa: E402

from tests.trial import run  # noqa: E402


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """``launch(processes)``: everything that so many ranks of the worker print."""

    @cache
    def launch(processes: int) -> str:
        return run(tmp_path_factory.mktemp("engine"), [str(WORKERS / "engine_worker.py")], processes).output

    return launch


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("processes", "name"), [(processes, name) for processes, cases in CASES.items() for name in cases])
def test_split_trains_like_one_process(launch: Callable[[int], str], processes: int, name: str) -> None:
    output = launch(processes)
    if f"passed {name}\n" in output:
        return
    errors = [line for line in output.splitlines() if "AssertionError: case" in line]
    pytest.fail("\n".join(errors) if errors else output[-3000:], pytrace=False)
