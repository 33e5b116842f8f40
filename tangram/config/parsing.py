"""Turn raw dictionaries into typed sections, and pydantic's findings into one-line errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from tangram.errors import ConfigError, suggest


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values are checked also when defaults, instances are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


S = TypeVar("S", bound=Section)


def _known_keys(section: type[BaseModel], path: tuple[Any, ...]) -> list[str]:
    """Names of the fields that stand where ``path`` ends, following nested sections."""
    current: Any = section
    for part in path:
        field = getattr(current, "model_fields", {}).get(part)
        if field is None:
            return []
        candidates = [field.annotation, *getattr(field.annotation, "__args__", ())]
        current = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)
        if current is None:
            return []
    return list(current.model_fields)


def parse_section(section: type[S], raw: Any, where: str) -> S:
    """Validate ``raw`` as ``section``.

    Raises:
        ConfigError: one line that names ``where``, the dotted key, the value and the mend.
    """
    if not isinstance(raw, dict):
        raise ConfigError(f"{where}: expected a mapping of keys to values, got {type(raw).__name__}")
    try:
        return section.model_validate(raw)
    except ValidationError as error:
        findings = error.errors()
        first = findings[0]
        key = ".".join(str(part) for part in first["loc"])
        more = f" ({len(findings) - 1} more like this)" if len(findings) > 1 else ""
        if first["type"] == "extra_forbidden":
            *parents, name = first["loc"]
            hint = suggest(str(name), _known_keys(section, tuple(parents)))
            raise ConfigError(f"{where}: unknown key {key!r}{hint}; remove it or correct its name{more}") from None
        message = first["msg"].removeprefix("Value error, ")
        value = "" if first["type"] in ("missing", "value_error") else f", got {first['input']!r}"
        raise ConfigError(f"{where}: {key or section.__name__}: {message}{value}{more}") from None


def read_mapping(path: str | Path) -> dict[str, Any]:
    """Read a .json, .yaml or .yml file whose top level is a mapping.

    Raises:
        ConfigError: the file is missing, is not valid JSON or YAML (with the line), or holds no mapping.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    try:
        text = path.read_text(encoding="utf-8-sig")
        raw = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}; save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: line {error.lineno}, column {error.colno}: not valid JSON: {error.msg}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected a mapping of keys to values, got {type(raw).__name__}")
    return raw
