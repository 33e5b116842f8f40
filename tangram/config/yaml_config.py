"""The run file: six sections in YAML, with the backend on top, read into a RunConfig.

    backend: megatron
    parallel: {tensor_model_parallel_size: 2}
    data: {config: data.json}
    model: {config: model.json, load: ckpt/Qwen2.5-VL-7B-Instruct}
    features: {freeze_vision_encoder: true}
    training: {lr: 1.0e-5, train_iters: 1000}
    tools: {config: tools.json}

``data``, ``model.config`` and ``tools`` hold their content, or ``config: FILE`` with, in ``data`` and ``tools``, keys that replace the file's.
``model`` may give ``hf_dir`` alone, and then is what that directory's config.json says; ``model.overrides`` goes on top of either.
Relative paths, those inside the files named here too, start from the folder of the run file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tangram.config.fsdp2 import Fsdp2Config, Fsdp2Data
from tangram.config.fsdp2_keys import FSDP2, FSDP2_DATA, check_places, check_values, take_aliases
from tangram.config.fsdp2_run import run_of
from tangram.config.model import ModelConfig
from tangram.config.parsing import leaf_keys, merge, parse_section, read_mapping, read_yaml
from tangram.config.public_keys import TOOLS, RunFacts, take_public_keys
from tangram.config.run import RunConfig
from tangram.config.sources import model_from_hf, parse_data, parse_model, parse_tools
from tangram.config.tools import ToolsConfig
from tangram.errors import ConfigError, suggest
from tangram.families.plugins import load_plugins

SECTIONS = ("parallel", "data", "model", "features", "training", "tools")


def read_run(path: str | Path, overrides: Sequence[str] = (), base: Path | None = None) -> RunConfig:
    """Read a run file.

    Args:
        overrides: ``section.key=value``, the value as YAML.
        base: folder that relative paths start from; None: that of the run file.

    Raises:
        ConfigError: one line that names the file, the dotted key and the mend.
    """
    path = Path(path)
    base, where = (base or path.parent).resolve(), str(path)
    raw = read_mapping(path)
    _set_all(raw, overrides)
    if raw.get("backend") == "fsdp2":
        return _read_fsdp2(raw, where, base)
    _check_backend(raw, where)
    _check_sections(raw, where)
    sections = {name: _mapping(raw.get(name), f"{where}: {name}") for name in SECTIONS}
    _load_plugins(sections["model"].get("plugin"), base)
    training, parallel = sections["training"], sections["parallel"]
    facts = RunFacts(
        str(training.get("dtype", "fp32")),
        training.get("seq_length"),
        bool(parallel.get("sequence_parallel", False)),
        parallel.get("context_parallel_size", 1),
        parallel.get("tensor_model_parallel_size", 1),
        parallel.get("vision_tensor_model_parallel_size"),
    )
    data, data_where = _with_file(sections["data"], f"{where}: data", base)
    tools, tools_where = _with_file(sections["tools"], f"{where}: tools", base)
    built = {
        **{name: sections[name] for name in ("parallel", "features", "training")},
        "model": _model_source(sections["model"], where, base, facts),
        "data": parse_data(data, data_where, base),
        "tools": parse_tools(tools, tools_where, base),
    }
    if "backend" in raw:
        built["backend"] = raw["backend"]
    return parse_section(RunConfig, built, where, base=base)


def _read_fsdp2(raw: dict[str, Any], where: str, base: Path) -> RunConfig:
    content = {name: {} if value is None and name in SECTIONS else value for name, value in raw.items()}
    for section in ("data", "tools"):
        if isinstance(content.get(section), dict):
            content[section] = _with_file(content[section], f"{where}: {section}", base)[0]
    check_values(content, where)
    if isinstance(content.get("data"), dict):
        content["data"] = take_public_keys(Fsdp2Data, take_aliases(content["data"], f"{where}: data"), FSDP2_DATA, f"{where}: data")
    if isinstance(content.get("tools"), dict):
        content["tools"] = take_public_keys(ToolsConfig, content["tools"], TOOLS, f"{where}: tools")
    content = take_public_keys(Fsdp2Config, content, FSDP2, where)
    check_places(content, where)
    config = parse_section(Fsdp2Config, content, where, base=base)
    load_plugins(config.training.plugin)
    return run_of(config, where)


def _check_backend(raw: dict[str, Any], where: str) -> None:
    """Refuse unknown backends, and none where the file is plainly of the fsdp2 backend: MindSpeed-MM's files name none."""
    known = ("megatron", "fsdp2")
    if (given := raw.get("backend", known[0])) not in known:
        raise ConfigError(f"{where}: backend: Input should be 'megatron' or 'fsdp2', got {given!r}{suggest(str(given), known)}")
    parallel, model = raw.get("parallel"), raw.get("model")
    signs = [(parallel, "parallel", "fsdp_plan"), (parallel, "parallel", "fully_shard_parallel_size"), (model, "model", "model_name_or_path")]
    for section, name, key in signs:
        if "backend" not in raw and isinstance(section, dict) and key in section:
            raise ConfigError(f"{where}: {name}.{key} is of the fsdp2 backend; write backend: fsdp2 at the top of the file")


