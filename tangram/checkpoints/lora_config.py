"""A PEFT ``adapter_config.json``: which modules an adapter changes, with which rank and scale.

Source: https://huggingface.co/docs/peft/package_reference/lora (LoraConfig) and .../developer_guides/checkpoint.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tangram.checkpoints.kinds import ADAPTER_CONFIG
from tangram.config.parsing import read_mapping
from tangram.errors import CheckpointError

_EXTRA_TENSORS = {
    "modules_to_save": "whole modules trained beside the adapter",
    "layer_replication": "layers repeated in the base",
    "target_parameters": "parameters that are no modules, such as stacked experts",
    "trainable_token_indices": "trained rows of the embedding",
    "alora_invocation_tokens": "an adapter switched on by a token, which cannot be merged",
}
"""Keys that, when set, give the adapter more than a pair of matrices per linear."""
_BASE_CHANGING = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that also change the base's weights, so that the original base is the wrong one to merge into."""


@dataclass(frozen=True)
class AdapterConfig:
    """The keys of ``adapter_config.json`` that decide numbers.

    Args:
        path: the file, for messages.
        raw: its content.
    """

    path: Path
    raw: Mapping[str, Any]
    rank: int
    alpha: float
    targets: str | tuple[str, ...]
    """A regular expression for the whole name, or ends of names."""

    @property
    def base(self) -> str | None:
        """Where the base lay when the adapter was trained: a directory or the name of a repository."""
        return self.raw.get("base_model_name_or_path")

    def rank_of(self, module: str) -> int:
        """Rank of one module's pair."""
        return int(self._pattern("rank_pattern", module, self.rank))

    def scale_of(self, module: str) -> float:
        """What ``B A`` is multiplied by: ``alpha / r``, or ``alpha / sqrt(r)`` with ``use_rslora`` (https://arxiv.org/abs/2312.03732)."""
        rank, alpha = self.rank_of(module), float(self._pattern("alpha_pattern", module, self.alpha))
        return alpha / math.sqrt(rank) if self.raw.get("use_rslora") else alpha / rank

    def _pattern(self, key: str, module: str, default: float) -> float:
        """The first pattern that names the end of a module's name, whole parts only."""
        for pattern, value in (self.raw.get(key) or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        return default

    def targets_module(self, module: str) -> bool:
        """Whether the adapter is said to change a module."""
        excluded = self.raw.get("exclude_modules")
        if excluded and _named(excluded, module):
            return False
        if not _named(self.targets, module):
            return False
        layers = self.raw.get("layers_to_transform")
        if layers in (None, []) or isinstance(self.targets, str):  # PEFT takes no layers as all
            return True
        return self._layer(module) in ([layers] if isinstance(layers, int) else layers)

    def _layer(self, module: str) -> int | None:
        """The layer number in a module's name, after one of ``layers_pattern`` if given."""
        patterns = self.raw.get("layers_pattern") or r"[^.]*"
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            found = re.match(rf".*\.{pattern}\.(\d+)\.", module)
            if found:
                return int(found[1])
        return None

    def check_mergeable(self) -> None:
        """Check that the adapter is a change of the published base.

        Raises:
            CheckpointError: it was started in a way that changed its base too.
        """
        start = self.raw.get("init_lora_weights")
        if isinstance(start, str) and start.lower().startswith(_BASE_CHANGING):
            raise CheckpointError(
                f"{self.path}: init_lora_weights {start!r} changed the base too, so merging into the original base gives another model; "
                "save the adapter converted to plain LoRA first (path_initial_model_for_weight_conversion of PEFT)"
            )


def read_adapter_config(directory: Path) -> AdapterConfig:
    """Read and check ``adapter_config.json`` of a directory.

    Raises:
        ConfigError: it is missing or no JSON.
        CheckpointError: not LoRA, a key is missing or unusable, or a variant whose tensors are more than pairs of matrices (DoRA, biases, whole
            modules, stacked parameters and others).
    """
    path = directory / ADAPTER_CONFIG
    raw = read_mapping(path)
    if raw.get("peft_type") != "LORA":
        raise CheckpointError(f"{path}: peft_type is {raw.get('peft_type')!r}; only LORA is supported")
    _refuse_variants(path, raw)
    rank, alpha = _number(path, raw, "r", whole=True), _number(path, raw, "lora_alpha")
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = raw.get(key) or {}
        _require(isinstance(patterns, Mapping), path, raw, key, "a mapping from names to numbers")
        for pattern in patterns:
            _number(path, patterns, pattern, whole=key == "rank_pattern")
            _check_expression(path, key, pattern)
    _require(bool(raw.get("target_modules")), path, raw, "target_modules", "a list of names or a regular expression")
    _check_names(path, raw)
    targets = raw["target_modules"]
    return AdapterConfig(path, raw, int(rank), alpha, targets if isinstance(targets, str) else tuple(targets))


def _refuse_variants(path: Path, raw: Mapping[str, Any]) -> None:
    for key in sorted(raw):
        if key.startswith("use_") and key != "use_rslora" and raw[key]:
            raise CheckpointError(f"{path}: {key} {raw[key]!r} is not supported, its weights are more than alpha / r * B A; merge it with PEFT")
    for key, what in _EXTRA_TENSORS.items():
        if raw.get(key):
            raise CheckpointError(f"{path}: {key} {raw[key]!r} is not supported: {what}; merge it with PEFT")
    if raw.get("bias", "none") != "none" or raw.get("lora_bias"):
        said = f"bias {raw.get('bias')!r}, lora_bias {raw.get('lora_bias')!r}"
        raise CheckpointError(f"{path}: {said}: trained biases are not supported; merge it with PEFT")
    if raw.get("fan_in_fan_out"):
        raise CheckpointError(f"{path}: fan_in_fan_out is true, but these models have no transposed linears; set it to false")


def _check_names(path: Path, raw: Mapping[str, Any]) -> None:
    """The keys that name modules and layers hold what PEFT writes there, or nothing."""
    for key in ("target_modules", "exclude_modules"):
        value = raw.get(key)
        _require(value is None or isinstance(value, str) or _is_list(value, str), path, raw, key, "a list of names or a regular expression")
        if isinstance(value, str):
            _check_expression(path, key, value)
    layers, patterns = raw.get("layers_to_transform"), raw.get("layers_pattern") or []
    _require(layers is None or type(layers) is int or _is_list(layers, int), path, raw, "layers_to_transform", "a layer's number or a list of them")
    _require(isinstance(patterns, str) or _is_list(patterns, str), path, raw, "layers_pattern", "a name or a list of names")
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        _check_expression(path, "layers_pattern", pattern)
    _require(isinstance(raw.get("base_model_name_or_path"), str | None), path, raw, "base_model_name_or_path", "a directory or a repository's name")
    _require(isinstance(raw.get("use_rslora"), bool | None), path, raw, "use_rslora", "true or false")


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(part) is kind for part in value)


def _require(holds: bool, path: Path, raw: Mapping[str, Any], key: str, what: str) -> None:
    if not holds:
        raise CheckpointError(f"{path}: {key} is {raw.get(key)!r}; it must be {what}")


def _check_expression(path: Path, key: str, expression: str) -> None:
    try:
        re.compile(expression)
    except re.error as error:
        raise CheckpointError(f"{path}: {key}: {expression!r} is no regular expression: {error}") from None


def _number(path: Path, raw: Mapping[str, Any], key: str, *, whole: bool = False) -> float:
    value = raw.get(key)
    number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
    _require(0 < number < math.inf, path, raw, key, "a positive number")
    _require(not whole or number == int(number), path, raw, key, "a whole number")
    return number


def _named(targets: str | Sequence[str], module: str) -> bool:
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    return any(module == target or module.endswith(f".{target}") for target in targets)
