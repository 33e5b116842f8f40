"""A run file of the ``fsdp2`` backend as a ``RunConfig``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tangram.config.fsdp2 import Fsdp2Config
from tangram.config.model import ModelConfig
from tangram.config.parsing import parse_section
from tangram.config.run import ModelSource, ParallelConfig, RunConfig, TrainingConfig
from tangram.config.sources import model_from_hf, read_hf_config
from tangram.errors import ConfigError
from tangram.families import has_family

SEQ_LENGTH = 1024
"""Longest sample where neither ``seq_length`` nor ``cutoff_len`` is given."""


def run_of(config: Fsdp2Config, where: str) -> RunConfig:
    """What loop, data and checkpoints know of the run; the rest is ``RunConfig.fsdp2``.

    Raises:
        ConfigError: settings that contradict each other, or a model directory that cannot be read.
    """
    content: dict[str, Any] = {
        "backend": "fsdp2",
        "parallel": _parallel(config),
        "model": _model(config, where),
        "data": config.data,
        "training": training_of(config, where),
        "tools": config.tools,
        "fsdp2": config,
    }
    return parse_section(RunConfig, content, where)


def _parallel(config: Fsdp2Config) -> ParallelConfig:
    parallel = config.parallel
    return ParallelConfig(distributed_timeout_minutes=parallel.distributed_timeout_minutes, distributed_backend=parallel.distributed_backend)


def _model(config: Fsdp2Config, where: str) -> ModelSource:
    directory = config.model.model_name_or_path
    load = config.training.load
    if load is None and not config.training.random_init and any(Path(directory).glob("*.safetensors")):
        load = directory
    if not Path(directory).is_dir():
        raise ConfigError(f"model.model_name_or_path {directory}: no such folder; give the model's Hugging Face directory (nothing is downloaded)")
    described: ModelConfig | None = None
    if has_family(str(read_hf_config(directory)["model_type"])):
        described = model_from_hf(directory)
    content = {"config": described, "hf_dir": directory, "load": load, "load_format": config.training.load_format, "cast_weights": True}
    return parse_section(ModelSource, content, where, names={"": "training"})


def training_of(config: Fsdp2Config, where: str = "run file", iterations: int | None = None) -> TrainingConfig:
    """The loop's part.

    Args:
        iterations: steps of ``train_epochs`` passes, once they have been counted; until then 1 stands for them.

    Raises:
        ConfigError: settings that contradict each other.
    """
    own, data = config.training, config.data.dataset_param.basic_parameters
    iterations = own.train_iters or iterations or 1
    content: dict[str, Any] = {
        "micro_batch_size": own.micro_batch_size,
        "gradient_accumulation_steps": own.gradient_accumulation_steps,
        "seq_length": own.seq_length or data.cutoff_len or SEQ_LENGTH,
        "train_iters": iterations,
        "seed": own.seed,
        "dtype": config.parallel.fsdp_plan.param_dtype or "fp32",
        "lr": own.lr,
        "min_lr": own.lr_min,
        "lr_warmup_init": own.lr_start,
        "lr_warmup_iters": int(iterations * own.lr_warmup_ratio),
        "lr_decay_style": own.lr_decay_style,
        "lr_decay_iters": max(1, int(iterations * own.lr_decay_ratio)),
        "weight_decay": own.weight_decay,
        "adam_beta1": own.adam_beta1,
        "adam_beta2": own.adam_beta2,
        "adam_eps": own.adam_eps,
        "clip_grad": own.clip_grad,
        "loss_type": config.features.loss_cfg.loss_type,
        "log_interval": own.log_interval,
        "log_tps": own.log_tps,
        "eval_interval": own.val_interval or None,
        "eval_iters": own.val_iters if own.val_interval else 0,
        "exit_interval": own.exit_interval,
        "save": own.save,
        "save_interval": own.save_interval,
        "save_format": own.save_format,
        "save_async": own.save_async,
        "save_total_limit": own.save_total_limit,
        "save_hf_interval": own.save_hf_interval,
        "no_save_optim": own.no_save_optim,
        "no_save_rng": own.no_save_rng,
        "no_load_optim": own.no_load_optim,
        "no_load_rng": own.no_load_rng,
        "manual_gc_interval": own.manual_gc_interval,
        "num_workers": config.data.dataloader_param.num_workers,
        "metrics_file": own.metrics_file,
        "deterministic": own.use_deter_comp,
    }
    return parse_section(TrainingConfig, content, where, names={"": "training"})
