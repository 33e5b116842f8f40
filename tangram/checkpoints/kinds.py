"""Which kind of weights a directory holds, told by its files' names; nothing is read and no torch is needed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from tangram.errors import CheckpointError

WeightKind = Literal["Hugging Face directory", "mp_rank directory", "training checkpoint", "LoRA adapter"]

LoadFormat = Literal["auto", "hf", "dcp"]
_FORMATS: Mapping[LoadFormat, WeightKind] = {"hf": "Hugging Face directory", "dcp": "training checkpoint"}

HF_INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
"""Of PEFT; it makes a directory an adapter, whether its weights lie in a safetensors file or in ``mp_rank`` folders."""

TRAINING_FILES = (".metadata", "manifest.json")
"""Of a training checkpoint; one of the two may be lost, and reading then says so."""

ADAPTER_MANIFEST = "tangram_adapter.json"
"""Ours, in an ``mp_rank`` directory of an adapter."""


def kind_of_weights(path: str | Path, option: str = "", wanted: LoadFormat = "auto") -> WeightKind:
    """Which of the known kinds of weights a directory holds.

    Args:
        option: name of the option that gave the path, for messages.
        wanted: the kind that it must be of; auto: any.

    Raises:
        CheckpointError: it does not exist, is of no known kind or of another than ``wanted``.
    """
    kind = _kind_of(path, option)
    if wanted != "auto" and kind != _FORMATS[wanted]:
        where = f"{option} {path}".strip()
        raise CheckpointError(f"{where}: load_format {wanted} asks for a {_FORMATS[wanted]}, but a {kind} lies there; correct the path or the format")
    return kind


def _kind_of(path: str | Path, option: str) -> WeightKind:
    path = Path(path)
    where = f"{option} {path}".strip()
    if not path.is_dir():
        mend = f"give a folder of weights{f', or leave {option} out' if option else ''}"
        raise CheckpointError(f"{where}: {'it is a file' if path.exists() else 'no such folder'}; {mend}")
    if (path / ADAPTER_CONFIG).is_file() or (path / "adapter_model.safetensors").is_file():
        return "LoRA adapter"
    if any(path.glob("*.safetensors")) or (path / HF_INDEX).is_file():
        return "Hugging Face directory"
    if has_rank_folders(path):
        return "mp_rank directory"
    if any((path / name).is_file() or any(path.glob(f"iter_*/{name}")) for name in TRAINING_FILES):
        return "training checkpoint"
    inside = sorted(path.glob("hf/iter_*"))
    if inside:
        raise CheckpointError(f"{where}: a run saved Hugging Face directories there, from which weights alone can be loaded; give {inside[-1]}")
    found = sorted(entry.name for entry in path.iterdir())[:5]
    raise CheckpointError(
        f"{where}: neither a Hugging Face directory (*.safetensors), nor an mp_rank directory (release/mp_rank_*), nor a training "
        f"checkpoint (iter_*/.metadata); it holds {', '.join(found) or 'nothing'}"
    )


def has_rank_folders(path: Path) -> bool:
    """Whether rank files lie where those of an ``mp_rank`` directory do."""
    return any(path.glob("*/mp_rank_*/model_optim_rng.pt"))
