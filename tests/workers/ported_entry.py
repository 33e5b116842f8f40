"""An entry as people bring it from Megatron-LM: single micro-batches from its provider, a flag of its own, arguments from ``get_args``."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.enums import ModelType
from torch import nn

from tangram.backends.megatron.forward import get_batch
from tangram.models.vlm import build_model_chunk
from tangram.training.context import get_args, get_context
from tangram.training.entry import default_datasets
from tangram.training.pretrain import pretrain


def model_provider(pre_process: bool = True, post_process: bool = True, modules: Sequence[str] | None = None) -> nn.Module:
    assert pre_process and post_process
    return build_model_chunk(**get_context().chunk_arguments)


def provider(num_samples: Sequence[int]) -> tuple[Iterator[Any], None, None]:
    steps, _, _ = default_datasets(num_samples)
    return (micro_batch for step in steps for micro_batch in step), None, None


provider.is_distributed = True  # type: ignore[attr-defined]


def loss_func(output: Any) -> Any:
    losses = output["loss_dict"]["token_losses"] * get_args().loss_factor
    total, count = losses.sum(), losses.numel()
    return total, count, {"loss": (total.detach(), count)}


def forward_step(iterator: Iterator[Any], model: nn.Module) -> Any:
    context = get_context()
    return model(**get_batch(iterator, context.device, context.dtype)), loss_func


def extra(parser: ArgumentParser) -> ArgumentParser:
    parser.add_argument("--loss-factor", type=float, default=1.0)
    return parser


if __name__ == "__main__":
    sys.exit(pretrain(provider, model_provider, ModelType.encoder_or_decoder, forward_step, extra, {"train_iters": 3}))
