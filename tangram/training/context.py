"""What the callbacks of an entry script can ask of the run that calls them.

megatron-style entries read their arguments from a global; so do these, and nothing else in Tangram does.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tangram.config.model import ModelConfig
from tangram.config.run import RunConfig
from tangram.placement.topology import Chunk, Topology


@dataclass
class Context:
    """The running job.

    Args:
        args: launch flags under their Megatron names, and an entry's own.
        consumed_samples: where the data starts.
        chunk_arguments: arguments of ``build_model_chunk`` while ``model_provider`` is called.
        data_rank, data_size: place among data-parallel ranks.
        needs_pixels: this rank holds vision layers.
        reports_data: this rank is the one of those with the same ``data_rank`` that lists skipped samples.
    """

    run: RunConfig
    args: argparse.Namespace
    device: torch.device
    dtype: torch.dtype
    consumed_samples: int = 0
    data_rank: int = 0
    data_size: int = 1
    needs_pixels: bool = True
    reports_data: bool = True
    chunk_arguments: Mapping[str, Any] | None = None


_current: Context | None = None


def get_context() -> Context:
    """The context of the run that is going on."""
    if _current is None:
        raise RuntimeError("no run is going on: callbacks of an entry are called by pretrain()")
    return _current


def get_args() -> argparse.Namespace:
    """Launch flags, as ``megatron.training.get_args`` gives them."""
    return get_context().args


def set_context(context: Context | None) -> None:
    """Make ``context`` the one that callbacks see."""
    global _current
    _current = context


@contextmanager
def building(model: ModelConfig, chunk: Chunk, topology: Topology, dtype: torch.dtype, padded_vocab: int) -> Iterator[None]:
    """The time during which ``model_provider`` is to build one chunk."""
    context = get_context()
    context.chunk_arguments = {"model": model, "chunk": chunk, "topology": topology, "dtype": dtype, "padded_vocab": padded_vocab}
    try:
        yield
    finally:
        context.chunk_arguments = None
