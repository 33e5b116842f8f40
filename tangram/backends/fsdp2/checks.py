"""What can be said of a run's model before it has weights: its class, and the modules that the plans name. Needs transformers, but no memory."""

from __future__ import annotations

from tangram.backends.fsdp2.experts import check_plan
from tangram.backends.fsdp2.features import prepare
from tangram.backends.fsdp2.model_hub import ModelHub
from tangram.backends.fsdp2.optimizer import by_name
from tangram.backends.fsdp2.sharding import precision
from tangram.backends.fsdp2.ulysses import check_sharing
from tangram.backends.fsdp2.units import plan_units
from tangram.config.fsdp2_plans import check_paths
from tangram.config.preflight_rules import Rule, Subject
from tangram.errors import ConfigError


def modules(subject: Subject) -> str:
    """Build the model without memory and hold every plan against its modules.

    Raises:
        ConfigError: as ``ModelHub.skeleton``, ``precision``, ``prepare``, ``check_plan``, ``check_sharing``, ``by_name`` and ``plan_units``, or
            nothing is trained.
    """
    settings = subject.run.fsdp2
    assert settings is not None
    model = ModelHub.skeleton(settings)
    total = sum(parameter.numel() for parameter in model.parameters())
    learnt = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    trained = sum(parameter.numel() for parameter in learnt.values())
    if not trained:
        raise ConfigError("model.freeze covers every parameter, so nothing would be trained; leave something out of it")
    precision(settings.parallel.fsdp_plan)
    reached = check_paths(settings, [path for path, _ in model.named_modules() if path])
    prepare(model, settings.features)
    check_plan(settings.parallel)
    if settings.parallel.ulysses_parallel_size > 1:
        check_sharing(model, settings.parallel.ulysses_parallel_size, settings.features.loss_cfg)
    by_name(model, list(learnt), settings.training)
    plan_units(model, settings.parallel.fsdp_plan)
    return f"{type(model).__name__}, {trained:,} of {total:,} parameters are trained; modules: {reached}"


RULES: tuple[tuple[str, Rule], ...] = (("modules", modules),)
