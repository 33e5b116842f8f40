"""A run file of one backend as one of the other, as far as both can do what it says.

What changes only memory or time (recomputation, offloading, loss in chunks, how ranks share the work) is left out: it is of the backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tangram.align.sharded import UNITS
from tangram.config.fsdp2 import Fsdp2Training
from tangram.config.run import ParallelConfig
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
COMPONENTS = ("vision_encoder", "vision_projector", "text_decoder")


def to_fsdp2(content: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Of a megatron run file.

    Raises:
        ConfigError: it says something that the fsdp2 backend has not, or that lies elsewhere there.
    """
    training, model = content["training"], content["model"]
    if model["hf_dir"] is None:
        raise ConfigError(
            "--backend fsdp2: the baseline's model is described by model.json alone, and fsdp2 needs a Hugging Face directory (model.hf_dir)"
        )
    if training["dtype"] == "fp16":
        raise ConfigError("--backend fsdp2: it has no loss scaling, and the baseline is of fp16; make a baseline in bf16 or fp32")
    parts = _components(model["config"])
    if any(part.get("freeze") for part in parts) or any(content["features"].get(f"freeze_{name}") is not None for name in COMPONENTS):
        raise ConfigError("--backend fsdp2: the baseline freezes components, which fsdp2 says by patterns of modules; write a run file for it")
    if any(parts[0].get(key) for key in ("moe_aux_loss_coeff", "moe_z_loss_coeff")):
        raise ConfigError("--backend fsdp2: the baseline adds losses of routers, which the backends weigh in different ways; write a run file for it")
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
    if features["loss_cfg"]["router_aux_loss_coef"]:
        raise ConfigError(
            "--backend megatron: the baseline adds losses of routers, which the backends weigh in different ways; write a run file for it"
        )
    if model["freeze"]:
        raise ConfigError("--backend megatron: the baseline freezes modules by patterns, which megatron says by components; write a run file for it")
    if training["train_iters"] is None:
        raise ConfigError("--backend megatron: the baseline counts epochs; make one with train_iters")
    for key in ("optimizer", "lr_scaling_plan"):
        if training[key] != Fsdp2Training.model_fields[key].default:
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
    directory = model["model_name_or_path"]
    # As the fsdp2 backend takes it: weights that lie in the directory, unless they are to be random.
    load = training["load"] or (directory if not training["random_init"] and any(Path(directory).glob("*.safetensors")) else None)
    loading = {key: value for key, value in content["data"]["dataloader_param"].items() if key != "num_workers"}
    return {
        "backend": "megatron",
        "parallel": ParallelConfig().model_dump(mode="json"),
        "data": {**content["data"], "dataloader_param": loading},
        "model": {"hf_dir": directory, "load": load, "cast_weights": True, "plugin": training["plugin"]},
        "features": {},
        "training": own,
        "tools": {},
    }


def _components(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    encoder = config.get("image_encoder") or {}
    return [part for part in (config["text_decoder"], encoder.get("vision_encoder"), encoder.get("vision_projector")) if part is not None]


def _ratio(steps: int, of: int) -> float:
    return steps / of if steps == 0 or steps == of else (steps + 0.5) / of
