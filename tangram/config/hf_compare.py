"""A model config against the Hugging Face config of its weights.

A number that differs, an epsilon or a rotary base say, would train another model without an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tangram.config.model import ModelConfig
from tangram.config.sources import read_hf_config
from tangram.errors import ConfigError
from tangram.families import get_family

OURS_ALONE = frozenset(
    {
        "model_id",
        "pipeline_num_layers",
        "freeze",
        "recompute_granularity",
        "recompute_method",
        "recompute_num_layers",
        "attention_backend",
        "activation_offload",
        "loss_chunk_size",
        "attention_dropout",
        "hidden_dropout",
        "moe_aux_loss_coeff",
        "moe_z_loss_coeff",
        "moe_token_dispatcher_type",
        "moe_grouped_gemm",
        "init_method_std",
    }
)
"""Keys that say how a model is trained, not which model it is."""


def _leaves(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        elif key not in OURS_ALONE:
            yield f"{prefix}{key}", value


def description(model: ModelConfig) -> dict[str, Any]:
    """What a checkpoint keeps of its model: each key that says which model it is, dotted, with a JSON value."""
    content = model.model_dump(mode="json")
    content["text_decoder"]["kv_channels"] = model.text_decoder.head_dim
    return dict(_leaves(content))


def compare_with_description(model: ModelConfig, saved: Mapping[str, Any], where: str) -> None:
    """Compare a model config with the ``description`` of a checkpoint's.

    Raises:
        ConfigError: they differ; each key with both values.
    """
    mine = description(model)
    found = [(key, mine.get(key), saved.get(key)) for key in {**mine, **saved} if mine.get(key) != saved.get(key)]
    if found:
        listed = "; ".join(f"{key} is {ours!r} but {theirs!r} in {where}" for key, ours, theirs in found)
        raise ConfigError(f"this run's model is not the one that the checkpoint was trained as: {listed}; correct the model config")


def differences(model: ModelConfig, other: ModelConfig) -> list[tuple[str, Any, Any]]:
    """Keys that describe the model and differ: dotted key, value in ``model``, value in ``other``.

    A component that ``model`` leaves out is not compared. ``kv_channels`` is compared as the width of a head that it comes to.
    """
    mine, theirs = model.model_dump(), other.model_dump()
    for content, config in ((mine, model), (theirs, other)):
        content["text_decoder"]["kv_channels"] = config.text_decoder.head_dim
    if model.image_encoder is None:
        theirs.pop("image_encoder")
        mine.pop("image_encoder")
    left, right = dict(_leaves(mine)), dict(_leaves(theirs))
    return [(key, left.get(key), right.get(key)) for key in {**left, **right} if left.get(key) != right.get(key)]


def compare_with_hf(model: ModelConfig, hf_dir: str | Path) -> int:
    """Compare a model config with config.json of a Hugging Face directory.

    Returns:
        How many keys were compared.

    Raises:
        ConfigError: they differ; each key with both values. Or config.json is missing or of another architecture.
    """
    path = Path(hf_dir, "config.json")
    hf = read_hf_config(hf_dir)
    family, theirs = get_family(model.model_id), get_family(hf["model_type"])
    if family.architecture != theirs.architecture:
        raise ConfigError(f"model_id {model.model_id!r} means {family.architecture}, but {path} is {theirs.architecture}; correct model_id")
    found = differences(model, family.from_hf_config(hf))
    if found:
        listed = "; ".join(f"{key} is {mine!r} but {other!r} in {path}" for key, mine, other in found)
        raise ConfigError(f"model.json does not describe the weights' model: {listed}; correct model.json")
    return len(dict(_leaves(model.model_dump())))
