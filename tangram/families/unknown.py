"""A model that Tangram has no family for, as the fsdp2 backend runs it: its class and its config.json say all there is to know."""

from __future__ import annotations

from typing import Any, NoReturn

from tangram.errors import ConfigError
from tangram.families.base import Family, get_family, has_family


def family_or_unknown(model_type: str) -> Family:
    """The registered family of that ``model_type``, or one that knows its name alone."""
    return get_family(model_type) if has_family(model_type) else unknown_family(model_type)


def unknown_family(model_type: str) -> Family:
    """A family of that name without description, table, positions or template; keys of files are those of ``state_dict()``."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise ConfigError(f"model_type {model_type!r} is of no registered family, which this needs; register one (docs/bring-a-model.md)")

    return Family(
        name=model_type,
        architecture="",
        from_hf_config=refuse,
        tensor_table=lambda *_: [],
        rope_index=refuse,
        template=None,
        tiny=refuse,
        backends=("fsdp2",),
    )