def dump(run: RunConfig) -> str:
    """The run as a run file in which every value stands; ``read_run`` gives the same run back."""
    content = (run if run.fsdp2 is None else run.fsdp2).model_dump(mode="json")
    ordered = {"backend": content["backend"], **{name: content[name] for name in SECTIONS}}
    return yaml.safe_dump(ordered, sort_keys=False, allow_unicode=True, width=150)


def _set_all(raw: dict[str, Any], overrides: Sequence[str]) -> None:
    """Lay ``overrides`` over ``raw``. None may replace what another has set: which one counts should not depend on their order."""
    given: dict[tuple[str, ...], str] = {}
    for override in overrides:
        path = _set(raw, override)
        for other, text in given.items():
            shorter = min(len(path), len(other))
            if path[:shorter] == other[:shorter]:
                longer = ".".join(path if len(path) > shorter else other)
                how = "" if path == other else ", the one as a part of the other"
                raise ConfigError(f"overrides {text!r} and {override!r} both set {longer}{how}; remove one")
        given[path] = override


def _set(raw: dict[str, Any], override: str) -> tuple[str, ...]:
    """Set one value; the path of its key."""
    key, equals, text = override.partition("=")
    *path, name = key.strip().split(".")
    if not equals or not name or override.startswith("-"):
        raise ConfigError(f"override {override!r}: write section.key=value, such as training.lr=1e-5")
    try:
        value = _bare_list(text) or read_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"override {override!r}: {error}") from None
    part = raw
    for step in path:
        if part.get(step) is None:
            part[step] = {}
        part = part[step]
        if not isinstance(part, dict):
            raise ConfigError(f"override {override!r}: {step} holds a value, not keys; correct the name")
    part[name] = value
    return (*path, name)


def _bare_list(text: str) -> list[str] | None:
    """``[a.{*},b]`` as a list of patterns, whose braces YAML would take for mappings; None for any other text."""
    found = re.fullmatch(r"\[((?:[\w.*?-]|\{(?:\*|\d+-\d+)\}|\s*,\s*)*)\]", text.strip())
    return re.split(r"\s*,\s*", found[1]) if found is not None and "{" in text else None


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: expected a mapping of keys to values, got {value!r}")
    return value


def _check_sections(raw: dict[str, Any], where: str) -> None:
    """Say of a key that stands in the wrong place where it belongs."""
    homes: dict[str, str] = {}
    own: dict[str, set[str]] = {section: set() for section in SECTIONS}
    for path in leaf_keys(RunConfig):
        if path[0] in SECTIONS:
            own[path[0]].add(path[1])
            if len(path) == 2:
                homes.setdefault(path[1], path[0])
    own["model"] |= {"config", "overrides"}
    own["data"] |= {"config", "dataset_param", "dataloader_param"}
    own["tools"] |= {"config", "profile", "memory_profile"}
    for key in raw:
        if key in SECTIONS or key == "backend":
            continue
        if key in homes:
            raise ConfigError(f"{where}: {key!r} belongs under {homes[key]}: write {homes[key]}.{key}")
        raise ConfigError(f"{where}: unknown section {key!r}{suggest(str(key), SECTIONS)}; the sections are backend, {', '.join(SECTIONS)}")
    for section in SECTIONS:
        for key in raw[section] if isinstance(raw.get(section), dict) else ():
            if key not in own[section] and homes.get(key, section) != section:
                raise ConfigError(f"{where}: {section}.{key}: {key!r} belongs under {homes[key]}: write {homes[key]}.{key}")


def _load_plugins(plugins: Any, base: Path) -> None:
    if plugins:
        load_plugins([Path(base, str(path)) for path in ([plugins] if isinstance(plugins, str) else plugins)])


def _with_file(section: dict[str, Any], where: str, base: Path) -> tuple[dict[str, Any], str]:
    """The section's content on top of that of the file that it names, and how messages call it."""
    inline = {key: value for key, value in section.items() if key != "config"}
    if "config" not in section:
        return inline, where
    path = _path(section["config"], f"{where}.config", base)
    return merge(read_mapping(path), inline), str(path) if not inline else f"{path} with {where}"


def _path(value: Any, where: str, base: Path) -> Path:
    if not isinstance(value, str):
        raise ConfigError(f"{where}: expected the path of a file, got {value!r}")
    return Path(base, Path(value).expanduser())


def _model_source(section: dict[str, Any], where: str, base: Path, facts: RunFacts) -> dict[str, Any]:
    source = {key: value for key, value in section.items() if key != "overrides"}
    overrides = _mapping(section.get("overrides"), f"{where}: model.overrides")
    source["config"] = _model(source, overrides, where, base, facts)
    return source


def _model(source: dict[str, Any], overrides: dict[str, Any], where: str, base: Path, facts: RunFacts) -> ModelConfig:
    config = source.get("config")
    if config is None and source.get("hf_dir") is None:
        raise ConfigError(f"{where}: model: give config (the path of model.json, or its content) or hf_dir (a Hugging Face directory)")
    if config is None:
        path = _path(source["hf_dir"], f"{where}: model.hf_dir", base)
        content, name = model_from_hf(path).model_dump(), str(path / "config.json")
    elif isinstance(config, dict):
        content, name = config, f"{where}: model.config"
    else:
        path = _path(config, f"{where}: model.config", base)
        content, name = read_mapping(path), str(path)
    return parse_model(merge(content, overrides), f"{name} with model.overrides" if overrides else name, facts)
