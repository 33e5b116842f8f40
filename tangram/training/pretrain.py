"""``pretrain``: what an entry script calls with its own callbacks, as in Megatron-LM."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tangram.backends.megatron.forward import ForwardStep
from tangram.config.flags import parse_flags
from tangram.config.model import ModelConfig
from tangram.errors import ConfigError
from tangram.guard import guarded
from tangram.placement.topology import Chunk, Topology
from tangram.training.context import building
from tangram.training.entry import Callbacks, DatasetsProvider, train
from tangram.training.failure import SharedFailure

ModelProvider = Callable[..., nn.Module]
"""``model_provider(pre_process, post_process, modules=None)`` builds the chunk that ``get_context().chunk_arguments`` describes."""
MODEL_TYPE = "encoder_or_decoder"
"""The only kind of pipeline there is; Megatron calls it ``ModelType.encoder_or_decoder``."""


def pretrain(
    train_valid_test_datasets_provider: DatasetsProvider,
    model_provider: ModelProvider,
    model_type: Any,
    forward_step: ForwardStep,
    extra_args_provider: Callable[[argparse.ArgumentParser], argparse.ArgumentParser] | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    argv: Sequence[str] | None = None,
) -> int:
    """Read the launch flags and train.

    Args:
        train_valid_test_datasets_provider: sample counts -> training data, validation data or None, test data (not used). Data are this
            rank's micro-batches (``DatasetsProvider``). Called once the ranks are known (``get_context()``).
        model_provider: builds one model chunk.
        model_type: ``ModelType.encoder_or_decoder``, by itself or by name.
        forward_step: ``(iterator over micro-batches, model) -> (output, loss_func)``.
        extra_args_provider: adds flags of the entry's own to the parser.
        args_defaults: values of flags that the command line lacks.
        argv: without the program's name; default: the process's.

    Returns:
        The exit status: 0, or 2 after a fault that the user can mend, printed as one line.
    """

    def action() -> int:
        kind = str(getattr(model_type, "name", model_type))
        if kind != MODEL_TYPE:
            raise ConfigError(f"model_type {kind!r} is not supported; pass ModelType.encoder_or_decoder")
        with SharedFailure():
            flags = parse_flags(list(sys.argv[1:] if argv is None else argv), extra_args_provider, args_defaults)
            train(flags.run, Callbacks(_builder(model_provider), forward_step, train_valid_test_datasets_provider), flags.namespace)
        return 0

    return guarded(Path(sys.argv[0]).name, action)


def _builder(model_provider: ModelProvider) -> Callable[[ModelConfig, Chunk, Topology, torch.dtype, int], nn.Module]:
    def build(model: ModelConfig, chunk: Chunk, topology: Topology, dtype: torch.dtype, padded_vocab: int) -> nn.Module:
        with building(model, chunk, topology, dtype, padded_vocab):
            return model_provider(chunk.position == 0, chunk.position == len(topology.order) - 1)

    return build
