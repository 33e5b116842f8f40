"""Data of a plug-in, in the order, with the workers and at the place to resume from that all data have.

A plug-in registers ``build(basic_parameters, preprocess_parameters, dataset_param)`` under a ``dataset_type``. It returns a map-style dataset, or
a training and a validation dataset: ``len(dataset)`` samples, ``dataset[i]`` a mapping of names to tensors or lists. What a micro-batch is made of
them says its ``collate_fn(samples)``, or, where it has none, ``collate``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

from tangram.config.data import DatasetParam
from tangram.config.run import RunConfig
from tangram.config.sources import read_hf_config
from tangram.data.build import global_batch_size, step_loader
from tangram.data.encode import IGNORE
from tangram.data.loader import StepLoader
from tangram.data.orders.choice import training_order, validation_order
from tangram.data.own_batch import Sample, check_batch, collate, shown
from tangram.data.sampler import PADDING, Row
from tangram.data.source import MicroBatchSource, Reading
from tangram.errors import ConfigError, DataError
from tangram.families.plugins import told
from tangram.families.registry import data_register


def check_own(run: RunConfig) -> str:
    """Hold what the run asks for against what data of a plug-in can give.

    Raises:
        ConfigError: the id is not registered, or a setting needs what only the built-in data know.
    """
    data, loading = run.data.dataset_param, run.data.dataloader_param
    data_register.get(data.dataset_type)
    wishes = {
        f"dataloader_param.sampler_type {loading.sampler_type}": loading.sampler_type not in ("BaseRandomBatchSampler", "SequentialSampler"),
        "dataloader_param.token_budget": loading.token_budget is not None,
        "dataloader_param.balance_vision": loading.balance_vision,
        "dataloader_param.collate_param.model_name": loading.collate_param.model_name is not None,
        "basic_parameters.bad_samples skip": data.basic_parameters.bad_samples == "skip",
        "basic_parameters.streaming": data.basic_parameters.streaming,
    }
    asked = [name for name, wanted in wishes.items() if wanted]
    if asked:
        raise ConfigError(f"{', '.join(asked)}: not with dataset_type {data.dataset_type!r}, whose samples only the plug-in knows; remove it")
    if loading.sampler_type == "SequentialSampler" and loading.shuffle:
        raise ConfigError("dataloader_param: sampler_type SequentialSampler is the dataset's order, and shuffle is true; set shuffle to false")
    return f"dataset_type {data.dataset_type}, of a plug-in"


def own_datasets(run: RunConfig) -> tuple[Any, Any | None]:
    """Training and validation dataset, built once per process.

    Raises:
        ConfigError: as ``check_own``.
        DataError: building fails, or gives no dataset.
    """
    check_own(run)
    return _built(run.data.dataset_param.model_dump_json())


@lru_cache(maxsize=1)
def _built(content: str) -> tuple[Any, Any | None]:
    data = DatasetParam.model_validate_json(content)
    build = cast(Callable[..., Any], data_register.get(data.dataset_type))
    where = f"dataset_type {data.dataset_type!r}"
    try:
        made = build(data.basic_parameters, data.preprocess_parameters, data)
    except (Exception, SystemExit) as error:
        raise DataError(f"{where}: building it failed: {told(error)}") from error
    train, valid = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    for dataset in (train, *([valid] if valid is not None else [])):
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise DataError(f"{where}: it built {type(dataset).__name__}, which lacks __len__ or __getitem__; return a dataset, or (train, valid)")
        try:
            len(dataset)
        except (Exception, SystemExit) as error:
            raise DataError(f"{where}: len() of its {type(dataset).__name__} failed: {told(error)}") from error
    return train, valid


def own_fingerprint(run: RunConfig) -> str:
    """What tells data from other data: what the plug-in is given, and how many samples it makes of it."""
    train, _ = own_datasets(run)
    given = hashlib.sha256(run.data.dataset_param.model_dump_json().encode()).hexdigest()
    return f"{len(train)} samples of {run.data.dataset_param.dataset_type}, given sha256:{given}"


def own_loader(run: RunConfig, data_parallel_rank: int, data_parallel_size: int, consumed: int = 0, split: str = "train") -> StepLoader:
    """The loader of a run on one rank; as ``build_loader``.

    Raises:
        ConfigError, DataError: as ``own_datasets`` and ``StepLoader``; too few samples.
    """
    train, valid = own_datasets(run)
    dataset, size = train if split == "train" else valid, global_batch_size(run, data_parallel_size)
    assert dataset is not None
    order = validation_order(run, size, len(dataset)) if split == "valid" else training_order(run, size, len(dataset), run.training.seq_length, None)
    limits = (_vocabulary(run), run.training.seq_length)
    source = OwnSource(dataset, run.data.dataset_param.dataset_type, run.data.dataloader_param.pad_to_multiple_of, *limits)
    return step_loader(run, cast(MicroBatchSource, source), order, data_parallel_rank, data_parallel_size, consumed)


def _vocabulary(run: RunConfig) -> int | None:
    """By the model's config.json; None: it does not say."""
    hf = read_hf_config(run.model.hf_dir) if run.model.hf_dir is not None else {}
    text = hf.get("text_config")
    size = (text if isinstance(text, Mapping) else hf).get("vocab_size")
    return size if isinstance(size, int) else None


