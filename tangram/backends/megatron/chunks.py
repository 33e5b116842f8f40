"""This rank's model chunks, and their parameters and gradients under canonical names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tangram.backends.copies import digest
from tangram.backends.engine import CanonicalTensor, Copies
from tangram.placement.blocks import Placement
from tangram.placement.topology import Chunk


class LocalChunk(NamedTuple):
    """One model chunk of this rank, with where its parameters live in canonical tensors."""

    chunk: Chunk
    placement: Placement
    parameters: dict[str, nn.Parameter]
    """By the names of ``placement.tensors``."""


def canonical_tensors(
    chunks: Sequence[LocalChunk], shapes: Mapping[str, tuple[int, ...]], value: Callable[[nn.Parameter], Tensor], trainable_only: bool = False
) -> Iterator[CanonicalTensor]:
    """What ``value`` gives for each parameter, block by block, without padding.

    Args:
        shapes: of all canonical tensors.
        trainable_only: leave out what is frozen, but not what is trained and takes no part (``idle``).
    """
    for _, placement, parameters in chunks:
        for name, tensor in placement.tensors.items():
            if trainable_only and not (parameters[name].requires_grad or getattr(parameters[name], "idle", False)):
                continue
            whole = value(parameters[name])
            for block in tensor.blocks:
                if (name_there := block.canonical) is not None:
                    yield CanonicalTensor(name_there, block.canonical_start, shapes[name_there], block.to_canonical(whole[block.local_slices]))


def gradient_of(scale: float) -> Callable[[Any], Tensor]:
    """Reads a parameter's gradient, fp32, which was multiplied by ``scale``; zeros of one that takes no part."""

    def gradient(parameter: Any) -> Tensor:
        if getattr(parameter, "idle", False):
            return torch.zeros_like(parameter, dtype=torch.float32)
        return parameter.main_grad / scale if scale != 1 else parameter.main_grad

    return gradient


def ranks_of_copies() -> dict[str, list[int]]:
    """The ranks that hold the same as this one, by kind of parameter, as ``copies`` names them."""
    from megatron.core import parallel_state

    groups = {
        "parameters": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "experts": parallel_state.get_expert_data_parallel_group(),
    }
    return {kind: dist.get_process_group_ranks(group) for kind, group in groups.items()}


def copies(chunks: Sequence[LocalChunk], ranks: Mapping[str, Sequence[int]]) -> dict[str, Copies]:
    """A digest of what other ranks hold copies of.

    Args:
        ranks: see ``ranks_of_copies``.
    """
    held: dict[str, list[Tensor]] = {"parameters": [], "experts": []}
    for local in chunks:
        for parameter in local.parameters.values():
            if not getattr(parameter, "idle", False):
                # Those that take no part in a step nobody waits for.
                held["parameters" if getattr(parameter, "allreduce", True) else "experts"].append(parameter)
    return {kind: Copies(min(ranks[kind]), digest(held[kind]) if held[kind] and len(ranks[kind]) > 1 else None) for kind in held}
