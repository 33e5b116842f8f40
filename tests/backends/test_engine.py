"""The Megatron engine against plain torch: one launch per number of processes, one test per split."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

WORKERS = Path(__file__).parents[1] / "workers"
sys.path.insert(0, str(WORKERS))

from engine_cases import CASES  # noqa: E402


@cache
def launch(processes: int) -> str:
    """Everything that the worker printed; the launch is killed after five minutes, as a hang must not hold the tests."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", str(WORKERS / "engine_worker.py")]
    root = str(WORKERS.parents[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root, "PYTHONWARNINGS": "ignore"}
    finished = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300, check=False)
    return finished.stdout + finished.stderr


@pytest.mark.timeout(330)
@pytest.mark.parametrize(("processes", "name"), [(processes, name) for processes, cases in CASES.items() for name in cases])
def test_split_trains_like_one_process(processes: int, name: str) -> None:
    output = launch(processes)
    if f"passed {name}\n" in output:
        return
    errors = [line for line in output.splitlines() if "AssertionError: case" in line]
    pytest.fail("\n".join(errors) if errors else output[-3000:], pytrace=False)