class OwnSource:
    """``MicroBatchSource`` over the dataset of a plug-in.

    Args:
        vocabulary: of the model; None: not known.
        longest: sample that is allowed, in tokens; None: any.
    """

    def __init__(self, dataset: Any, name: str, pad_to_multiple_of: int = 1, vocabulary: int | None = None, longest: int | None = None) -> None:
        self.dataset, self.name = dataset, name
        self._vocabulary, self._longest = vocabulary, longest
        self._collate: Callable[[list[Sample]], Mapping[str, Any]] | None = getattr(dataset, "collate_fn", None)
        self._multiple = pad_to_multiple_of

    def read(self, rows: Sequence[Row], note: Callable[[int], object] = lambda sample: None) -> Reading:
        """The micro-batch of ``rows``; a place without a sample is the first sample without labels.

        Raises:
            DataError: a sample cannot be read, or they make no micro-batch; naming them.
        """
        ids = [sample for row in rows for _, sample in row]
        samples = []
        for sample in ids:
            if sample != PADDING:
                note(sample)
            samples.append(self._without_labels(self._sample(0)) if sample == PADDING else self._sample(sample))
        note(PADDING)
        where = f"samples {ids} of {self.name}"
        try:
            made = collate(samples, self._multiple) if self._collate is None else self._collate(samples)
            if not isinstance(made, Mapping):
                raise DataError(f"collate_fn gave {shown(made)}; a micro-batch maps names to tensors")
            batch = check_batch(made, self._vocabulary)
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
        except (Exception, SystemExit) as error:
            raise DataError(f"{where}: collating them failed: {told(error)}") from error
        return Reading({**batch, "sample_ids": ids}, 0)

    def known_length(self) -> int:
        return len(self.dataset)

    def describe(self, sample: int) -> str:
        return f"sample {sample} of {self.name}"

    def _sample(self, number: int) -> Sample:
        where = f"sample {number} of {self.name}"
        try:
            sample = self.dataset[number]
        except (Exception, SystemExit) as error:
            raise DataError(f"{where}: {told(error)}") from error
        if not isinstance(sample, Mapping) or "labels" not in sample:
            what = f"a mapping without labels ({', '.join(map(str, sample))})" if isinstance(sample, Mapping) else type(sample).__name__
            raise DataError(f"{where}: it is {what}; a sample maps names, labels among them, to tensors or lists")
        length = len(sample["labels"]) if hasattr(sample["labels"], "__len__") else 0
        if self._longest is not None and length > self._longest:
            raise DataError(f"{where}: {length} tokens, but training.seq_length allows {self._longest}; cut the sample, or raise it")
        return sample

    @staticmethod
    def _without_labels(sample: Sample) -> Sample:
        import torch

        return {**sample, "labels": torch.full_like(torch.as_tensor(sample["labels"]), IGNORE)}
