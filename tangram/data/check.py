"""All that can be said of a run's data before it starts; nothing is decoded or tokenised, and torch is not imported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tangram.config.run import RunConfig
from tangram.data.bad_samples import Skip
from tangram.data.build import build_dataset, check_faults, global_batch_size, image_processor
from tangram.data.choice import check_choices, has_validation
from tangram.data.dataset import ConversationDataset
from tangram.data.images import ImageProcessor
from tangram.data.sampler import GlobalOrder
from tangram.errors import DataError


def check_data(run: RunConfig, data_parallel_size: int = 1, read_headers: bool = True) -> str:
    """Check settings, every record's format, placeholders against images, every image file's existence and header, and whether the samples are
    enough for a global batch.

    Args:
        read_headers: False: only look whether image files are there.

    Returns:
        What there is to say of the samples. With ``bad_samples`` skip those that cannot be used are counted, but for a streamed dataset,
        which is not looked through beforehand.

    Raises:
        ConfigError, DataError: the first fault; with ``bad_samples`` skip only if no sample can be used.
    """
    basic = run.data.dataset_param.basic_parameters
    check_choices(run)
    images = image_processor(run)
    said = basic.dataset
    for split in ("train", *(["valid"] if has_validation(run) else [])):
        dataset = build_dataset(run, split)
        if split == "train" and not basic.streaming:
            GlobalOrder(len(dataset), global_batch_size(run, data_parallel_size), drop_last=run.data.dataloader_param.tail_policy == "drop")
        if basic.bad_samples == "fail":
            dataset.check(images if read_headers else None)
        if basic.bad_samples == "fail" or (basic.streaming and split == "train"):
            continue
        faults = list(find_faults(dataset, images if read_headers else None))
        check_faults(faults, len(dataset), skip=True)
        if faults:
            said += f"; {len(faults)} of {len(dataset)} samples of {split} cannot be used and will be skipped"
    return said


def find_faults(dataset: ConversationDataset, images: ImageProcessor | None) -> Iterator[Skip]:
    """The samples that cannot be used, each with its first fault.

    Args:
        images: given: the headers of image files are read; None: they only have to be there.
    """
    there: dict[str, bool] = {}
    for sample in range(len(dataset)):
        where = f"sample {sample}"
        try:
            conversation = dataset[sample]
            where = conversation.where
            for path in conversation.images:
                if path not in there:
                    there[path] = Path(path).is_file()
                if not there[path]:
                    raise DataError(f"{path}: no such image file, in {where}")
            if images is not None:
                for path in conversation.images:
                    images.grid(path, where)
        except DataError as fault:
            yield Skip(sample, where, str(fault))
