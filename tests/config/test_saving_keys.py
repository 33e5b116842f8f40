"""Keys of saving and loading that contradict each other, or what lies on the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tangram.checkpoints.kinds import kind_of_weights
from tangram.config.parsing import parse_section
from tangram.config.run import ModelSource, TrainingConfig
from tangram.errors import CheckpointError, ConfigError


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"save_async": True}, "save_async needs save"),
        ({"save_total_limit": 2}, "save_total_limit 2 needs save"),
        ({"save_hf_interval": 2}, "save_hf_interval 2 needs save"),
        ({"save": "x", "save_total_limit": 0}, "greater than or equal to 1"),
        ({"save": "x", "save_format": "hf", "save_async": True}, "written while training waits; remove save_async, or write save_format dcp"),
        ({"save": "x", "save_format": "hf", "save_total_limit": 2}, "it counts training checkpoints, and none is written"),
        ({"save": "x", "save_format": "hf", "save_hf_interval": 2}, "save_interval says when they are written"),
    ],
)
def test_keys_that_would_do_nothing_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_section(TrainingConfig, {"lr": 1e-3, **keys}, "run.yaml")
    assert "\n" not in str(caught.value)


def test_a_format_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="load_format dcp, but there is nothing to load"):
        parse_section(ModelSource, {"load_format": "dcp"}, "run.yaml")


def test_what_lies_there_is_named_where_the_format_is_another(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    assert kind_of_weights(tmp_path, "load", "hf") == kind_of_weights(tmp_path, "load") == "Hugging Face directory"
    with pytest.raises(CheckpointError, match="load_format dcp asks for a training checkpoint, but a Hugging Face directory lies there"):
        kind_of_weights(tmp_path, "load", "dcp")
    (tmp_path / "iter_0000001").mkdir()
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "iter_0000001" / ".metadata").touch()
    with pytest.raises(CheckpointError, match="load_format hf asks for a Hugging Face directory, but a training checkpoint lies there"):
        kind_of_weights(tmp_path, "load", "hf")
