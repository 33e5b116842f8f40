"""The optimizer of a sharded model, and clipping over whatever meshes its parameters lie on."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from tangram.backends.fsdp2.placement import local_value
from tangram.config.run import TrainingConfig
from tangram.errors import ConfigError


def build_optimizer(model: nn.Module, training: TrainingConfig) -> torch.optim.Optimizer:
    """AdamW over all trained parameters.

    Raises:
        ConfigError: everything is frozen.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise ConfigError("nothing to train: model.freeze covers every parameter; leave something out of it")
    return torch.optim.AdamW(
        trained, lr=training.lr, betas=(training.adam_beta1, training.adam_beta2), eps=training.adam_eps, weight_decay=training.weight_decay
    )


def global_norm(parameters: Iterable[torch.Tensor], device: torch.device) -> float:
    """2-norm of all gradients of the whole model, each element counted once on whatever ranks it lies. Collective over all ranks."""
    world = dist.get_world_size()
    total = torch.zeros((), dtype=torch.float64, device=device)
    for parameter in parameters:
        if parameter.grad is not None:
            share = _distinct_parts(parameter.grad) / world
            total += local_value(parameter.grad).double().square().sum().to(device) * share
    dist.all_reduce(total)
    return float(total.sqrt())


def _distinct_parts(tensor: torch.Tensor) -> int:
    """Ranks that hold different parts of a tensor."""
    if not isinstance(tensor, DTensor):
        return 1
    mesh = tensor.device_mesh
    return prod(mesh.size(axis) for axis, placement in enumerate(tensor.placements) if isinstance(placement, Shard))


def clip(parameters: Iterable[torch.Tensor], norm: float, largest: float) -> None:
    """Scale gradients so that their global ``norm`` is at most ``largest``; 0 leaves them. Source: ``torch.nn.utils.clip_grad_norm_``."""
    coefficient = largest / (norm + 1e-6)
    gradients = [local_value(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if largest > 0 and coefficient < 1 and gradients:
        torch._foreach_mul_(gradients, coefficient)
