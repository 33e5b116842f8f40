"""Checks of a run against the files that it names: weights, samples, tokenizer, save folder. Weights are not read, only described."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from tangram.checkpoints.kinds import kind_of_weights
from tangram.config.hf_compare import compare_with_description, compare_with_hf
from tangram.config.parsing import read_mapping
from tangram.config.preflight_rules import Rule, Subject
from tangram.errors import CheckpointError, ConfigError, DataError
from tangram.families import get_family


def weights(subject: Subject) -> str:
    source = subject.run.model
    if source.load is None:
        return "random, from the seed"
    kind = kind_of_weights(source.load, "load", source.load_format)
    if kind == "Hugging Face directory":
        if not Path(source.load, "config.json").is_file():
            raise CheckpointError(f"load {source.load}: it has *.safetensors but no config.json; copy the model's config.json there")
        _check_types(subject, check_shards(Path(source.load)))
    elif kind == "LoRA adapter":
        raise CheckpointError(f"load {source.load}: a LoRA adapter, which is no model; merge it into its base first (mm-convert ... lora_merge)")
    elif kind == "mp_rank directory":
        _check_mp_rank(subject, Path(source.load))
    else:
        check_training_checkpoint(subject, Path(source.load))
    return f"{kind} {source.load}"


_TYPES = {"F64": "fp64", "F32": "fp32", "F16": "fp16", "BF16": "bf16", "float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
"""Element types as safetensors and manifests name them, and as a run does."""


def _check_types(subject: Subject, counts: Mapping[str, int]) -> None:
    """Weights are of the run's type, or may be changed to it.

    Args:
        counts: how many tensors have each element type.

    Raises:
        CheckpointError: with both types.
    """
    source, wanted = subject.run.model, subject.run.training.dtype
    other = {_TYPES.get(name, name): count for name, count in counts.items() if _TYPES.get(name, name) != wanted}
    if other and not source.cast_weights:
        held = " and ".join(f"{count} of {sum(counts.values())} tensors in {name}" for name, count in sorted(other.items()))
        instead = " or ".join(f"training.dtype {name}" for name in sorted(other) if len(counts) == 1 and name in ("fp32", "bf16", "fp16"))
        raise CheckpointError(
            f"load {source.load}: holds {held}, and the run is in {wanted}; set model.cast_weights (--cast-weights) to change them"
            f"{f', or {instead}' if instead else ''}"
        )


def check_shards(folder: Path) -> Counter[str]:
    """Every file that the index names must be there, and as long as its own header says.

    Returns:
        How many tensors have each element type, as safetensors names it.

    Raises:
        CheckpointError: naming the files.
    """
    index = folder / "model.safetensors.index.json"
    names = sorted(set(read_mapping(index).get("weight_map", {}).values())) if index.is_file() else [p.name for p in folder.glob("*.safetensors")]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"{index}: {len(missing)} of {len(names)} files are missing: {', '.join(missing[:5])}; fetch them again")
    types: Counter[str] = Counter()
    for name in names:
        (expected, held), size = _described(folder / name), (folder / name).stat().st_size
        types.update(held)
        if size != expected:
            raise CheckpointError(f"{folder / name}: {size} bytes, but its header describes {expected}; it is truncated or damaged, fetch it again")
    return types


def _described(path: Path) -> tuple[int, list[str]]:
    """Of a safetensors file the bytes that it must have (8 for the header's length, the header, the tensors), and each tensor's element type."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length) if length <= path.stat().st_size else b""
    try:
        entries = [entry for name, entry in json.loads(header).items() if name != "__metadata__"]
        return 8 + length + max((entry["data_offsets"][1] for entry in entries), default=0), [str(entry["dtype"]) for entry in entries]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{path}: not a safetensors file, or its header of {length} bytes is cut off; fetch it again") from None


def _check_mp_rank(subject: Subject, folder: Path) -> None:
    from tangram.checkpoints.manifest import check_manifest, read_manifest

    manifest = read_manifest(folder)
    if manifest is not None:
        check_manifest(manifest, subject.topology, subject.model, str(folder), subject.run.padded_vocab)
        _check_types(subject, manifest.dtypes)


def check_training_checkpoint(subject: Subject, folder: Path) -> None:
    """Hold what a training checkpoint says of its model against the run's.

    Raises:
        CheckpointError: it is incomplete, or of another family.
        ConfigError: of another model.
    """
    from tangram.checkpoints.dcp_manifest import find_checkpoint, read_manifest

    found = find_checkpoint(folder)
    family = get_family(subject.model.model_id).name
    manifest = read_manifest(found)
    if manifest.family != family:
        raise CheckpointError(f"load {found}: a checkpoint of family {manifest.family!r}, this run trains {family!r}; load one of its own")
    # An epsilon or a rotary base shows in no shape.
    if isinstance(saved := manifest.extra.get("model"), dict):
        compare_with_description(subject.run.described, saved, str(found))


def reference(subject: Subject) -> str:
    """Compare the model with the config.json of ``hf_dir`` and of the weights."""
    source = subject.run.model
    folders = [source.hf_dir] if source.hf_dir is not None else []
    if source.load is not None and source.load != source.hf_dir and Path(source.load, "config.json").is_file():
        folders.append(source.load)
    if not folders:
        return "no Hugging Face config to compare with"
    counts = [compare_with_hf(subject.run.described, folder) for folder in folders]
    return f"{counts[0]} keys equal those of {' and '.join(folders)}"


def tokenizer(subject: Subject) -> str:
    folder = Path(subject.run.data.dataset_param.preprocess_parameters.model_name_or_path)
    if not folder.is_dir():
        raise ConfigError(f"preprocess_parameters.model_name_or_path {folder}: no such folder; give the Hugging Face directory with the tokenizer")
    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        raise ConfigError(f"preprocess_parameters.model_name_or_path {folder}: holds no tokenizer (tokenizer.json, or vocab.json with merges.txt)")
    source = subject.run.model
    for model in (source.hf_dir, source.load):
        if model is not None:
            _check_vocabulary(folder / "tokenizer.json", Path(model, "tokenizer.json"))
    return str(folder)


def _check_vocabulary(given: Path, own: Path) -> None:
    """A tokenizer whose ids mean other words than the model has learnt would train it on noise, without an error.

    Raises:
        ConfigError: a token that both know has two ids.
    """
    if not given.is_file() or not own.is_file() or given.read_bytes() == own.read_bytes():
        return
    from tangram.data.tokenizer import Tokenizer

    mine, theirs = (Tokenizer.from_folder(path.parent).vocabulary() for path in (given, own))
    differing = sorted((number, token) for token, number in theirs.items() if mine.get(token, number) != number)
    if differing:
        number, token = differing[0]
        raise ConfigError(
            f"preprocess_parameters.model_name_or_path {given.parent}: {len(differing)} tokens have other ids than in {own}: {token!r} is "
            f"{mine[token]} but {number} there; use the model's own tokenizer"
        )


def samples(subject: Subject) -> str:
    """The samples: format, images, placeholders, and enough of them for one step. Image files are looked for, not opened."""
    from tangram.data.check import check_data

    parameters = subject.run.data.dataset_param.basic_parameters
    if not Path(parameters.dataset_dir).is_dir():
        raise DataError(f"basic_parameters.dataset_dir {parameters.dataset_dir}: no such folder; correct the path")
    return check_data(subject.run, subject.data_parallel or 1, read_headers=False)


def save_folder(subject: Subject) -> str:
    save = subject.run.training.save
    if save is None:
        return "nothing is saved"
    existing = Path(save)
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise ConfigError(f"save {save}: {existing} is a file; give a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"save {save}: no permission to write in {existing}; give another folder")
    return save


FILE_RULES: tuple[tuple[str, Rule], ...] = (
    ("weights", weights),
    ("Hugging Face config", reference),
    ("tokenizer", tokenizer),
    ("samples", samples),
    ("save folder", save_folder),
)
