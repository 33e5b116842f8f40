"""``tangram data`` with a run file of the fsdp2 backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from tangram.cli.main import main
from tests.config.fsdp2_kit import write_run


def test_data_commands_take_dataset_tokenizer_and_model_from_it(tmp_path: Path, model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = {"model_name_or_path": str(model_dir)}
    path = write_run(tmp_path, {"model": named, "data": {"dataset_param": {"preprocess_parameters": named}}}, samples=2)
    assert main(["data", "check", "--config", str(path), "--workers", "0"]) == 0
    assert "tokens of 2 samples: min " in capsys.readouterr().out
    assert main(["data", "show", str(tmp_path / "samples.json"), "1", "--config", str(path)]) == 0
    assert "Say 1." in capsys.readouterr().out
