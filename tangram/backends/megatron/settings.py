"""The run's settings as megatron-core takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tangram.backends.dtypes import DTYPES
from tangram.config.model import ModelConfig
from tangram.config.run import RunConfig

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig


def freeze_arguments(model: ModelConfig) -> dict[str, bool]:
    """Arguments of the assembled model's ``freeze``."""
    encoder = model.image_encoder
    return {
        "freeze_text_decoder": model.text_decoder.freeze,
        "freeze_image_encoder": encoder is not None and encoder.vision_encoder.freeze,
        "freeze_image_projection": encoder is not None and encoder.vision_projector.freeze,
    }


def ddp_config(run: RunConfig) -> DistributedDataParallelConfig:
    """Gradients are summed in fp32 over data-parallel ranks."""
    from megatron.core.distributed import DistributedDataParallelConfig

    parallel = run.parallel
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
