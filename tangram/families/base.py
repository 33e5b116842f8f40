"""What a model family is, and the one place where families are registered."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tangram.config.model import ModelConfig
from tangram.errors import ConfigError, suggest
from tangram.families.tiny import TinyWriter
from tangram.placement.table import Rule

HFConfig = Mapping[str, Any]
"""The content of a Hugging Face config.json."""

Renames = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Family:
    """All that is special about a model line.

    A family is a delta on its nearest neighbour: build it with ``dataclasses.replace(neighbour, ...)``.

    Args:
        name: registry key, also the ``model_type`` of the Hugging Face config.
        architecture: the Hugging Face class, ``architectures[0]``.
        model_ids: other spellings of the name that model.json may use.
        from_hf_config: Hugging Face config -> model config. Raises ConfigError for what it cannot represent.
        tensor_table: model config, padded vocabulary size -> tensor table.
        config_class: the type of model.json; a subclass of ModelConfig where the family has keys of its own.
        from_hub: regular expressions that turn a key of the hub's files into the canonical (``state_dict``) name; a key that none
            matches is canonical already.
        to_hub: the reverse, used on export.
        rope_index: builds 3-D positions; see ``tangram.data.positions``.
        template: name of the chat template; None: there is none, so that samples are refused which do not name one.
        tiny: ``(out, seed, tied, spec)`` writes a small random Hugging Face checkpoint; see ``tangram.families.tiny``.
        backends: names of the backends that run the model; weights of a family that none runs can be converted.
    """

    name: str
    architecture: str
    from_hf_config: Callable[[HFConfig], ModelConfig]
    tensor_table: Callable[[ModelConfig, int], list[Rule]]
    rope_index: Callable[..., Any]
    template: str | None
    tiny: TinyWriter
    config_class: type[ModelConfig] = ModelConfig
    model_ids: tuple[str, ...] = ()
    from_hub: Renames = ()
    to_hub: Renames = ()
    backends: tuple[str, ...] = ("megatron",)

    def check_backend(self, backend: str) -> None:
        """Refuse a backend that does not run the family.

        Raises:
            ConfigError: it does not.
        """
        if backend not in self.backends:
            instead = f"; use {' or '.join(self.backends)}" if self.backends else ""
            raise ConfigError(f"family {self.name}: weights can be converted, the {backend} backend does not run it yet{instead}")

    def canonical_name(self, key: str) -> str:
        """Name under which ``state_dict()`` knows the tensor that a file calls ``key``."""
        return _rename(key, self.from_hub)

    def hub_name(self, canonical: str) -> str:
        """Name that hub files give the tensor."""
        return _rename(canonical, self.to_hub)


def _rename(name: str, renames: Renames) -> str:
    for pattern, replacement in renames:
        renamed, count = re.subn(pattern, replacement, name, count=1)
        if count:
            return renamed
    return name


_families: dict[str, Family] = {}


def register_family(family: Family) -> None:
    """Add a family to the registry.

    Raises:
        ConfigError: one of its names is taken.
    """
    for name in (family.name, *family.model_ids):
        if name in _families:
            raise ConfigError(f"model family {name!r} is registered already")
        _families[name] = family


def family_names() -> list[str]:
    """Names of all registered families and their other spellings."""
    import tangram.families.builtin  # noqa: F401  registers the families that ship with Tangram

    return sorted(_families)


def has_family(model_id: str) -> bool:
    """Whether ``get_family`` knows the name."""
    return model_id in family_names()


def get_family(model_id: str) -> Family:
    """The family that ``model_id`` of model.json, or ``model_type`` of a Hugging Face config, names.

    Raises:
        ConfigError: no such family.
    """
    import tangram.families.builtin  # noqa: F401  registers the families that ship with Tangram

    if model_id not in _families:
        known = sorted(_families)
        raise ConfigError(
            f"unknown model family {model_id!r}{suggest(model_id, known)}; known: {', '.join(known)}; "
            "a family of your own is registered by a plug-in (docs/bring-a-model.md)"
        )
    return _families[model_id]
