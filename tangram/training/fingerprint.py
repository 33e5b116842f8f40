"""What a data position means: whatever moves samples or their order, so that a run resumes with the data it had."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from tangram.config.data import DataConfig
from tangram.config.run import RunConfig
from tangram.data.cache_key import file_hash
from tangram.data.choice import GROUPING, cutoff
from tangram.data.content import content_hash
from tangram.data.own import own_fingerprint


def tokenizer_hash(run: RunConfig) -> str:
    """Changes when the tokenizer's files do."""
    folder = Path(run.data.dataset_param.preprocess_parameters.model_name_or_path)
    digest = hashlib.sha256()
    for name in ("tokenizer.json", "vocab.json", "merges.txt"):
        path = folder / name
        if path.is_file():
            digest.update(path.read_bytes())
    return f"sha256:{digest.hexdigest()}"


def dataset_fingerprint(run: RunConfig, batch: int) -> str:
    """The content of the training files, and every setting that moves samples or their order, as far as it is not the default; a reader sees which.

    The seed, the tokenizer and the model are compared on their own. Settings that only decide which rank or micro-batch takes a sample are left out.
    """
    if run.data.dataset_param.of_plugin:
        loading = run.data.dataloader_param
        return f"{own_fingerprint(run)}, global_batch_size {batch}, shuffle {loading.shuffle}, tail {loading.tail_policy}"
    settings = {"global_batch_size": batch, "shuffle": run.data.dataloader_param.shuffle, "tail": run.data.dataloader_param.tail_policy}
    settings |= {key: value for key, value in _others(run).items() if value is not None}
    return f"sha256:{content_hash(run.data.dataset_param)} with {', '.join(f'{key} {value}' for key, value in settings.items())}"


def _others(run: RunConfig) -> dict[str, Any]:
    data: DataConfig = run.data
    basic, loading, preprocess = data.dataset_param.basic_parameters, data.dataloader_param, data.dataset_param.preprocess_parameters
    found = _given(basic, "max_samples", "mix_strategy", "interleave_probs", "val_rate", "packing")
    found |= _given(loading, "sampler_type")
    if loading.sampler_type == "BucketBatchSampler":
        found["micro_batch_size"] = run.training.micro_batch_size
    if basic.packing:
        found |= _given(basic, "packing_strategy", "preprocessing_batch_size") | _given(loading, "pad_to_multiple_of") | {"cutoff": cutoff(run)}
    if basic.packing or loading.sampler_type in GROUPING:
        # Where sizes decide the order, so does what sizes come from.
        found |= _given(basic, "template", "enable_thinking", "truncation")
        found |= _given(preprocess, *(key for key in type(preprocess).model_fields if key != "model_name_or_path"))
        found["cutoff"] = cutoff(run)
        if basic.chat_template is not None:
            found["chat_template"] = file_hash(Path(basic.chat_template))
    return found


def _given(section: Any, *keys: str) -> dict[str, Any]:
    """Values that differ from the defaults."""
    return {key: getattr(section, key) for key in keys if getattr(section, key) != type(section).model_fields[key].default}
