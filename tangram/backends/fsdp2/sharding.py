"""``fsdp_plan`` carried out: units are sharded, gathered ahead of use, and given memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from tangram.backends.dtypes import DTYPES
from tangram.backends.fsdp2.experts import SplitExperts
from tangram.backends.fsdp2.meshes import Meshes
from tangram.backends.fsdp2.units import Unit, UnitPlan, plan_units
from tangram.config.fsdp2 import FsdpPlan
from tangram.errors import ConfigError


@dataclass
class ShardedModel:
    """A model and its units.

    Args:
        root: the whole model, itself a unit.
        entered: sharded modules in the order in which they are entered, the root not among them.
        whole: trained parameters that every rank holds whole.
        experts: units of expert parallel.
        alone: one process holds all.
    """

    root: FSDPModule
    plan: UnitPlan
    entered: Sequence[FSDPModule]
    whole: Sequence[nn.Parameter] = field(default_factory=list)
    experts: Sequence[FSDPModule] = ()
    alone: bool = False

    def gather(self) -> None:
        """Start to gather all units (``pregather``)."""
        for module in [self.root, *self.entered, *self.experts]:
            module.unshard(async_op=True)

    def free(self) -> None:
        """Give back what is gathered; the next use gathers it anew."""
        for module in [self.root, *self.entered, *self.experts]:
            module.reshard()

    def begin(self, last: bool) -> None:
        """Before a micro-batch. Copies of the weights (HSDP) sum their gradients once, in the ``last``; no rank waits for sums before that."""
        self.root.set_requires_all_reduce(last)
        self.root.set_is_last_backward(last)
        if self.alone:
            # There is nobody to share with: gathering and summing are copies, of which one per step will do.
            self.root.set_requires_gradient_sync(last)
            self.root.set_reshard_after_backward(last)

    @torch.no_grad()
    def sum_whole(self) -> None:
        """Sum the gradients of parameters that are held whole. Collective over all ranks."""
        if not self.whole:
            return
        reached = torch.tensor([parameter.grad is not None for parameter in self.whole], dtype=torch.int32, device=self.whole[0].device)
        dist.all_reduce(reached, op=dist.ReduceOp.MAX)
        parameters = [parameter for parameter, anywhere in zip(self.whole, reached.tolist(), strict=True) if anywhere]
        if not parameters:
            return
        flat = torch.cat([(torch.zeros_like(one) if one.grad is None else one.grad).flatten() for one in parameters])
        dist.all_reduce(flat)
        for parameter, summed in zip(parameters, flat.split([one.numel() for one in parameters]), strict=True):
            parameter.grad = summed.view_as(parameter).clone()


def shard(model: nn.Module, plan: FsdpPlan, meshes: Meshes, experts: SplitExperts) -> ShardedModel:
    """Shard ``model`` in place: units that the plan names, inner ones first, then the root with all that is left; then give it memory.

    Gradients come out as sums over ranks: what losses are divided by is counted over all of them beforehand.

    Raises:
        ConfigError: as ``plan_units``, ``precision`` and ``SplitExperts.shard``.
    """
    units = plan_units(model, plan)
    ignored = {parameter for path in units.ignored for parameter in model.get_submodule(path).parameters()}
    policy = precision(plan)
    options: dict[str, Any] = {
        "mp_policy": policy,
        "offload_policy": CPUOffloadPolicy(pin_memory=meshes.device.type != "cpu") if plan.cpu_offload else OffloadPolicy(),
        "ignored_params": ignored,
    }
    own = experts.shard(model, reshard_after_forward=plan.reshard_after_forward, **options)
    options["mesh"] = meshes.sharding
    for unit in sorted(units.units, key=lambda unit: -max(path.count(".") for path in unit.paths)):
        modules = [model.get_submodule(path) for path in unit.paths]
        fully_shard(modules if len(modules) > 1 else modules[0], reshard_after_forward=plan.reshard_after_forward, **options)
    # What the root gives holds the loss, which stays fp32.
    options["mp_policy"] = replace(policy, output_dtype=None)
    # None: as True, but the root, whose backward pass follows its forward pass at once, stays gathered.
    fully_shard(model, reshard_after_forward=None if plan.reshard_after_forward else False, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    for path in units.ignored:
        _compute_in_fp32(model.get_submodule(path), policy.param_dtype)
    _materialise(model, torch.device("cpu") if plan.cpu_offload else meshes.device, meshes.device)
    sharded = ShardedModel(
        cast(FSDPModule, model),
        units,
        [_module(model, unit) for unit in units.units],
        [parameter for parameter in model.parameters() if parameter.requires_grad and not isinstance(parameter, DTensor)],
        own,
        alone=dist.get_world_size() == 1 and not plan.cpu_offload,
    )
    _prefetch(sharded, plan)
    _hook(model, units)
    return sharded


def _module(model: nn.Module, unit: Unit) -> FSDPModule:
    return cast(FSDPModule, model.get_submodule(unit.paths[0]))


def precision(plan: FsdpPlan) -> MixedPrecisionPolicy:
    """The types that weights are gathered in, gradients summed in, and outputs given in.

    Raises:
        ConfigError: fp16.
    """

    def dtype(key: str) -> torch.dtype | None:
        name = getattr(plan, key)
        if name == "fp16":
            raise ConfigError(f"parallel.fsdp_plan.{key}: fp16 needs its losses scaled, which this backend does not do; use bf16")
        return None if name is None else DTYPES[name]

    return MixedPrecisionPolicy(
        param_dtype=dtype("param_dtype"),
        reduce_dtype=dtype("reduce_dtype"),
        output_dtype=dtype("output_dtype"),
        cast_forward_inputs=plan.cast_forward_inputs,
    )


def _compute_in_fp32(module: nn.Module, around: torch.dtype | None) -> None:
    """Parameters that are held whole are fp32; what flows around them may not be."""
    if around is None or around == torch.float32:
        return

    def cast_to(dtype: torch.dtype, values: Any) -> Any:
        return tree_map_only(Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, values)

    module.register_forward_pre_hook(lambda _, args, kwargs: cast_to(torch.float32, (args, kwargs)), with_kwargs=True)
    module.register_forward_hook(lambda _, args, output: cast_to(around, output))


def _materialise(model: nn.Module, home: torch.device, device: torch.device) -> None:
    """Give parameters that have none memory, shards on ``home``, the others on ``device``; move buffers, which are real already.

    Weights that modules share stay shared, unlike with ``Module.to_empty``.
    """
    shared: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shared.setdefault(id(parameter), []).append(name)

    def real(tensor: Tensor) -> Tensor:
        place = home if isinstance(tensor, DTensor) else device
        return torch.empty_like(tensor, device=place) if tensor.is_meta else tensor.to(place)

    # _apply, which Module.to is made of, is also where fully_shard takes note of what shards are now.
    model._apply(real)
    for first, *others in shared.values():
        for name in others:
            path, _, key = name.rpartition(".")
            setattr(model.get_submodule(path), key, model.get_parameter(first))


def _prefetch(sharded: ShardedModel, plan: FsdpPlan) -> None:
    """Say which units are gathered ahead: those that are entered next, and on the way back those that were entered before."""
    order = [sharded.root, *sharded.entered]
    for at, module in enumerate(order):
        ahead = order[at + 1 : at + 1 + plan.num_to_forward_prefetch]
        if ahead:
            module.set_modules_to_forward_prefetch(ahead)
    # The root is left last on the way forward, so it is the first on the way back.
    back = [sharded.root, *reversed(sharded.entered)]
    for at, module in enumerate(back):
        ahead = back[at + 1 : at + 1 + plan.num_to_backward_prefetch]
        if ahead:
            module.set_modules_to_backward_prefetch(ahead)


def _hook(model: nn.Module, units: UnitPlan) -> None:
    for path, below in units.hooks.items():
        modules = [_module(model, unit) for unit in below]

        def gather(_: nn.Module, __: Any, modules: list[FSDPModule] = modules) -> None:
            for module in modules:
                module.unshard(async_op=True)

        model.get_submodule(path).register_forward_pre_hook(gather)
