"""``fsdp_plan``: which modules are sharded as units of their own, and how."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from tangram.backends.dtypes import DTYPES
from tangram.backends.fsdp2.meshes import Meshes
from tangram.config.fsdp2 import FsdpPlan
from tangram.config.patterns import match_each


def shard(model: nn.Module, plan: FsdpPlan, meshes: Meshes) -> None:
    """Shard ``model`` in place: units that the plan names, inner ones first, then the root with all that is left.

    Gradients come out as sums over ranks: what losses are divided by is counted over all of them beforehand.

    Raises:
        ConfigError: as ``match_each``.
    """
    modules = dict(model.named_modules())
    paths = [path for path in modules if path]
    units = [path for found in match_each(plan.apply_modules, paths, "parallel.fsdp_plan.apply_modules").values() for path in found]
    ignored = {
        parameter
        for found in match_each(plan.ignored_modules, paths, "parallel.fsdp_plan.ignored_modules").values()
        for path in found
        for parameter in modules[path].parameters()
    }
    options: dict[str, Any] = {
        "mesh": meshes.sharding,
        "reshard_after_forward": plan.reshard_after_forward,
        "mp_policy": _precision(plan),
        "offload_policy": CPUOffloadPolicy(pin_memory=meshes.device.type != "cpu") if plan.cpu_offload else OffloadPolicy(),
        "ignored_params": ignored,
    }
    for path in sorted(units, key=lambda path: -path.count(".")):
        fully_shard(modules[path], **options)
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _precision(plan: FsdpPlan) -> MixedPrecisionPolicy:
    def dtype(name: str | None) -> torch.dtype | None:
        return None if name is None else DTYPES[name]

    return MixedPrecisionPolicy(
        param_dtype=dtype(plan.param_dtype),
        reduce_dtype=dtype(plan.reduce_dtype),
        output_dtype=dtype(plan.output_dtype),
        cast_forward_inputs=plan.cast_forward_inputs,
    )
