"""The CPU adaptation of megatron-core; see ``workers/cpu_adaptation_worker.py``, which runs once."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

WORKER = Path(__file__).parents[1] / "workers" / "cpu_adaptation_worker.py"


@cache
def output() -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(WORKER.parents[2]), "PYTHONWARNINGS": "ignore"}
    finished = subprocess.run([sys.executable, str(WORKER)], env=environment, capture_output=True, text=True, timeout=250, check=False)
    return finished.stdout + finished.stderr


@pytest.mark.parametrize(
    "check",
    [
        "leaves_torch_itself_alone",
        "wraps_once",
        "tensor_type_is_itself_again_after_an_error",
        "dropout_streams_are_megatrons",
        "recomputation_repeats_dropout",
        "missing_name_of_another_core_version_is_noticed",
    ],
)
def test_adaptation(check: str) -> None:
    assert f"passed {check}\n" in output(), output()[-3000:]
