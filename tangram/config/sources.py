"""Readers of model.json, data.json and tools.json, as JSON or YAML, and of a Hugging Face config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tangram.config.data import DataConfig
from tangram.config.model import ModelConfig
from tangram.config.parsing import parse_section, read_mapping
from tangram.config.public_keys import DATA, MODEL, TOOLS, RunFacts, take_public_keys
from tangram.config.tools import ToolsConfig
from tangram.errors import ConfigError, suggest
from tangram.families import get_family


def parse_model(raw: dict[str, Any], where: str, facts: RunFacts | None = None) -> ModelConfig:
    """The content of model.json as the config class of its family.

    Args:
        facts: what the run says, which model.json may repeat.

    Raises:
        ConfigError: as ``parse_section``, ``take_public_keys`` and ``get_family``.
    """
    model_id = raw.get("model_id")
    if not isinstance(model_id, str):
        raise ConfigError(f"{where}: model_id is missing; name the model family, such as 'qwen2_5_vl'{suggest('model_id', raw)}")
    config_class = get_family(model_id).config_class
    return parse_section(config_class, take_public_keys(config_class, raw, MODEL, where, facts), where)


def parse_data(raw: dict[str, Any], where: str, base: Path) -> DataConfig:
    """The content of data.json; relative paths start from ``base``.

    Raises:
        ConfigError: as ``parse_section`` and ``take_public_keys``.
    """
    return parse_section(DataConfig, take_public_keys(DataConfig, raw, DATA, where), where, base=base)


def parse_tools(raw: dict[str, Any], where: str, base: Path) -> ToolsConfig:
    """The content of tools.json; relative paths start from ``base``.

    Raises:
        ConfigError: as ``parse_section`` and ``take_public_keys``.
    """
    return parse_section(ToolsConfig, take_public_keys(ToolsConfig, raw, TOOLS, where), where, base=base)


def read_model(path: str | Path, facts: RunFacts | None = None) -> ModelConfig:
    """Read model.json."""
    return parse_model(read_mapping(path), str(path), facts)


def read_data(path: str | Path, base: Path | None = None) -> DataConfig:
    """Read data.json; relative paths in it start from ``base``, or from the current folder."""
    return parse_data(read_mapping(path), str(path), base or Path.cwd())


def read_tools(path: str | Path, base: Path | None = None) -> ToolsConfig:
    """Read tools.json; relative paths in it start from ``base``, or from the current folder."""
    return parse_tools(read_mapping(path), str(path), base or Path.cwd())


def read_hf_config(directory: str | Path) -> dict[str, Any]:
    """config.json of a Hugging Face directory.

    Raises:
        ConfigError: there is none, or it has no ``model_type``.
    """
    path = Path(directory, "config.json")
    hf = read_mapping(path)
    if not isinstance(hf.get("model_type"), str):
        raise ConfigError(f"{path}: key 'model_type' is missing; is this a Hugging Face model directory?")
    return hf


def model_from_hf(directory: str | Path) -> ModelConfig:
    """The model that a Hugging Face directory describes.

    Raises:
        ConfigError: as ``read_hf_config``, and where its ``model_type`` is of no registered family.
    """
    hf = read_hf_config(directory)
    return get_family(hf["model_type"]).from_hf_config(hf)
