"""The conversion scripts of examples/qwen3vl, on a small model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import TinyHF

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("script", "family", "expert"), [("convert_8b.sh", "qwen3_vl", 1), ("convert_30b.sh", "qwen3_vl_moe", 2)])
def test_scripts_convert_there_and_back(script: str, family: str, expert: int, tiny_hf: TinyHF, tmp_path: Path) -> None:
    hf = tiny_hf(family)
    command = tmp_path / "bin" / "mm-convert"
    command.parent.mkdir()
    command.write_text(f'#!/bin/bash\nexec "{sys.executable}" -m tangram.cli.mm_convert "$@"\n')
    command.chmod(0o755)
    split = {"TP": "2", "LLM_PP": "[1,3]", "VIT_PP": "[4,0]"}
    environment = {**os.environ, **split, "PATH": f"{command.parent}:{os.environ['PATH']}", "HF_DIR": str(hf), "MM_DIR": str(tmp_path / "mm")}
    for words in ([], ["mm_to_hf"]):
        ended = subprocess.run(["bash", str(ROOT / "examples/qwen3vl" / script), *words], env=environment, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
    assert len(list((tmp_path / "mm" / "release").iterdir())) == 2 * 2 * expert
    written, read = load_file(tmp_path / "mm-hf" / "model.safetensors"), load_file(hf / "model.safetensors")
    assert set(written) == set(read)
    assert all(torch.equal(written[name], read[name]) for name in read)
