"""Turn raw dictionaries into typed sections, and pydantic's findings into one-line errors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationError, ValidationInfo, field_validator

from tangram.errors import ConfigError, suggest


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values are checked also when defaults, numbers are finite, instances are frozen.

    Validators are built when first needed: help texts need none.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False, defer_build=True)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and {annotation, *get_args(annotation)} & {int, float}:
            raise ValueError(f"expected a number, got {str(value).lower()}")
        return value


def build_validators(section: type[BaseModel] = Section) -> None:
    """Build those of every section imported so far, for a process that forks others: each would build them again."""
    for kind in section.__subclasses__():
        kind.model_rebuild()
        build_validators(kind)


def _resolve(value: str, info: ValidationInfo) -> str:
    base = (info.context or {}).get("base")
    return str(Path(base, Path(value).expanduser()).resolve()) if base else value


def _joined(value: Any) -> Any:
    """A list of paths as one text."""
    if not isinstance(value, list) or not all(isinstance(part, str) for part in value):
        return value
    for part in value:
        if "," in part:
            raise ValueError(f"{part!r} in a list of paths holds a comma; rename the file")
    return ",".join(value)


def _resolve_each(value: str, info: ValidationInfo) -> str:
    return ",".join(_resolve_name(part.strip(), info) for part in value.split(",") if part.strip())


def _resolve_name(value: str, info: ValidationInfo) -> str:
    """A plain word that is neither file nor folder may be the name of a registered dataset, so it stays as it is."""
    path = _resolve(value, info)
    is_word = Path(value).name == value and Path(value).suffix not in DATASET_SUFFIXES
    return value if is_word and not Path(path).exists() else path


LocalPath = Annotated[str, AfterValidator(_resolve)]
"""A path; made absolute against the ``base`` that ``parse_section`` is given."""

LocalPaths = Annotated[str, BeforeValidator(_joined), AfterValidator(_resolve_each)]
"""Paths separated by commas, or a list of them, each like ``LocalPath``; or names of registered datasets."""

DATASET_SUFFIXES = (".json", ".jsonl", ".parquet")
"""Of dataset files; a word that ends so is a path, whether the file is there or not."""

S = TypeVar("S", bound=Section)


def section_at(section: type[BaseModel], path: Sequence[Any]) -> type[BaseModel] | None:
    """The nested section that ``path`` leads to; None where it leads to none."""
    current: type[BaseModel] | None = section
    for part in path:
        field = current.model_fields.get(part) if current is not None else None
        alternatives = () if field is None else (field.annotation, *get_args(field.annotation))
        # An alternative may itself be an Annotated type.
        candidates = [found for one in alternatives for found in (one, *get_args(one)[:1])]
        current = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)
    return current


def leaf_keys(section: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every key that holds a value, as a path; nested sections are followed."""
    for name in section.model_fields:
        nested = section_at(section, (name,))
        if nested is None:
            yield (*prefix, name)
        else:
            yield from leaf_keys(nested, (*prefix, name))


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """``below`` with the keys of ``above`` on top; mappings that both hold are merged."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def parse_section(section: type[S], raw: Any, where: str, *, base: str | Path | None = None, names: Mapping[str, str] | None = None) -> S:
    """Validate ``raw`` as ``section``.

    Args:
        base: folder that relative paths start from; None: they stay as they are.
        names: how messages call a dotted key, where not by itself.

    Raises:
        ConfigError: one line that names ``where``, the dotted key, the value and the mend.
    """
    if not isinstance(raw, dict):
        raise ConfigError(f"{where}: expected a mapping of keys to values, got {type(raw).__name__}")
    try:
        return section.model_validate(raw, context={"base": base})
    except ValidationError as error:
        raise ConfigError(_describe(section, error, where, names or {})) from None


def _describe(section: type[BaseModel], error: ValidationError, where: str, names: Mapping[str, str]) -> str:
    """The first of pydantic's findings as one line, and how many more there are."""
    findings = error.errors()
    first = findings[0]
    key = ".".join(str(part) for part in first["loc"])
    more = f" ({len(findings) - 1} more like this)" if len(findings) > 1 else ""
    if first["type"] == "extra_forbidden":
        *parents, name = first["loc"]
        nested = section_at(section, parents)
        hint = suggest(str(name), nested.model_fields if nested else ())
        return f"{where}: unknown key {key!r}{hint}; remove it or correct its name{more}"
    if first["type"] == "missing":
        return f"{where}: {names.get(key, key)} is missing; add it{more}"
    message = "expected a mapping of keys to values" if first["type"] == "model_type" else first["msg"].removeprefix("Value error, ")
    value = "" if first["type"] == "value_error" else f", got {first['input']!r}"
    choices = re.findall(r"'([^']*)'", first["ctx"]["expected"]) if first["type"] == "literal_error" else []
    hint = suggest(str(first["input"]), choices)
    return f"{where}: {names.get(key, key) or section.__name__}: {message}{value}{hint}{more}"


def _no_repeats(pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        names = [key for key, _ in pairs]
        twice = next(key for key in names if names.count(key) > 1)
        raise ConfigError(f"key {twice!r} stands twice in one mapping; remove one")
    return content


class _UniqueKeys(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, of which YAML would keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        # First the base class, which refuses lists and mappings as keys.
        content = super().construct_mapping(node, deep)
        _no_repeats([(self.construct_object(key), None) for key in keys])
        return content


def read_yaml(text: str) -> Any:
    """The value of a YAML text.

    Raises:
        ConfigError: not valid YAML, a key given twice, or a date that is none.
    """
    try:
        return yaml.load(text, _UniqueKeys)
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError("not valid YAML for a configuration: nested too deeply; check its brackets") from None
    # A timestamp that is no date is a plain ValueError.
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"not valid YAML: {' '.join(str(error).split())}; correct it, or quote the value") from None


def read_mapping(path: str | Path) -> dict[str, Any]:
    """Read a .json, .yaml or .yml file whose top level is a mapping.

    Raises:
        ConfigError: the file is missing, is not valid JSON or YAML (with the line), or holds no mapping.
    """
    path = Path(path)
    _check_is_file(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
        raw = json.loads(text, object_pairs_hook=_no_repeats) if path.suffix == ".json" else read_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}; save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: line {error.lineno}, column {error.colno}: not valid JSON: {error.msg}") from None
    except RecursionError:
        raise ConfigError(f"{path}: not valid JSON for a configuration: nested too deeply; check its brackets") from None
    if raw is None:
        raise ConfigError(f"{path}: the file is empty; it must hold a mapping of keys to values")
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected a mapping of keys to values, got {type(raw).__name__}")
    return raw


def _check_is_file(path: Path) -> None:
    try:
        if path.is_file():
            return
        if path.is_dir():
            raise ConfigError(f"{path}: is a folder; give the path of a file in it")
        what = "no regular file; give the path of a file" if path.exists() else "no such file"
    except OSError as error:
        raise ConfigError(f"{str(path)[:80]}: {error.strerror}; give the path of a file") from None
    raise ConfigError(f"{path}: {what}")
