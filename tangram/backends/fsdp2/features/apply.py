"""Puts the memory features of a run file on a model: after it is built, before it is sharded."""

from __future__ import annotations

from torch import nn

from tangram.backends.fsdp2.features.chunk_mbs import Chunked, refuse_3d_positions
from tangram.backends.fsdp2.features.offload import Offloaded
from tangram.backends.fsdp2.features.recompute import Recomputed
from tangram.backends.fsdp2.features.wrapped import chosen, first_above
from tangram.config.fsdp2 import Fsdp2Features
from tangram.errors import ConfigError
from tangram.platform.offload.chain import Chain


def prepare(model: nn.Module, features: Fsdp2Features) -> None:
    """Apply, from the inside out: recomputation, offload of activations, chunks of micro-batches.

    Raises:
        ConfigError: a feature without modules, a recompute_plan without recompute, patterns as ``match_each``, or two features that do not go
            together.
    """
    recomputed = _recompute(model, features)
    _offload(model, features, recomputed)
    _chunk(model, features)


def _recompute(model: nn.Module, features: Fsdp2Features) -> dict[str, nn.Module]:
    plan, coefficient = features.recompute_plan, features.loss_cfg.router_aux_loss_coef
    key = "features.recompute_plan.apply_modules"
    if plan.apply_modules and not features.recompute:
        raise ConfigError(f"{key} names modules, but features.recompute is off; set it true (it stands in features), or remove the plan")
    modules = chosen(model, plan.apply_modules, ("features.recompute", features.recompute), key)
    if modules and plan.use_reentrant and coefficient > 0:
        raise ConfigError(
            f"features.recompute_plan.use_reentrant with router_aux_loss_coef {coefficient}: router logits leave the recomputed modules without "
            "gradients, so that loss would train nothing; set use_reentrant false"
        )
    for path, module in modules.items():
        Recomputed(path, module, plan.use_reentrant).install()
    return modules


def _offload(model: nn.Module, features: Fsdp2Features, recomputed: dict[str, nn.Module]) -> None:
    key = "features.activation_offload_plan.apply_modules"
    switch = ("features.enable_activation_offload", features.enable_activation_offload)
    modules = chosen(model, features.activation_offload_plan.apply_modules, switch, key)
    chain = Chain()
    for path, module in modules.items():
        above = first_above(path, recomputed)
        if above is not None:
            raise ConfigError(f"{key}: {path} lies within {above}, which is recomputed, so what it saves would be copied for nothing; name {above}")
        Offloaded(path, module, chain).install()


def _chunk(model: nn.Module, features: Fsdp2Features) -> None:
    plan, coefficient = features.chunkmbs_plan, features.loss_cfg.router_aux_loss_coef
    switch = ("features.enable_chunk_mbs", features.enable_chunk_mbs)
    modules = chosen(model, plan.apply_modules, switch, "features.chunkmbs_plan.apply_modules")
    if not modules:
        return
    refuse_3d_positions(model)
    if coefficient > 0:
        raise ConfigError(
            f"features.enable_chunk_mbs with router_aux_loss_coef {coefficient}: routers would report each chunk by itself, which is another loss; "
            "switch one of them off"
        )
    for path, module in modules.items():
        Chunked(path, module, plan).install()
