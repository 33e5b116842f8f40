"""The reference is transformers; where it fails the message says so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tangram.align.reference import load_reference, observe
from tangram.errors import CheckpointError
from tests.conftest import TinyHF


@pytest.fixture
def text_batch() -> dict[str, torch.Tensor]:
    ids = torch.arange(1, 9)[None]
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids), "position_ids": torch.arange(8).expand(3, 1, 8)}


def test_a_model_that_transformers_loads_and_cannot_run(tiny_hf: TinyHF, tmp_path: Path, text_batch: dict[str, torch.Tensor]) -> None:
    from transformers import AutoModelForImageTextToText

    folder = tmp_path / "hf"
    shutil.copytree(tiny_hf("qwen2_5_vl"), folder)
    config = json.loads((folder / "config.json").read_text())
    # Rotary sections wider than a head: transformers builds the model and its forward fails.
    rope = config["text_config"].get("rope_parameters") or config["text_config"]["rope_scaling"]
    rope["mrope_section"] = [16, 24, 24]
    (folder / "config.json").write_text(json.dumps(config))
    assert AutoModelForImageTextToText.from_pretrained(folder) is not None
    with pytest.raises(CheckpointError, match=r"hf: transformers cannot run it, .*: RuntimeError: .*correct its config"):
        observe(load_reference(folder), text_batch)


def test_a_model_that_transformers_cannot_load(tiny_hf: TinyHF, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    shutil.copytree(tiny_hf("qwen2_5_vl"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["num_attention_heads"] = 0
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="hf: transformers cannot load it: ZeroDivisionError"):
        load_reference(folder)
