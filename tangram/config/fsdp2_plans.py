"""The plans of an fsdp2 run file that name modules, held against the modules that there are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tangram.config.fsdp2 import Fsdp2Config
from tangram.config.patterns import match_each
from tangram.errors import ConfigError


def plans_of(config: Fsdp2Config) -> dict[str, Sequence[str]]:
    """Every list of patterns by its key. Those of features that are switched off are among them: a wrong path is wrong then too."""
    fsdp, ep, features = config.parallel.fsdp_plan, config.parallel.ep_plan, config.features
    return {
        "model.freeze": config.model.freeze,
        "parallel.fsdp_plan.apply_modules": fsdp.apply_modules,
        "parallel.fsdp_plan.ignored_modules": fsdp.ignored_modules,
        "parallel.fsdp_plan.hook_modules": fsdp.hook_modules or [],
        "parallel.ep_plan.apply_modules": ep.apply_modules,
        "parallel.ep_plan.apply_efsdp_modules": ep.apply_efsdp_modules,
        "features.recompute_plan.apply_modules": features.recompute_plan.apply_modules,
        "features.activation_offload_plan.apply_modules": features.activation_offload_plan.apply_modules,
        "features.chunkmbs_plan.apply_modules": features.chunkmbs_plan.apply_modules,
    }


def check_switches(config: Fsdp2Config) -> None:
    """What is switched on must say for which modules, and what names modules must be switched on.

    Raises:
        ConfigError: one without the other.
    """
    features, experts = config.features, config.parallel.expert_parallel_size
    for switch, on, plan in (
        ("features.recompute", features.recompute, "features.recompute_plan.apply_modules"),
        ("features.enable_activation_offload", features.enable_activation_offload, "features.activation_offload_plan.apply_modules"),
        ("features.enable_chunk_mbs", features.enable_chunk_mbs, "features.chunkmbs_plan.apply_modules"),
        (f"parallel.expert_parallel_size {experts}", experts > 1, "parallel.ep_plan.apply_modules"),
    ):
        named = plans_of(config)[plan]
        if on and not named:
            raise ConfigError(f"{switch} is on, but {plan} names no module; name some, or switch it off")
        if named and not on:
            raise ConfigError(f"{plan} names modules, but {switch} is off; switch it on, or remove the plan")


def check_paths(config: Fsdp2Config, paths: Iterable[str]) -> str:
    """Hold every pattern against the paths of the model's modules.

    Args:
        paths: as ``named_modules`` gives them, the model's own empty one left out.

    Returns:
        How many modules each plan reaches.

    Raises:
        ConfigError: as ``match_each``; ``chunkloss_plan.apply_module`` matches more or less than one module while chunk loss is on.
    """
    known = list(paths)
    counts = {}
    for key, patterns in plans_of(config).items():
        found = match_each(patterns, known, key)
        if patterns:
            counts[key] = sum(map(len, found.values()))
    features, head = config.features, config.features.chunkloss_plan.apply_module
    if features.enable_chunk_loss or features.enable_dynamic_chunk_loss:
        matched = match_each([head], known, "features.chunkloss_plan.apply_module")[head]
        if len(matched) > 1:
            raise ConfigError(
                f"features.chunkloss_plan.apply_module: {head!r} matches {len(matched)} modules ({matched[0]}, {matched[1]}, ...); name the one head"
            )
    return ", ".join(f"{key.removesuffix('.apply_modules')} {count}" for key, count in counts.items()) or "no plan names a module"
