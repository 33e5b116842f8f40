"""Run files, engines and batches for tests of the fsdp2 backend."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from tangram.align.batch import micro_batches
from tangram.align.default_batch import default_batch
from tangram.backends.fsdp2.engine import Fsdp2Engine
from tangram.checkpoints.hf_directory import HFDirectory
from tangram.checkpoints.load_hf import load_hf
from tangram.config.parsing import merge
from tangram.config.run import RunConfig
from tangram.config.yaml_config import read_run
from tangram.families import get_family

UNITS = ["model.visual.blocks.{*}", "model.visual.merger", "model.language_model.embed_tokens", "model.language_model.layers.{*}", "lm_head"]
PLAN = {"apply_modules": ["model.visual.blocks.{*}", "model.visual.merger", "model.language_model.layers.{*}"]}


def write_run(folder: Path, hf: Path, changes: Mapping[str, Any] | None = None) -> Path:
    """``run.yaml`` for the model in ``hf``: per-token loss, no weight decay, no warm-up; ``changes`` go on top."""
    content: dict[str, Any] = {
        "backend": "fsdp2",
        "parallel": {"fsdp_plan": dict(PLAN)},
        "model": {"model_name_or_path": str(hf)},
        "data": {"dataset_param": {"preprocess_parameters": {"model_name_or_path": str(hf)}, "basic_parameters": {"dataset": "data.json"}}},
        "features": {"loss_cfg": {"loss_type": "per_token_loss"}},
        "training": {"train_iters": 10, "lr": 1e-3, "init_model_with_meta_device": True},
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(merge(content, changes or {})), encoding="utf-8")
    return path


def engine_of(run: RunConfig) -> Fsdp2Engine:
    """The engine with the weights of the run's directory."""
    engine = Fsdp2Engine(run)
    assert run.model.load is not None
    _, placement, parameters = engine.chunks[0]
    load_hf(HFDirectory(run.model.load), [placement], [parameters], cast=True, shapes=engine.canonical_shapes)
    engine.weights_changed()
    return engine


def read(path: Path) -> RunConfig:
    return read_run(path)


def real_batch(hf: Path, rows: int = 1) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """The batch of ``tangram align`` (photographs, text alone, a video), whole and as micro-batches of ``rows`` rows."""
    family = get_family(str(yaml.safe_load((hf / "config.json").read_text())["model_type"]))
    model = family.from_hf_config(yaml.safe_load((hf / "config.json").read_text()))
    batch, _ = default_batch(hf, family, model)
    return batch, micro_batches(batch, model, rows)
