"""What the tokens, labels and grids of a dataset depend on, in a form that a reader can compare."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import tangram
from tangram.config.data import BasicParameters
from tangram.config.run import RunConfig
from tangram.data.content import content_hash
from tangram.data.encode import SampleEncoder

CODE_VERSION = 1
"""To be raised when the same files and settings give other tokens, labels, grids or sizes than before, or other bytes in the cache."""

HF_FILES = (
    "tokenizer.json",
    "vocab.json",
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Files of a Hugging Face folder that tokenising and media processing may read."""
MIXING = ("mix_strategy", "interleave_probs", "max_samples", "val_rate", "val_max_samples")
LABELS = ("train_on_prompt", "mask_history", "truncation", "enable_thinking")


def encoding_key(run: RunConfig, encoder: SampleEncoder, split: str) -> dict[str, Any]:
    """The key of a split's tokenised samples.

    Raises:
        DataError: a dataset file is missing.
    """
    data = run.data.dataset_param
    basic = data.basic_parameters
    return {
        "version": tangram.__version__,
        "code": CODE_VERSION,
        "split": split,
        "dataset": f"sha256:{content_hash(data, split)}",
        "dataset_dir": basic.dataset_dir,
        "attr": data.attr.model_dump(),
        "mixing": {**{key: getattr(basic, key) for key in MIXING}, "seed": run.training.seed if _draws(basic) else None},
        "template": plain(encoder.template),
        "chat_template": None if basic.chat_template is None else file_hash(Path(basic.chat_template)),
        "tokenizer": {path.name: file_hash(path) for path in hf_files(data.preprocess_parameters.model_name_or_path)},
        "media": plain(encoder.media),
        "limits": data.preprocess_parameters.model_dump(exclude={"model_name_or_path"}),
        "cutoff": encoder.cutoff,
        "labels": {key: getattr(basic, key) for key in LABELS},
    }


def _draws(basic: BasicParameters) -> bool:
    """Whether the seed decides which samples there are, or where."""
    return basic.mix_strategy != "concat" or basic.val_rate is not None or any(not Path(name).exists() for name in basic.dataset.split(","))


def hf_files(folder: str) -> list[Path]:
    """Those of ``HF_FILES`` that are there."""
    return [Path(folder, name) for name in HF_FILES if Path(folder, name).is_file()]


def file_hash(path: Path) -> str:
    """SHA-256 of a small file."""
    return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


def plain(value: Any) -> Any:
    """Settings as JSON data; functions and objects by their names, so that no address gets in."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {"type": type(value).__qualname__, **{field.name: plain(getattr(value, field.name)) for field in fields(value)}}
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(part) for part in (sorted(value, key=repr) if isinstance(value, set | frozenset) else value)]
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    parts = {name: plain(part) for name, part in sorted(getattr(value, "__dict__", {}).items()) if name[0] != "_"}
    return {"type": type(value).__qualname__, **parts}
