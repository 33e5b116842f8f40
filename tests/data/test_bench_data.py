"""The bench of the data room runs, compares like with like, and gives every figure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_bench_measures_both_sides(tmp_path: Path) -> None:
    """The bench itself checks that both sides read as many patches, and that both conversions give the same value."""
    command = [sys.executable, "bench/data.py", "--parts", "loader,llava,positions", "--rounds", "1", "--scale", "0.01", "--dir", tmp_path]
    subprocess.run([*command, "--json", tmp_path / "out.json"], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    report = json.loads((tmp_path / "out.json").read_text())
    assert set(report["loader"]["samples_per_second"]) == {"transformers", "workers 0", "workers 1", "workers 2"}
    assert report["llava"]["records"] == 1577 and set(report["llava"]["medians"]) == {"ours", "plain", "plain compact"}
    assert 0 < report["positions"]["share_of_collation"] < 1
    assert report["machine"]["cores"] >= 1
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
