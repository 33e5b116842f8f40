"""Where activations are divided over ranks along the sequence, and where they come together again."""

from __future__ import annotations

from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region, scatter_to_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup

from tangram.models.sequence import SequenceSplit


def split_of(length: int, config: TransformerConfig, tp_group: ProcessGroup, unit: int = 1) -> SequenceSplit:
    """This rank's part of a component's sequence of ``length`` tokens, of which each ``unit`` stay together."""
    if not config.sequence_parallel:
        return SequenceSplit(length, unit=unit)
    return SequenceSplit(length, tensor=tp_group.size(), tensor_rank=tp_group.rank(), unit=unit)


def divide(x: Tensor, split: SequenceSplit, tp_group: ProcessGroup) -> Tensor:
    """This rank's part of what all ranks hold: [length, ...] -> [local_length, ...]. Its gradient comes from all ranks."""
    x = split.take_context(split.pad(x, 0), 0)
    return scatter_to_sequence_parallel_region(x, group=tp_group) if split.tensor > 1 else x


def collect(x: Tensor, split: SequenceSplit, tp_group: ProcessGroup) -> Tensor:
    """The tensor-parallel ranks' parts as one: [local_length, ...] -> [context_length, ...].

    What follows must be the same on all of them, its gradient too: each takes its part of it, and nothing is summed.
    """
    if split.tensor == 1:
        return x
    return gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False, group=tp_group)
