"""All that can be said of a run's data before it starts; nothing is decoded or tokenised, and torch is not imported."""

from __future__ import annotations

from tangram.config.run import RunConfig
from tangram.data.bad_samples import Skip
from tangram.data.build import build_dataset, build_media, check_faults, global_batch_size
from tangram.data.choice import check_choices, has_validation
from tangram.data.sampler import GlobalOrder


def check_data(run: RunConfig, data_parallel_size: int = 1, read_headers: bool = True) -> str:
    """Check settings, every record's format, placeholders against media, that the model takes them, every media file's existence and header, and
    whether the samples are enough for a global batch.

    Args:
        read_headers: False: only look whether media files are there.

    Returns:
        What there is to say of the samples. With ``bad_samples`` skip those that cannot be used are counted, but for a streamed dataset,
        which is not looked through beforehand.

    Raises:
        ConfigError, DataError: the first fault; with ``bad_samples`` skip only if no sample can be used.
    """
    basic = run.data.dataset_param.basic_parameters
    check_choices(run)
    media = build_media(run)
    headers = media if read_headers else None
    kinds = [] if media is None else ["image"] if media.videos is None else ["image", "video"]
    said = basic.dataset
    for split in ("train", *(["valid"] if has_validation(run) else [])):
        dataset = build_dataset(run, split)
        if split == "train" and not basic.streaming:
            GlobalOrder(len(dataset), global_batch_size(run, data_parallel_size), tail=run.data.dataloader_param.tail_policy)
        if basic.bad_samples == "fail":
            dataset.check(headers, kinds)
        if basic.bad_samples == "fail" or (basic.streaming and split == "train"):
            continue
        faults = [Skip(sample, f"sample {sample}", str(fault)) for sample, fault in dataset.faults(headers, kinds=kinds)]
        check_faults(faults, len(dataset), skip=True)
        if faults:
            said += f"; {len(faults)} of {len(dataset)} samples of {split} cannot be used and will be skipped"
    return said
