"""Which modules ``fsdp_plan`` makes units of sharding, as a list that can be looked at before anything is sharded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from tangram.config.fsdp2 import FsdpPlan
from tangram.config.patterns import match_each
from tangram.errors import ConfigError

KEY = "parallel.fsdp_plan"
ROOT = "(root)"


@dataclass(frozen=True)
class Unit:
    """Modules whose parameters are gathered together and whose gradients are summed together.

    Args:
        pattern: of ``apply_modules``; ``(root)`` for what no pattern covers.
        paths: one module, or those that share a weight.
    """

    pattern: str
    paths: tuple[str, ...]


@dataclass(frozen=True)
class UnitPlan:
    """Args:
    units: in the order in which they are entered, the root not among them.
    ignored: modules whose parameters every rank holds whole.
    hooks: modules at whose entry the units below them are gathered, and these units in order.
    """

    units: Sequence[Unit]
    ignored: Sequence[str]
    hooks: Mapping[str, Sequence[Unit]]


def plan_units(model: nn.Module, plan: FsdpPlan) -> UnitPlan:
    """Hold the plan against the model.

    Modules that share a weight, such as tied embedding and head, make one unit if the plan names them all.

    Raises:
        ConfigError: as ``match_each``; a weight that several units would hold; a unit within what is ignored; a hook with no unit below it; an
            embedding that would be entered without its unit.
    """
    modules = dict(model.named_modules())
    paths = [path for path in modules if path]
    found = match_each(plan.apply_modules, paths, f"{KEY}.apply_modules")
    ignored = _flat(match_each(plan.ignored_modules, paths, f"{KEY}.ignored_modules"))
    units = [Unit(pattern, (path,)) for pattern, matched in found.items() for path in matched]
    for unit in units:
        inside = next((path for path in ignored if _covers(path, unit.paths[0])), None)
        if inside is not None:
            raise ConfigError(
                f"{KEY}: apply_modules shards {unit.paths[0]}, which ignored_modules leaves whole ({inside}); remove it from one of them"
            )
    units = _joined(model, units, ignored)
    embedding = _input_embedding(model)
    _check_embedding(model, embedding, units, ignored)
    units = _in_order_of_entry(units, embedding)
    hooks = {path: _below(path, units) for path in _flat(match_each(plan.hook_modules or [], paths, f"{KEY}.hook_modules"))}
    for path, below in hooks.items():
        if not below:
            raise ConfigError(f"{KEY}.hook_modules: no module of apply_modules lies below {path}, so there is nothing to gather; remove it")
    return UnitPlan(units, ignored, hooks)


def _flat(found: Mapping[str, Iterable[str]]) -> list[str]:
    return [path for matched in found.values() for path in matched]


def _covers(outer: str, path: str) -> bool:
    return path == outer or path.startswith(f"{outer}.")


def _below(path: str, units: Sequence[Unit]) -> list[Unit]:
    return [unit for unit in units if all(_covers(path, own) and own != path for own in unit.paths)]


def _joined(model: nn.Module, units: list[Unit], ignored: Sequence[str]) -> list[Unit]:
    """Units that hold the same weight put together; each weight must then belong to one unit."""
    holders: dict[int, list[str]] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        module = path.rpartition(".")[0]
        if not any(_covers(outer, module) for outer in ignored):
            holders.setdefault(id(parameter), []).append(module)
    for sharing in holders.values():
        owners = list(dict.fromkeys(owner_of(module, units) for module in sharing))
        if len(owners) < 2:
            continue
        whole = [owner for owner in owners if owner is not None and set(owner.paths) <= set(sharing)]
        if len(whole) < len(owners):
            each = "both" if len(sharing) == 2 else "all"
            raise ConfigError(f"{KEY}.apply_modules: {' and '.join(sharing)} share a weight, which one unit must hold; name {each} of them, or none")
        joint = Unit(whole[0].pattern, tuple(path for unit in whole for path in unit.paths))
        units = [joint if unit is whole[0] else unit for unit in units if unit not in whole[1:]]
    return units


def owner_of(module: str, units: Sequence[Unit]) -> Unit | None:
    """The innermost unit around a module; None: the root."""
    around = [(path, unit) for unit in units for path in unit.paths if _covers(path, module)]
    return max(around, key=lambda one: len(one[0]))[1] if around else None


def _input_embedding(model: nn.Module) -> str | None:
    """Path of what turns token ids into vectors; None: the model does not tell."""
    get = getattr(model, "get_input_embeddings", None)
    module = get() if get is not None else None
    return next((path for path, known in model.named_modules() if known is module), None) if module is not None else None


def _check_embedding(model: nn.Module, embedding: str | None, units: Sequence[Unit], ignored: Sequence[str]) -> None:
    """Models over vectors (``inputs_embeds``) have their embedding called from without, when the unit that holds it may not be gathered."""
    base = getattr(model, "base_model", None)
    if embedding is None or base is None or base is model or any(_covers(path, embedding) for path in ignored):
        return
    caller = next(path for path, module in model.named_modules() if module is base)
    owner = owner_of(embedding, units)
    if owner is not None and embedding not in owner.paths and not any(_covers(path, caller) for path in owner.paths):
        raise ConfigError(
            f"{KEY}.apply_modules: {owner.paths[0]} holds the weights of {embedding}, which {caller or 'the model'} calls before it enters "
            f"{owner.paths[0]}; add {embedding} to apply_modules"
        )


def _in_order_of_entry(units: Sequence[Unit], embedding: str | None) -> list[Unit]:
    """The order of the plan, but the input embedding is entered first, and a module before what lies in it."""
    ordered = [unit for unit in units if embedding in unit.paths]

    def enter(unit: Unit) -> None:
        for outer in units:
            if outer is not unit and outer not in ordered and any(_covers(around, path) for around in outer.paths for path in unit.paths):
                enter(outer)
        if unit not in ordered:
            ordered.append(unit)

    for unit in units:
        enter(unit)
    return ordered
