"""The process group and the device mesh of one run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tangram.config.fsdp2 import Fsdp2Parallel
from tangram.errors import ConfigError
from tangram.platform import current


@dataclass(frozen=True)
class Meshes:
    """Where this process stands.

    Args:
        world: ``[dp_replicate, dp_shard, ulysses]``; ranks that share the tokens of a sample lie side by side.
        sharding: what ``fully_shard`` gets: ``[shard]``, or ``[replicate, shard]`` where there are several copies (HSDP).
    """

    device: torch.device
    world: DeviceMesh
    sharding: DeviceMesh
    data_parallel_rank: int
    data_parallel_size: int
    ulysses: dist.ProcessGroup | None
    """Ranks that share the tokens of a sample; None: each has its own."""

    @property
    def copies(self) -> int:
        """Copies of the weights."""
        return self.world.size(0)


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


def join(parallel: Fsdp2Parallel) -> Meshes:
    """Join the process group (of torchrun's environment, or of this process alone) and lay out its ranks.

    Raises:
        ConfigError: as ``sizes``.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    replicate, shard, ulysses = sizes(parallel, world_size)
    device = current().use(int(os.environ.get("LOCAL_RANK", "0")))
    _join(parallel.distributed_backend or _backend(parallel), timedelta(minutes=parallel.distributed_timeout_minutes))
    world = init_device_mesh(device.type, (replicate, shard, ulysses), mesh_dim_names=("dp_replicate", "dp_shard", "ulysses"))
    sharding = world["dp_shard", "ulysses"]._flatten("shard")
    if replicate > 1:
        flat = init_device_mesh(device.type, (replicate, shard * ulysses), mesh_dim_names=("replicate", "shard"))
        sharding = flat
    return Meshes(
        device=device,
        world=world,
        sharding=sharding,
        data_parallel_rank=dist.get_rank() // ulysses,
        data_parallel_size=world_size // ulysses,
        ulysses=world.get_group("ulysses") if ulysses > 1 else None,
    )


def _backend(parallel: Fsdp2Parallel) -> str:
    own = current().communication_backend
    return f"cpu:gloo,{current().name}:{own}" if parallel.fsdp_plan.cpu_offload and own != "gloo" else own


def _join(backend: str, timeout: timedelta) -> None:
    if dist.is_initialized():
        return
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
