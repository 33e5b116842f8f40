"""Start torch.distributed and megatron-core's parallel state for one topology."""

from __future__ import annotations

import contextlib
import gc
import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from tangram.backends.megatron.cpu import adapt
from tangram.backends.processes import join_processes
from tangram.config.run import ParallelConfig
from tangram.errors import ConfigError
from tangram.models.context import install, make_groups
from tangram.models.vision_groups import held_groups, install_vision, make_vision_groups
from tangram.placement.topology import Topology
from tangram.platform import current


@dataclass(frozen=True)
class ParallelRanks:
    """Where this process stands."""

    rank: int
    world_size: int
    tensor_parallel_rank: int
    pipeline_parallel_rank: int
    context_parallel_rank: int
    """Among the ranks that share the tokens of a micro-batch; all have the same ``data_parallel_rank``."""
    data_parallel_rank: int
    data_parallel_size: int
    expert_parallel_rank: int
    device: torch.device
    pipeline_group: dist.ProcessGroup
    """The pipeline's ranks, in order; carries activations."""
    gradient_group: dist.ProcessGroup
    """The same ranks over connections of their own; carries gradients between stages."""


def data_parallel_size(world_size: int, topology: Topology) -> int:
    """Micro-batches that ``world_size`` processes work on at a time: copies of the model, over context-parallel size.

    Raises:
        ConfigError: the processes do not make whole copies.
    """
    copies, rest = divmod(world_size, topology.ranks_of_a_batch)
    if rest or copies == 0:
        context = f" x context-parallel {topology.context}" if topology.context > 1 else ""
        raise ConfigError(
            f"world size {world_size} is not divisible by tensor-parallel {topology.tensor}{context} x pipeline-parallel {topology.pipeline} = "
            f"{topology.ranks_of_a_batch}; start a multiple of {topology.ranks_of_a_batch} processes"
        )
    if world_size % topology.process_unit:
        context = f" x {topology.context} context-parallel" if topology.context > 1 else ""
        raise ConfigError(
            f"world size {world_size} makes {copies} data-parallel{context} ranks, which expert-parallel size {topology.expert} does not divide; "
            f"start a multiple of {topology.process_unit} processes"
        )
    return copies


def initialize(parallel: ParallelConfig, topology: Topology, seed: int) -> ParallelRanks:
    """Join the process group (of torchrun's environment, or of this process alone) and build the groups of ``topology``.

    A second call replaces the groups of the first. Ranks are ordered tensor, context, data, pipeline, as Megatron does; of the
    context-parallel and data-parallel ranks, neighbours divide the experts.

    Args:
        seed: of the dropout generators: equal over the tensor-parallel ranks where activations are equal, different over context-parallel and
            data-parallel ranks and stages.

    Raises:
        ConfigError: the processes do not make whole copies of the model, or virtual stages without a pipeline.
    """
    adapt()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    copies = data_parallel_size(world_size, topology)
    if topology.virtual > 1 and topology.pipeline == 1:
        raise ConfigError(f"{topology.virtual} virtual stages need a pipeline of at least 2 ranks, got 1; give one row of layers, or more ranks")
    device = current().use(int(os.environ.get("LOCAL_RANK", "0")))
    timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
    join_processes(parallel.distributed_backend or current().communication_backend, timeout)
    _end_groups()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=topology.tensor,
        pipeline_model_parallel_size=topology.pipeline,
        context_parallel_size=topology.context,
        virtual_pipeline_model_parallel_size=topology.virtual if topology.virtual > 1 else None,
        expert_model_parallel_size=topology.expert,
        expert_tensor_parallel_size=topology.tensor,
        distributed_timeout_minutes=parallel.distributed_timeout_minutes,
        get_embedding_ranks=lambda ranks: embedding_ranks(topology, ranks),
        get_position_embedding_ranks=lambda ranks: embedding_ranks(topology, ranks)[:1],
        create_gloo_process_groups=False,
    )
    context_group = parallel_state.get_context_parallel_group()
    install(make_groups(context_group, topology.ring, timeout) if topology.context > 1 else None)
    install_vision(make_vision_groups(parallel_state.get_tensor_model_parallel_group(), topology, timeout))
    pipeline_group = parallel_state.get_pipeline_model_parallel_group()
    ranks = ParallelRanks(
        rank=dist.get_rank(),
        world_size=world_size,
        tensor_parallel_rank=parallel_state.get_tensor_model_parallel_rank(),
        pipeline_parallel_rank=parallel_state.get_pipeline_model_parallel_rank(),
        context_parallel_rank=context_group.rank(),
        data_parallel_rank=parallel_state.get_data_parallel_rank(),
        data_parallel_size=copies,
        expert_parallel_rank=parallel_state.get_expert_model_parallel_rank(),
        device=device,
        pipeline_group=pipeline_group,
        gradient_group=_twin(pipeline_group, topology, world_size, timeout),
    )
    # megatron-core derives the tensor-parallel seeds from this one by offsets below 1,000,000.
    stream = (ranks.pipeline_parallel_rank * copies + ranks.data_parallel_rank) * topology.context + ranks.context_parallel_rank
    torch.default_generator.manual_seed(seed + 1_000_000 * stream)  # core seeds those of the device
    model_parallel_cuda_manual_seed(seed + 1_000_000 * stream, force_reset_rng=True)
    return ranks


def embedding_ranks(topology: Topology, pipeline_ranks: list[int]) -> list[int]:
    """The ranks of one pipeline that hold the word embedding and the output layer, once each."""
    stages = (topology.text_first_chunk.pp_rank, topology.text_last_chunk.pp_rank)
    return [pipeline_ranks[stage] for stage in dict.fromkeys(stages)]


def _end_groups() -> None:
    """End the groups of an earlier call. Each has threads of its own, and there are some twenty: a process that builds many engines would drown."""
    from megatron.core import parallel_state

    held = [value for value in vars(parallel_state).values() if isinstance(value, dist.ProcessGroup)] + held_groups()
    parallel_state.destroy_model_parallel()
    install(None)
    install_vision(None)
    for group in {id(group): group for group in held if group is not dist.group.WORLD}.values():
        with contextlib.suppress(ValueError):  # one that ended with the process group of before; core still names it
            dist.destroy_process_group(group)
    if held:
        gc.collect()  # engines of before refer to themselves, and to their groups


def shutdown() -> None:
    """Leave the process group."""
    _end_groups()
    if dist.is_initialized():
        dist.destroy_process_group()


def _twin(group: dist.ProcessGroup, topology: Topology, world_size: int, timeout: timedelta) -> dist.ProcessGroup:
    """A second group of the same ranks; every process takes part in making all of them."""
    if topology.pipeline == 1:
        return group
    everyone: list[list[int]] = [[] for _ in range(world_size)]
    dist.all_gather_object(everyone, dist.get_process_group_ranks(group))
    mine = None
    for ranks in sorted({tuple(ranks) for ranks in everyone}):
        twin = dist.new_group(list(ranks), timeout=timeout)
        mine = twin if dist.get_rank() in ranks else mine
    assert mine is not None
    return mine
