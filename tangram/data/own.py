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
from tangram.data.build import global_batch_size, step_loader
from tangram.data.encode import IGNORE
from tangram.data.loader import StepLoader
from tangram.data.orders.choice import training_order, validation_order
from tangram.data.sampler import PADDING, Row
from tangram.data.source import MicroBatchSource, Reading
from tangram.errors import ConfigError, DataError
from tangram.families.plugins import told
from tangram.families.registry import data_register

FILL = {"input_ids": 0, "attention_mask": 0, "labels": IGNORE}
"""What the places past a sample's end hold, by name; of another name, 0."""
Sample = Mapping[str, Any]


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
    except Exception as error:
        raise DataError(f"{where}: building it failed: {told(error)}") from error
    train, valid = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    for dataset in (train, *([valid] if valid is not None else [])):
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise DataError(f"{where}: it built {type(dataset).__name__}, which lacks __len__ or __getitem__; return a dataset, or (train, valid)")
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
    source = OwnSource(dataset, run.data.dataset_param.dataset_type, run.data.dataloader_param.pad_to_multiple_of)
    return step_loader(run, cast(MicroBatchSource, source), order, data_parallel_rank, data_parallel_size, consumed)


class OwnSource:
    """``MicroBatchSource`` over the dataset of a plug-in."""

    def __init__(self, dataset: Any, name: str, pad_to_multiple_of: int = 1) -> None:
        self.dataset, self.name = dataset, name
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
            batch = dict(collate(samples, self._multiple) if self._collate is None else self._collate(samples))
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
        except Exception as error:
            raise DataError(f"{where}: collating them failed: {told(error)}") from error
        if getattr(batch.get("labels"), "ndim", None) != 2:
            raise DataError(f"{where}: a micro-batch needs labels, a tensor [rows, tokens], and these gave {_shape(batch.get('labels'))}")
        return Reading({**batch, "sample_ids": ids}, 0)

    def describe(self, sample: int) -> str:
        return f"sample {sample} of {self.name}"

    def _sample(self, number: int) -> Sample:
        where = f"sample {number} of {self.name}"
        try:
            sample = self.dataset[number]
        except Exception as error:
            raise DataError(f"{where}: {told(error)}") from error
        if not isinstance(sample, Mapping) or "labels" not in sample:
            what = f"a mapping without labels ({', '.join(map(str, sample))})" if isinstance(sample, Mapping) else type(sample).__name__
            raise DataError(f"{where}: it is {what}; a sample maps names, labels among them, to tensors or lists")
        return sample

    @staticmethod
    def _without_labels(sample: Sample) -> Sample:
        import torch

        return {**sample, "labels": torch.full_like(torch.as_tensor(sample["labels"]), IGNORE)}


def collate(samples: Sequence[Sample], pad_to_multiple_of: int = 1) -> dict[str, Any]:
    """One micro-batch: what is as long as a sample's labels is padded on the right (``FILL``) and stacked, ``[rows, tokens]``; all else is joined
    along its first dimension, such as the pictures of all samples. ``attention_mask`` is made where there is none and samples differ in length.

    Raises:
        DataError: a name that some samples have as one and some as the other, or tokens that some samples lack.
    """
    import torch

    tensors = [{name: torch.as_tensor(value) for name, value in sample.items() if value is not None} for sample in samples]
    lengths = [len(sample["labels"]) for sample in tensors]
    longest = -(-max(lengths) // pad_to_multiple_of) * pad_to_multiple_of
    if any(length != longest for length in lengths) and not any("attention_mask" in sample for sample in tensors):
        tensors = [{**sample, "attention_mask": torch.ones(length, dtype=torch.long)} for sample, length in zip(tensors, lengths, strict=True)]
    batch: dict[str, Any] = {}
    for name in dict.fromkeys(name for sample in tensors for name in sample):
        held = [(sample[name], length) for sample, length in zip(tensors, lengths, strict=True) if name in sample]
        per_token = {value.dim() == 1 and len(value) == length for value, length in held}
        if per_token == {True} and len(held) == len(samples):
            batch[name] = torch.stack([torch.nn.functional.pad(value, (0, longest - length), value=FILL.get(name, 0)) for value, length in held])
        elif per_token == {False}:
            batch[name] = torch.cat([value for value, _ in held])
        else:
            shapes = ", ".join(_shape(sample.get(name)) for sample in tensors)
            raise DataError(f"{name} has the shapes {shapes} for {lengths} labels: some are one value per token and some are not; give a collate_fn")
    return batch


def _shape(value: Any) -> str:
    return "nothing" if value is None else str(list(value.shape)) if hasattr(value, "shape") else type(value).__name__
