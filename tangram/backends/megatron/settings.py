"""The run's settings as megatron-core takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tangram.config.model import ModelConfig
from tangram.config.run import RunConfig
from tangram.errors import ConfigError

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def effective_model(run: RunConfig) -> ModelConfig:
    """The model's description with the run's ``features`` in it: freezing per component, recomputation of both transformers.

    Raises:
        ConfigError: features freeze a component that the model has not.
    """
    model, features = run.model.config, run.features
    recompute = {
        key: getattr(features, key)
        for key in ("recompute_granularity", "recompute_method", "recompute_num_layers")
        if features.recompute_granularity is not None
    }
    text = {**recompute, **_given("freeze", features.freeze_text_decoder)}
    vision = {**recompute, **_given("freeze", features.freeze_vision_encoder)}
    projector = _given("freeze", features.freeze_vision_projector)
    update: dict[str, Any] = {"text_decoder": model.text_decoder.model_copy(update=text)}
    if model.image_encoder is not None:
        encoder = model.image_encoder
        update["image_encoder"] = encoder.model_copy(
            update={
                "vision_encoder": encoder.vision_encoder.model_copy(update=vision),
                "vision_projector": encoder.vision_projector.model_copy(update=projector),
            }
        )
    elif features.freeze_vision_encoder or features.freeze_vision_projector:
        raise ConfigError("features freeze the vision encoder or projector, but the model has no image_encoder; remove the setting")
    return model.model_copy(update=update)


def _given(key: str, value: object) -> dict[str, object]:
    return {} if value is None else {key: value}


def freeze_arguments(model: ModelConfig) -> dict[str, bool]:
    """Arguments of the assembled model's ``freeze``."""
    encoder = model.image_encoder
    return {
        "freeze_text_decoder": model.text_decoder.freeze,
        "freeze_image_encoder": encoder is not None and encoder.vision_encoder.freeze,
        "freeze_image_projection": encoder is not None and encoder.vision_projector.freeze,
    }


def ddp_config(run: RunConfig) -> DistributedDataParallelConfig:
    """Gradients are summed in fp32 over data-parallel ranks.

    Raises:
        ConfigError: overlap_param_gather without what it stands on.
    """
    from megatron.core.distributed import DistributedDataParallelConfig

    parallel = run.parallel
    if parallel.overlap_param_gather and not (parallel.use_distributed_optimizer and parallel.overlap_grad_reduce):
        raise ConfigError("overlap_param_gather needs use_distributed_optimizer and overlap_grad_reduce; turn both on or it off")
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        use_distributed_optimizer=parallel.use_distributed_optimizer,
    )


def optimizer_config(run: RunConfig) -> OptimizerConfig:
    """AdamW with fp32 masters and moments. fp16 starts at a loss scale of 2^16, as torch's GradScaler does."""
    from megatron.core.optimizer import OptimizerConfig

    training, parallel = run.training, run.parallel
    return OptimizerConfig(
        optimizer=training.optimizer,
        lr=training.lr,
        min_lr=training.min_lr,
        weight_decay=training.weight_decay,
        adam_beta1=training.adam_beta1,
        adam_beta2=training.adam_beta2,
        adam_eps=training.adam_eps,
        clip_grad=training.clip_grad,
        params_dtype=DTYPES[training.dtype],
        bf16=training.dtype == "bf16",
        fp16=training.dtype == "fp16",
        initial_loss_scale=2.0**16,
        use_distributed_optimizer=parallel.use_distributed_optimizer,
        overlap_param_gather=parallel.overlap_param_gather,
    )
