"""The bench runs, converts right and gives every figure."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_bench_measures_both_directions(tmp_path):
    command = [sys.executable, "bench/convert.py", "--size", "tiny", "--tp", "2", "--pp", "2", "--rounds", "1", "--dir", tmp_path]
    subprocess.run([*command, "--json", tmp_path / "out.json"], cwd=ROOT, env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, check=True)
    report = json.loads((tmp_path / "out.json").read_text())
    assert set(report["results"]) == {f"{way} {what}" for way in ("hf_to_mm", "mm_to_hf") for what in ("cp+sync", "ours", "plain")}
    ours = report["results"]["hf_to_mm ours"]
    assert ours["written_call_bytes"] >= 0.9 * report["files"]["mm_bytes"] and ours["peak_anonymous_bytes"] > 10e6 and ours["ratio"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
