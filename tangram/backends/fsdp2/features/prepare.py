"""Puts the memory features of a run file on a model: after it is built, before it is sharded."""

from __future__ import annotations

from torch import nn

from tangram.backends.fsdp2.features.recompute import Recomputed
from tangram.backends.fsdp2.features.wrapped import chosen
from tangram.config.fsdp2 import Fsdp2Features
from tangram.errors import ConfigError


def prepare(model: nn.Module, features: Fsdp2Features) -> None:
    """Apply, from the inside out: recomputation, offload of activations, chunks of micro-batches.

    Raises:
        ConfigError: a feature without modules, modules without their feature, patterns as ``match_each``, or two features that do not go together.
    """
    plan = features.recompute_plan
    recomputed = chosen(model, plan.apply_modules, ("features.recompute", features.recompute), "features.recompute_plan.apply_modules")
    if recomputed and plan.use_reentrant and features.loss_cfg.router_aux_loss_coef > 0:
        raise ConfigError(
            f"features.recompute_plan.use_reentrant with router_aux_loss_coef {features.loss_cfg.router_aux_loss_coef}: router logits leave the "
            "recomputed modules without gradients, so that loss would train nothing; set use_reentrant false"
        )
    for path, module in recomputed.items():
        Recomputed(path, module, plan.use_reentrant).install()
