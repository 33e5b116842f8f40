"""Train a vision-language model on megatron-core. Copy this file and change its callbacks.

torchrun --nproc-per-node 4 pretrain_vlm.py --mm-model model.json --mm-data data.json --mm-tool tools.json <Megatron-style flags>
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from tangram.backends.megatron.forward import get_batch as next_batch
from tangram.backends.megatron.forward import report_loss
from tangram.losses.modes import reduce_token_losses
from tangram.models.vlm import build_model_chunk
from tangram.training.context import get_context
from tangram.training.entry import default_datasets
from tangram.training.pretrain import pretrain


def model_provider(pre_process: bool = True, post_process: bool = True, modules: Sequence[str] | None = None) -> nn.Module:
    """Build the model chunk that this rank holds."""
    return build_model_chunk(**get_context().chunk_arguments)


def train_valid_test_datasets_provider(num_samples: Sequence[int]) -> tuple[Any, Any, Any]:
    """Steps of this rank's micro-batches for training, and a function that gives those of validation."""
    return default_datasets(num_samples)


def get_batch(data_iterator: Iterator[Any], is_vit_last_stage: bool = False) -> dict[str, Tensor]:
    """The next micro-batch on this rank's device, ready for ``model(**batch)``."""
    context = get_context()
    return next_batch(data_iterator, context.device, context.dtype)


def loss_func(output: dict[str, Any]) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Numerator and denominator of the micro-batch's loss, and both again for the log."""
    losses = output["loss_dict"]
    terms = reduce_token_losses(losses["token_losses"], losses["samples"], get_context().run.training.loss_type)
    return report_loss(terms.numerator, terms.denominator)


def forward_step(data_iterator: Iterator[Any], model: nn.Module) -> tuple[Any, Any]:
    """Run one micro-batch through this rank's chunk."""
    return model(**get_batch(data_iterator)), loss_func


if __name__ == "__main__":
    sys.exit(pretrain(train_valid_test_datasets_provider, model_provider, "encoder_or_decoder", forward_step))
