"""A run file of one backend as one of the other, as far as both can do what it says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tangram.align.sharded import UNITS
from tangram.config.fsdp2 import Fsdp2Config
from tangram.config.run import FeaturesConfig, ParallelConfig
from tangram.errors import ConfigError

ALIKE = (
    *("micro_batch_size", "train_iters", "seq_length", "seed", "lr", "lr_decay_style", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps"),
    *("clip_grad", "log_interval", "exit_interval", "manual_gc_interval", "metrics_file"),
)
"""Keys of ``training`` that both have, with the same meaning."""
NAMES = {"min_lr": "lr_min", "lr_warmup_init": "lr_start", "deterministic": "use_deter_comp"}
"""megatron -> fsdp2."""
WITHOUT_DECAY = {"no_decay_modules": ["Norm"], "no_decay_params": ["bias"]}
"""What megatron spares of weight decay: all that has one dimension."""
GONE = ("global_batch_size", "gradient_accumulation_steps")
"""Set from the global batch."""


def to_fsdp2(content: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Of a megatron run file.

    Raises:
        ConfigError: it says something that the fsdp2 backend has not, or that lies elsewhere there.
    """
    training, model = content["training"], content["model"]
    _only_defaults("features", content["features"], FeaturesConfig().model_dump())
    if model["hf_dir"] is None:
        raise ConfigError(
            "--backend fsdp2: the baseline's model is described by model.json alone, and fsdp2 needs a Hugging Face directory (model.hf_dir)"
        )
    if training["dtype"] == "fp16":
        raise ConfigError("--backend fsdp2: it has no loss scaling, and the baseline is of fp16; make a baseline in bf16 or fp32")
    frozen = [part for part in _components(model["config"]) if part.get("freeze")]
    if frozen:
        raise ConfigError("--backend fsdp2: the baseline freezes components, which fsdp2 says by patterns of modules; write a run file for it")
    if training["eval_interval"]:
        raise ConfigError("--backend fsdp2: the baseline has validation in between; make one without eval_interval")
    iterations, schedule = training["train_iters"], facts["schedule"]
    if schedule["lr_decay_steps"] > iterations:
        raise ConfigError(f"--backend fsdp2: the learning rate decays over {schedule['lr_decay_steps']} steps, more than the run's {iterations}")
    plan: dict[str, Any] = {"apply_modules": list(UNITS.get(facts["family"], ()))}
    if training["dtype"] != "fp32":
        plan |= {"param_dtype": training["dtype"], "reduce_dtype": "fp32"}
    own = {key: training[key] for key in ALIKE} | {theirs: training[mine] for mine, theirs in NAMES.items()}
    own |= {
        # Whole steps again when the backend multiplies and rounds down.
        "lr_warmup_ratio": _ratio(int(schedule["lr_warmup_steps"]), iterations),
        "lr_decay_ratio": min(1.0, _ratio(schedule["lr_decay_steps"], iterations)),
        "load": model["load"],
        "load_format": model["load_format"],
        "random_init": model["load"] is None,
        "init_model_with_meta_device": True,
        "plugin": model["plugin"],
    }
    if training["weight_decay"]:
        own |= WITHOUT_DECAY
    data = {**content["data"], "dataloader_param": {**content["data"]["dataloader_param"], "num_workers": training["num_workers"]}}
    return {
        "backend": "fsdp2",
        "parallel": {"fsdp_plan": plan},
        "data": data,
        "model": {"model_name_or_path": model["hf_dir"]},
        "features": {"loss_cfg": {"loss_type": training["loss_type"]}},
        "training": own,
        "tools": {},
    }


def to_megatron(content: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Of an fsdp2 run file.

    Raises:
        ConfigError: it says something that the megatron backend has not, or that lies elsewhere there.
    """
    training, model, features = content["training"], content["model"], content["features"]
    loss_type = features["loss_cfg"]["loss_type"]
    if loss_type == "raw":
        raise ConfigError("--backend megatron: loss_type raw is the loss of a class of transformers; make a baseline with another loss_type")
    if model["freeze"]:
        raise ConfigError("--backend megatron: the baseline freezes modules by patterns, which megatron says by components; write a run file for it")
    if training["train_iters"] is None or training["val_interval"]:
        raise ConfigError("--backend megatron: the baseline counts epochs or has validation in between; make one with train_iters and without")
    defaults = Fsdp2Config.model_fields["training"].annotation
    assert defaults is not None
    for key in ("optimizer", "lr_scaling_plan"):
        if training[key] != defaults.model_fields[key].default:
            raise ConfigError(f"--backend megatron: training.{key} {training[key]!r} of the baseline is of the fsdp2 backend alone")
    if training["weight_decay"] and {key: training[key] for key in WITHOUT_DECAY} != WITHOUT_DECAY:
        raise ConfigError(
            "--backend megatron: it spares norms and biases of weight decay, the baseline does not; make one that does, or without decay"
        )
    schedule = facts["schedule"]
    own = {key: training[key] for key in ALIKE} | {mine: training[theirs] for mine, theirs in NAMES.items()}
    own |= {
        "dtype": facts["dtype"],
        "loss_type": loss_type,
        "lr_warmup_iters": schedule["lr_warmup_steps"],
        "lr_decay_iters": schedule["lr_decay_steps"],
        "num_workers": content["data"]["dataloader_param"]["num_workers"],
    }
    load = training["load"] or (None if training["random_init"] else model["model_name_or_path"])
    loading = {key: value for key, value in content["data"]["dataloader_param"].items() if key != "num_workers"}
    return {
        "backend": "megatron",
        "parallel": ParallelConfig().model_dump(mode="json"),
        "data": {**content["data"], "dataloader_param": loading},
        "model": {"hf_dir": model["model_name_or_path"], "load": load, "cast_weights": True, "plugin": training["plugin"]},
        "features": {},
        "training": own,
        "tools": {},
    }


def _components(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    encoder = config.get("image_encoder") or {}
    return [part for part in (config["text_decoder"], encoder.get("vision_encoder"), encoder.get("vision_projector")) if part is not None]


def _only_defaults(section: str, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    odd = [key for key, value in given.items() if value != defaults.get(key)]
    if odd:
        raise ConfigError(f"--backend: {section}.{odd[0]} {given[odd[0]]!r} of the baseline is of its own backend; write a run file for the other")


def _ratio(steps: int, of: int) -> float:
    return steps / of if steps == 0 or steps == of else (steps + 0.5) / of
