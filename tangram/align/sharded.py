"""A model on the fsdp2 backend, as a comparison runs it: how many processes, and its run file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field

from tangram.config.parsing import Section
from tangram.config.run import RunConfig
from tangram.config.yaml_config import read_run
from tangram.errors import ConfigError

RUN_FILE = "run.yaml"
OWN_KEYS = {
    "backend": "--backend",
    "data": "--batch",
    "model.model_name_or_path": "--hf",
    "parallel.fsdp_plan.param_dtype": "--dtype",
    "features.loss_cfg.loss_type": "nothing: the reference's loss is the mean over tokens",
    "training.load": "--checkpoint",
    "training.random_init": "--checkpoint",
    "training.micro_batch_size": "--micro-batch-size",
    "training.train_iters": "--steps",
    "training.lr": "--lr",
    "training.plugin": "--plugin",
}
"""Keys of the run file that a comparison sets itself, and the option that says what to."""

QWEN_UNITS = ("model.visual.blocks.{*}", "model.visual.merger", "model.language_model.layers.{*}")
UNITS: dict[str, tuple[str, ...]] = {
    "qwen2_vl": QWEN_UNITS,
    "qwen2_5_vl": QWEN_UNITS,
    "qwen3_vl": (*QWEN_UNITS, "model.visual.deepstack_merger_list.{*}"),
    "qwen3_vl_moe": (*QWEN_UNITS, "model.visual.deepstack_merger_list.{*}"),
    "llava": ("model.vision_tower.*encoder.layers.{*}", "model.multi_modal_projector", "model.language_model.layers.{*}"),
}
"""Modules that are sharded as units of their own where the settings do not say which, by family; of another family the root is the only unit."""


class Sharded(Section):
    """How the model is run on the fsdp2 backend."""

    processes: int = Field(default=1, ge=1)
    settings: list[str] = []
    """``section.key=value`` of the run file."""

    @property
    def backend(self) -> Literal["fsdp2"]:
        return "fsdp2"

    def __str__(self) -> str:
        ranks = f"FSDP2 on {self.processes} rank{'s' if self.processes > 1 else ''}"
        return ", ".join([ranks, *self.settings])


def write_run_file(
    folder: Path,
    sharded: Sharded,
    hf_dir: Path,
    family: str,
    *,
    dtype: str,
    micro_batch_size: int,
    seed: int,
    steps: int,
    lr: float,
    clip_grad: float,
) -> None:
    """Write the run file of a comparison, on which ``sharded.settings`` are laid when it is read.

    Args:
        family: says which modules are sharded as units of their own.

    Raises:
        ConfigError: a setting of ``OWN_KEYS``.
    """
    _refuse_own(sharded.settings)
    plan: dict[str, Any] = {"apply_modules": list(UNITS.get(family, ()))}
    if dtype != "fp32":
        plan |= {"param_dtype": dtype, "reduce_dtype": "fp32"}
    files = {"preprocess_parameters": {"model_name_or_path": str(hf_dir)}, "basic_parameters": {"dataset": "no dataset: the batch is given"}}
    training = {"train_iters": steps, "lr": lr, "clip_grad": clip_grad, "micro_batch_size": micro_batch_size, "seed": seed}
    content = {
        "backend": "fsdp2",
        "parallel": {"fsdp_plan": plan},
        "data": {"dataset_param": files},
        "model": {"model_name_or_path": str(hf_dir)},
        "features": {"loss_cfg": {"loss_type": "per_token_loss"}},
        "training": {**training, "weight_decay": 0.0, "init_model_with_meta_device": True},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RUN_FILE).write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


def read_run_file(folder: Path, sharded: Sharded) -> RunConfig:
    """The run of a comparison.

    Raises:
        ConfigError: settings that the run file's schema does not have, or that do not fit.
    """
    return read_run(folder / RUN_FILE, sharded.settings)


def _refuse_own(settings: Sequence[str]) -> None:
    for setting in settings:
        key = setting.partition("=")[0].strip()
        for own, option in OWN_KEYS.items():
            if key == own or key.startswith(f"{own}."):
                raise ConfigError(f"setting {setting!r}: a comparison sets {own} itself; what says it is {option}")
            if own.startswith(f"{key}."):
                raise ConfigError(f"setting {setting!r}: a comparison sets {own} itself, which lies in it; give its other keys one by one")
