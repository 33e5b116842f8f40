"""``pretrain_vlm.py`` and an entry ported from Megatron-LM: the same run from the same flags."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def run(script: Path, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    files = ["--mm-model", str(folder / "model.json"), "--mm-data", str(folder / "data.json"), "--load", str(folder / "hf")]
    numbers = ["--micro-batch-size", "1", "--global-batch-size", "2", "--seq-length", "64", "--lr", "1e-3", "--calculate-per-token-loss"]
    command = [sys.executable, str(script), *files, *numbers, "--lr-decay-style", "constant", *more]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250, check=False)


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def folder(tiny_hf: Any, tmp_path: Path) -> Path:
    from tangram.families.base import get_family

    hf = tiny_hf("qwen2_5_vl", True, hidden=32, text_layers=2, vision_layers=1, vocab=None)
    (tmp_path / "hf").symlink_to(hf)
    model = get_family("qwen2_5_vl").from_hf_config(json.loads((hf / "config.json").read_text()))
    (tmp_path / "model.json").write_text(model.model_dump_json(exclude_none=True))
    records = [
        {"messages": [{"role": "user", "content": f"Say {i}."}, {"role": "assistant", "content": f"It is {i}."}], "images": []} for i in range(8)
    ]
    (tmp_path / "samples.json").write_text(json.dumps(records))
    basic = {"dataset": str(tmp_path / "samples.json"), "dataset_dir": str(tmp_path)}
    data = {"dataset_param": {"preprocess_parameters": {"model_name_or_path": str(hf)}, "basic_parameters": basic}}
    (tmp_path / "data.json").write_text(json.dumps(data))
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_ported_entry_trains_like_ours_and_its_own_flag_has_effect(folder: Path) -> None:
    ours = run(ROOT / "pretrain_vlm.py", folder, "--train-iters", "3", "--save", "ours")
    assert ours.returncode == 0, ours.stdout[-2000:] + ours.stderr[-2000:]
    ported = run(ROOT / "tests" / "workers" / "ported_entry.py", folder, "--save", "ported", "--loss-factor", "2")
    assert ported.returncode == 0, ported.stdout[-2000:] + ported.stderr[-2000:]
    mine, theirs = losses(folder / "ours"), losses(folder / "ported")
    assert len(mine) == len(theirs) == 3 and mine[2] < mine[0]
    # The same data and weights at the first step; a loss of twice the size.
    assert theirs[0] == pytest.approx(2 * mine[0], rel=1e-6)


def test_a_fault_of_the_user_is_one_line(folder: Path) -> None:
    finished = run(ROOT / "pretrain_vlm.py", folder, "--train-iters", "3", "--tensor-model-parallel-size", "3")
    lines = [line for line in finished.stderr.splitlines() if line.strip()]
    assert finished.returncode == 2 and len(lines) == 1 and lines[0].startswith("pretrain_vlm.py: error: "), finished.stderr
