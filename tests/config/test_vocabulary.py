"""The tokenizer of the data against the one that lies beside the weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tangram.config.preflight import check_run
from tangram.config.yaml_config import read_run
from tests.trial import Trial, write_trial


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    return write_trial(tmp_path_factory.mktemp("vocabulary"))


def faults(trial: Trial, folder: Path) -> list[str]:
    key = "data.dataset_param.preprocess_parameters.model_name_or_path"
    return [str(error) for error in check_run(read_run(trial.run_file, [f"{key}={folder}"]), 1).errors]


def test_a_tokenizer_with_other_ids_is_refused(trial: Trial, tmp_path: Path) -> None:
    """Two letters changed places: the special tokens are where they should be, and nothing else would notice."""
    shutil.copytree(trial.hf, tmp_path / "other")
    path = tmp_path / "other" / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    first, second = sorted((vocabulary["a"], vocabulary["b"]))
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(content))
    (fault,) = faults(trial, path.parent)
    assert f"model_name_or_path {path.parent}: 2 tokens have other ids than in {trial.hf}/tokenizer.json: " in fault
    assert f"'a' is {second} but {first} there; use the model's own tokenizer" in fault


def test_the_same_vocabulary_written_otherwise_or_with_more_tokens_passes(trial: Trial, tmp_path: Path) -> None:
    shutil.copytree(trial.hf, tmp_path / "other")
    path = tmp_path / "other" / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["ab"] = 300
    path.write_text(json.dumps(content, indent=3))
    assert not faults(trial, path.parent)
