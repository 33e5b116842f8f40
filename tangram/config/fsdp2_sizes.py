"""How ``parallel`` of an fsdp2 run file divides the processes of a run."""

from __future__ import annotations

from math import lcm

from tangram.config.fsdp2 import Fsdp2Parallel
from tangram.errors import ConfigError


def sizes(parallel: Fsdp2Parallel, world_size: int) -> tuple[int, int, int]:
    """Sizes of the axes dp_replicate, dp_shard and ulysses.

    Raises:
        ConfigError: they do not fit the number of processes.
    """
    ulysses = parallel.ulysses_parallel_size
    shard = world_size if parallel.fully_shard_parallel_size == "auto" else parallel.fully_shard_parallel_size
    if world_size % ulysses:
        raise ConfigError(f"{world_size} processes cannot be divided by parallel.ulysses_parallel_size {ulysses}; start a multiple of it")
    if shard % ulysses or world_size % shard:
        raise ConfigError(
            f"parallel.fully_shard_parallel_size {shard} must divide the {world_size} processes and be a multiple of ulysses_parallel_size "
            f"{ulysses}; it counts the ranks that share one copy of the weights"
        )
    copies = world_size // ulysses
    if parallel.data_parallel_size is not None and parallel.data_parallel_size != copies:
        raise ConfigError(
            f"parallel.data_parallel_size {parallel.data_parallel_size}, but {world_size} processes / ulysses_parallel_size {ulysses} = {copies}; "
            "correct it, or leave it out"
        )
    return world_size // shard, shard // ulysses, ulysses


def expert_sizes(parallel: Fsdp2Parallel, world_size: int) -> tuple[int, int, int]:
    """Sizes of the axes over which experts lie: copies, ranks that shard the same experts, ranks that hold different ones.

    Raises:
        ConfigError: they do not fit the number of processes.
    """
    experts = parallel.expert_parallel_size
    if world_size % experts:
        raise ConfigError(f"{world_size} processes cannot be divided by parallel.expert_parallel_size {experts}; start a multiple of it")
    rest = world_size // experts
    shard = parallel.expert_fully_shard_parallel_size or rest
    if rest % shard:
        raise ConfigError(
            f"parallel.expert_fully_shard_parallel_size {shard} must divide the {rest} ranks that hold the same experts ({world_size} processes / "
            f"expert_parallel_size {experts}); correct it, or leave it out"
        )
    return rest // shard, shard, experts


def least_processes(parallel: Fsdp2Parallel) -> int:
    """The smallest number of processes that every given size divides.

    Raises:
        ConfigError: the sizes contradict each other.
    """
    given = parallel.fully_shard_parallel_size
    needed = lcm(parallel.ulysses_parallel_size, 1 if given == "auto" else given)
    needed = lcm(needed, parallel.expert_parallel_size * (parallel.expert_fully_shard_parallel_size or 1))
    if parallel.data_parallel_size is not None:
        needed = parallel.data_parallel_size * parallel.ulysses_parallel_size
    sizes(parallel, needed)
    expert_sizes(parallel, needed)
    return needed
