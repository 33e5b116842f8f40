"""The process group and the device mesh of one run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tangram.backends.processes import join_processes
from tangram.config.fsdp2 import Fsdp2Parallel
from tangram.config.fsdp2_sizes import sizes
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


def join(parallel: Fsdp2Parallel) -> Meshes:
    """Join the process group (of torchrun's environment, or of this process alone) and lay out its ranks.

    Raises:
        ConfigError: as ``sizes``.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    replicate, shard, ulysses = sizes(parallel, world_size)
    device = current().use(int(os.environ.get("LOCAL_RANK", "0")))
    join_processes(parallel.distributed_backend or _backend(parallel), timedelta(minutes=parallel.distributed_timeout_minutes))
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
