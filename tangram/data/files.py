"""Which files ``dataset`` names: paths, folders, and names registered in ``dataset_dir/dataset_info.json``, LLaMA-Factory's registry."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tangram.config.data import DatasetAttr
from tangram.config.parsing import DATASET_SUFFIXES, parse_section, read_mapping
from tangram.errors import ConfigError, DataError, name_some, suggest

logger = logging.getLogger(__name__)

REGISTRY = "dataset_info.json"
REMOTE_KEYS = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
"""Keys of entries that are fetched or run, which is not done here."""
COLUMNS = ("system", "tools", "images", "videos", "messages", "prompt", "query", "response", "history")
TAGS = ("role_tag", "content_tag", "user_tag", "assistant_tag", "system_tag", "observation_tag", "function_tag")


@dataclass(frozen=True)
class Source:
    """One dataset of the several that ``dataset`` may name."""

    name: str
    """As the user wrote it."""
    paths: tuple[str, ...]
    """Its files, in order."""
    attr: DatasetAttr
    num_samples: int | None = None
    """Of so many records, drawn by the seed; None: of all."""


def find_sources(names: str | None, dataset_dir: str, attr: DatasetAttr, key: str = "dataset") -> list[Source]:
    """The datasets of a list separated by commas.

    A path that exists wins over a registered name. ``attr`` holds for paths; a registered dataset is described by its entry.

    Args:
        key: which of basic_parameters the list is, for messages.

    Raises:
        DataError: there is no such file, folder or name, a folder without samples, or an entry that cannot be used.
    """
    given = [name.strip() for name in (names or "").split(",") if name.strip()]
    if not given:
        raise DataError(f"basic_parameters.{key} names no file; give the path of a file or folder, or several separated by commas")
    return [_find(name, dataset_dir, attr, key) for name in given]


def _find(name: str, dataset_dir: str, attr: DatasetAttr, key: str) -> Source:
    if Path(name).exists():
        return Source(name, files_of(name), attr)
    registry = Path(dataset_dir, REGISTRY)
    is_path = Path(name).name != name or Path(name).suffix in DATASET_SUFFIXES
    if not registry.is_file():
        hint = "" if is_path else f", and {dataset_dir} holds no {REGISTRY} with registered names"
        raise DataError(f"{name}: no such dataset file{hint}; check basic_parameters.{key}")
    try:
        entries = read_mapping(registry)
    except ConfigError as error:
        raise DataError(str(error)) from None
    if name not in entries:
        hint = suggest(name, entries)
        raise DataError(f"{name}: no such dataset file, and no name in {registry}{hint}; it knows {name_some(entries)}; check basic_parameters.{key}")
    return _registered(name, entries[name], registry)


def files_of(path: str) -> tuple[str, ...]:
    """The file itself, or the dataset files of a folder, in the order of their names; folders in it are not entered.

    Raises:
        DataError: a folder without any.
    """
    if not Path(path).is_dir():
        return (path,)
    inside = sorted(Path(path).iterdir())
    files = tuple(str(file) for file in inside if file.suffix in DATASET_SUFFIXES and file.is_file() and file.name != REGISTRY)
    ignored = [file.name for file in inside if str(file) not in files]
    if not files:
        found = f"it holds {name_some(ignored)}" if ignored else "it is empty"
        raise DataError(f"{path}: a folder without dataset files ({', '.join(DATASET_SUFFIXES)}); {found}; check basic_parameters.dataset")
    if ignored:
        logger.debug("%s: not read, for it is no dataset file: %s", path, ", ".join(ignored))
    return files


def _registered(name: str, entry: Any, registry: Path) -> Source:
    where = f"{registry}, {name!r}"
    if not isinstance(entry, Mapping):
        raise DataError(f"{where}: expected a mapping of keys to values, got {type(entry).__name__}")
    remote = [key for key in REMOTE_KEYS if entry.get(key)]
    if remote:
        raise DataError(f"{where}: {remote[0]} {entry[remote[0]]!r} would have to be fetched; download it, and give the file as file_name")
    if entry.get("ranking"):
        raise DataError(f"{where}: ranking is true, but pairs of chosen and rejected answers cannot be trained on; remove the dataset")
    for key, value in entry.items():
        known = ("file_name", "formatting", "columns", "tags", "num_samples", "ranking", *REMOTE_KEYS)
        if key not in known and value is not None and (key, value) != ("split", "train"):
            raise DataError(f"{where}: key {key!r} is not supported{suggest(key, known)}; remove it")
    file, number = entry.get("file_name"), entry.get("num_samples")
    if not isinstance(file, str) or not file:
        raise DataError(f"{where}: file_name must be the path of a file or folder from {registry.parent}, got {file!r}")
    if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
        raise DataError(f"{where}: num_samples must be a whole number above 0, got {number!r}")
    path = Path(registry.parent, file)
    if not path.exists():
        raise DataError(f"{path}: no such dataset file, named by {where}; correct file_name")
    return Source(name, files_of(str(path)), _attr(entry, where), number)


def _attr(entry: Mapping[str, Any], where: str) -> DatasetAttr:
    """What an entry says of its records; as in LLaMA-Factory, one that names no formatting is alpaca."""
    raw: dict[str, Any] = {"formatting": entry.get("formatting") or "alpaca"}
    for key, known in (("columns", COLUMNS), ("tags", TAGS)):
        names = entry.get(key) or {}
        if not isinstance(names, Mapping):
            raise DataError(f"{where}: {key} must be a mapping of keys to names, got {type(names).__name__}")
        for concept, value in names.items():
            if concept in known:
                raw[concept] = value
            elif value is not None:
                raise DataError(f"{where}: {key}.{concept} is not supported{suggest(str(concept), known)}; remove it")
    try:
        return parse_section(DatasetAttr, raw, where)
    except ConfigError as error:
        raise DataError(str(error)) from None
