"""A family that no backend runs is refused before any process starts, in one line."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tangram.cli.main import main
from tangram.errors import ConfigError
from tangram.families import get_family, has_family, register_family
from tests.config.conftest import Files
from tests.conftest import TinyHF

EXAMPLES = Path(__file__).parents[2] / "examples" / "qwen3vl"
LINE = "family half_vl: weights can be converted, the megatron backend does not run it yet; use fsdp2"


@pytest.fixture(autouse=True)
def half_vl() -> None:
    """A family like Qwen3-VL that only fsdp2 runs."""
    if not has_family("half_vl"):
        register_family(replace(get_family("qwen3_vl"), name="half_vl", model_ids=(), backends=("fsdp2",)))


@pytest.fixture
def run_file(tmp_path: Path) -> str:
    data = Files(tmp_path).write() / "data.json"
    model = tmp_path / "half.json"
    model.write_text(json.dumps({**json.loads((EXAMPLES / "model_8b.json").read_text()), "model_id": "half_vl"}))
    parallel = "parallel: {pipeline_model_parallel_size: 4}\n"
    text = f"{parallel}model: {{config: {model}}}\ndata: {{config: {data}}}\ntraining: {{lr: 1e-3, seq_length: 64}}\n"
    (tmp_path / "run.yaml").write_text(text)
    return str(tmp_path / "run.yaml")


def test_check_says_so_and_nothing_else(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", run_file]) != 0
    printed = capsys.readouterr()
    assert LINE in printed.out + printed.err
    assert "processes" not in printed.out


def test_train_starts_no_process(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", run_file]) == 2
    printed = capsys.readouterr()
    assert printed.err.strip() == f"tangram: error: {LINE}"
    assert "starting" not in printed.out


def test_align_starts_no_process(tiny_hf: TinyHF, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(tiny_hf("qwen3_vl"), tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "half_vl"}))
    assert main(["align", "--hf", str(folder)]) == 2
    assert capsys.readouterr().err.strip().endswith(f"tangram: error: {LINE}")


def test_families_that_run_say_where() -> None:
    get_family("qwen2_5_vl").check_backend("megatron")
    other = replace(get_family("qwen2_5_vl"), backends=("fsdp2",))
    with pytest.raises(ConfigError, match="family qwen2_5_vl: weights can be converted, the megatron backend does not run it yet; use fsdp2$"):
        other.check_backend("megatron")
