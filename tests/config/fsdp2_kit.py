"""A small run file of the fsdp2 backend with all files that it names; nothing of it needs torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tangram.config.parsing import merge
from tests.config.conftest import HF_CONFIG, PROCESSOR

NO_TENSORS = (2).to_bytes(8, "little") + b"{}"
"""A safetensors file with nothing in it."""

CONTENT: dict[str, Any] = {
    "backend": "fsdp2",
    "parallel": {"fsdp_plan": {"apply_modules": ["model.visual.blocks.{*}", "model.language_model.layers.{*}"]}},
    "data": {"dataset_param": {"preprocess_parameters": {"model_name_or_path": "hf"}, "basic_parameters": {"dataset": "samples.json"}}},
    "model": {"model_name_or_path": "hf"},
    "training": {"train_iters": 10, "lr": 1e-3},
}


def write_hf(folder: Path, changes: Mapping[str, Any] | None = None, weights: bool = True) -> Path:
    """``hf`` in ``folder``: config.json, a tokenizer in name, and no weights in a file of weights."""
    hf = folder / "hf"
    hf.mkdir(parents=True, exist_ok=True)
    (hf / "config.json").write_text(json.dumps(merge(HF_CONFIG, changes or {})))
    (hf / "tokenizer.json").write_text("{}")
    (hf / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    if weights:
        (hf / "model.safetensors").write_bytes(NO_TENSORS)
    return hf


def write_run(folder: Path, changes: Mapping[str, Any] | None = None, samples: int = 8) -> Path:
    """``run.yaml`` in ``folder``, with ``changes`` on top of ``CONTENT``, and the files that it names."""
    write_hf(folder)
    turns = [[{"role": "user", "content": f"Say {i}."}, {"role": "assistant", "content": str(i)}] for i in range(samples)]
    (folder / "samples.json").write_text(json.dumps([{"images": [], "messages": messages} for messages in turns]))
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(merge(CONTENT, changes or {})))
    return path
