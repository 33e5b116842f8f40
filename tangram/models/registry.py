"""The two tables that ``model_id`` looks up: component classes and layer specs.

A new model is added by registering a component class (or re-using one), a layer spec and a family (``tangram.families``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from megatron.core.transformer.spec_utils import ModuleSpec
from torch import nn

from tangram.config.parsing import Section
from tangram.errors import ConfigError, suggest

T = TypeVar("T")
LayerSpec = Callable[[Any], ModuleSpec]
"""Section of model.json -> spec of one transformer layer."""

_components: dict[str, type[nn.Module]] = {}
_layer_specs: dict[str, LayerSpec] = {}


def register_component(model_id: str, component: type[nn.Module], layer_spec: LayerSpec | None = None) -> None:
    """Make ``model_id`` name a component class and, for a transformer, its layer spec.

    Raises:
        ConfigError: the name is taken.
    """
    if model_id in _components:
        raise ConfigError(f"component {model_id!r} is registered already, as {_components[model_id].__name__}")
    _components[model_id] = component
    if layer_spec is not None:
        _layer_specs[model_id] = layer_spec


def _find(table: dict[str, T], model_id: str, what: str) -> T:
    import tangram.models.builtin  # noqa: F401  registers what ships with Tangram

    if model_id not in table:
        raise ConfigError(f"model_id {model_id!r} names no {what}{suggest(model_id, table)}; known: {', '.join(sorted(table))}")
    return table[model_id]


def find_component(section: Section) -> type[nn.Module]:
    """The class that the section's ``model_id`` names.

    Raises:
        ConfigError: unknown.
    """
    return _find(_components, section.model_id, "component")  # type: ignore[attr-defined]


def find_layer_spec(section: Section) -> ModuleSpec:
    """The layer spec that the section's ``model_id`` names, made for the section.

    Raises:
        ConfigError: unknown.
    """
    return _find(_layer_specs, section.model_id, "layer spec")(section)  # type: ignore[attr-defined]
