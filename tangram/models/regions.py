"""Where activations are divided over ranks along the sequence, and where they come together again."""

from __future__ import annotations

from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup

from tangram.models.context import ContextGroups
from tangram.models.sequence import SequenceSplit
from tangram.platform.exchange import gather


def split_of(length: int, config: TransformerConfig, tp_group: ProcessGroup, unit: int = 1, context: ContextGroups | None = None) -> SequenceSplit:
    """This rank's part of a component's sequence of ``length`` tokens, of which each ``unit`` stay together.

    Args:
        context: of a sequence that context-parallel ranks share; None: each has it whole.
    """
    shared = context.sizes() if context is not None else {}
    if not config.sequence_parallel:
        return SequenceSplit(length, unit=unit, **shared)
    return SequenceSplit(length, tensor=tp_group.size(), tensor_rank=tp_group.rank(), unit=unit, **shared)


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


def collect_context(x: Tensor, split: SequenceSplit, context: ContextGroups | None) -> Tensor:
    """The context ranks' parts in the sequence's order and without padding: [context_length, ...] -> [length, ...]."""
    if context is not None:
        x = gather(x, context.whole, [split.context_length] * split.context)
    return split.restore(x, 0)


def spread_over_context(found: Tensor, here: Tensor, context: ContextGroups | None) -> Tensor:
    """Values that each context rank has some of, on all of them; the gradient of a rank's own comes from itself alone.

    Args:
        found: [k], this rank's.
        here: bool [n], which of all they are; each is on one rank.

    Returns:
        [n].
    """
    if context is None:
        return found
    whole = found.new_zeros(here.shape).masked_scatter(here, found)
    # Forwards a sum over ranks, backwards nothing.
    summed: Tensor = reduce_from_tensor_model_parallel_region(whole, group=context.whole)
    return summed
