"""The optimizer of a sharded model: groups, update, gradient norm and clipping over whatever meshes its parameters lie on.

torch's optimizers get this rank's shards as plain tensors: their element-wise updates need to know nothing of meshes, and so none of
DTensor's cost per operation is paid.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from tangram.backends.fsdp2.muon import MuonAdamW, is_matrix_of_a_hidden_layer
from tangram.backends.fsdp2.placement import local_value
from tangram.config.fsdp2 import Fsdp2Training
from tangram.errors import ConfigError, name_some, suggest
from tangram.platform import current


class ShardedOptimizer:
    """AdamW, or Muon with AdamW, over this rank's shards of the trained parameters.

    Args:
        model: sharded.
        training: of the run file.

    Attributes:
        parameters: the model's trained parameters by name.
        shards: what of them lies on this rank, sharing their memory; moments are kept by these.
        torch: the torch optimizer.

    Raises:
        ConfigError: everything is frozen, or an entry of ``lr_scaling_plan``, ``no_decay_modules`` or ``no_decay_params`` matches nothing.
    """

    def __init__(self, model: nn.Module, training: Fsdp2Training) -> None:
        self.parameters: dict[str, nn.Parameter] = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise ConfigError("nothing to train: model.freeze covers every parameter; leave something out of it")
        self.shards = {name: nn.Parameter(local_value(p)) for name, p in self.parameters.items()}
        groups = self._groups(model, training)
        betas = (training.adam_beta1, training.adam_beta2)
        # torch has a fused AdamW for each of the platforms; foreach is its plain one.
        adam: dict[str, Any] = {"betas": betas, "eps": training.adam_eps, "fused": training.adam_fused, "foreach": not training.adam_fused}
        self.torch: torch.optim.Optimizer
        if training.optimizer == "muon":
            layouts = {self.shards[name]: p for name, p in self.parameters.items()}
            self.torch = MuonAdamW(groups, layouts, training.muon_momentum, training.matched_adamw_rms, training.ns_steps, adam)
        else:
            self.torch = torch.optim.AdamW(groups, lr=training.lr, **adam)

    def _groups(self, model: nn.Module, training: Fsdp2Training) -> list[dict[str, Any]]:
        """One group per weight decay, learning-rate scale and kind of update; none is empty."""
        scales, spared = by_name(model, list(self.parameters), training)
        muon = is_matrix_of_a_hidden_layer(model) if training.optimizer == "muon" else set()
        groups: dict[tuple[float, float, bool], list[nn.Parameter]] = defaultdict(list)
        for name, shard in self.shards.items():
            # A rank that holds no row of a matrix still takes part in gathering it for Muon.
            if shard.numel() or name in muon:
                groups[0.0 if name in spared else training.weight_decay, scales[name], name in muon].append(shard)
        return [
            {"params": params, "weight_decay": decay, "scale": scale, "muon": of_muon, "lr": training.lr * scale}
            for (decay, scale, of_muon), params in groups.items()
        ]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update with learning rate ``lr``, times each group's scale. A parameter without a gradient stays as it is."""
        for name, shard in self.shards.items():
            gradient = self.parameters[name].grad
            shard.grad = None if gradient is None else local_value(gradient)
        for group in self.torch.param_groups:
            group["lr"] = lr * group["scale"]
        self.torch.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for name, parameter in self.parameters.items():
            parameter.grad = self.shards[name].grad = None

    @torch.no_grad()
    def norms(self, device: torch.device) -> tuple[float, float]:
        """2-norms of the gradients: of the whole model, each element counted once on whatever ranks it lies, and of this rank's shards alone.
        Collective over all ranks."""
        world = dist.get_world_size()
        by_share: dict[float, list[Tensor]] = defaultdict(list)
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                by_share[_distinct_parts(parameter.grad) / world].append(local_value(parameter.grad))
        total, own = torch.zeros(2, dtype=current().sum_dtype, device=device).unbind()
        for share, gradients in by_share.items():
            norms = torch.stack(torch._foreach_norm(gradients, 2, dtype=current().sum_dtype))
            squares = norms.square().sum().to(device)
            total += squares * share
            own += squares
        dist.all_reduce(total)
        return float(total.sqrt()), float(own.sqrt())

    @torch.no_grad()
    def clip(self, norm: float, largest: float, foreach: bool = True) -> None:
        """Scale gradients so that their global ``norm`` is at most ``largest``; 0 leaves them. Source: ``torch.nn.utils.clip_grad_norm_``."""
        coefficient = largest / (norm + 1e-6)
        if largest <= 0 or coefficient >= 1:
            return
        gradients = [local_value(p.grad) for p in self.parameters.values() if p.grad is not None]
        if foreach:
            torch._foreach_mul_(gradients, coefficient)
        else:
            for gradient in gradients:
                gradient.mul_(coefficient)


def _distinct_parts(tensor: Tensor) -> int:
    """Ranks that hold different parts of a tensor; each part lies on world size / this many ranks."""
    if not isinstance(tensor, DTensor):
        return 1
    mesh = tensor.device_mesh
    return prod(mesh.size(axis) for axis, placement in enumerate(tensor.placements) if isinstance(placement, Shard))


def by_name(model: nn.Module, names: list[str], training: Fsdp2Training) -> tuple[Mapping[str, float], set[str]]:
    """Factor of the learning rate of each of the trained parameters ``names``, and those that have no weight decay.

    Raises:
        ConfigError: an entry of ``lr_scaling_plan``, ``no_decay_modules`` or ``no_decay_params`` matches nothing.
    """
    return _scales(names, training), _without_decay(model, names, training)


def _scales(names: list[str], training: Fsdp2Training) -> Mapping[str, float]:
    """Of each parameter, by the first entry whose expression matches the beginning of its name.

    Raises:
        ConfigError: an expression that no name is the first to match.
    """
    scales = dict.fromkeys(names, 1.0)
    free = list(names)
    for number, entry in enumerate(training.lr_scaling_plan):
        where = f"training.lr_scaling_plan[{number}].match {entry.match!r}"
        found = {name for name in free if re.match(entry.match, name)}
        if not found:
            raise ConfigError(f"{where}: no trained parameter's name begins so, or entries before it take all that do; correct or remove it")
        scales |= dict.fromkeys(found, entry.scale)
        free = [name for name in free if name not in found]
    return scales


def _without_decay(model: nn.Module, names: list[str], training: Fsdp2Training) -> set[str]:
    """Parameters that have no weight decay.

    Raises:
        ConfigError: an entry that spares nothing.
    """
    classes: dict[str, set[str]] = defaultdict(set)
    for path, module in model.named_modules():
        for own, _ in module.named_parameters(recurse=False):
            classes[type(module).__name__.removeprefix("FSDP")].add(f"{path}.{own}" if path else own)
    spared: set[str] = set()
    for part in training.no_decay_modules:
        found = {name for kind, held in classes.items() if part in kind for name in held} & set(names)
        if not found:
            raise ConfigError(
                f"training.no_decay_modules: no module with trained parameters has {part!r} in its class name{suggest(part, classes)}; "
                f"there are {name_some(classes)}"
            )
        spared |= found
    for part in training.no_decay_params:
        found = {name for name in names if part in name}
        if not found:
            raise ConfigError(f"training.no_decay_params: no trained parameter has {part!r} in its name; correct or remove it")
        spared |= found
    return spared
