"""A run's data as its ranks read it: dataset, encoder, cache, order, loader."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tangram.config.data import BasicParameters, PreprocessParameters
from tangram.config.model import ModelConfig
from tangram.config.run import RunConfig
from tangram.data.bad_samples import BadSampleReport, Skip
from tangram.data.cache import TokenCache, forget, open_cache
from tangram.data.cache_key import encoding_key
from tangram.data.choice import check_choices, cutoff, has_validation, needs_sizes
from tangram.data.collate import get_collator
from tangram.data.dataset import ConversationDataset
from tangram.data.encode import SampleEncoder
from tangram.data.loader import StepLoader
from tangram.data.media import Media
from tangram.data.orders.choice import streaming_order, training_order, validation_order
from tangram.data.orders.packed import PackedOrder
from tangram.data.sampler import Order
from tangram.data.sizes import SampleSizes, compute_sizes
from tangram.data.source import MicroBatchSource
from tangram.data.template import select_template
from tangram.data.tokenizer import load_tokenizer
from tangram.errors import DataError
from tangram.families.base import Family

if TYPE_CHECKING:
    from tangram.data.encode_all import Chunk, Progress

logger = logging.getLogger(__name__)

T = TypeVar("T")
Sizes = tuple[SampleSizes, list[Skip]]
"""Of all samples, and the samples that cannot be used."""
SharedSizes = Callable[[Callable[[], Sizes]], Sizes]
"""``share(make)``: what ``make`` gives, made by one rank for all."""


def alone(make: Callable[[], T]) -> T:
    """What one process shares with itself."""
    return make()


def build_media(run: RunConfig) -> Media | None:
    """What reads the run's images and videos; None for a model without a vision encoder.

    Raises:
        ConfigError: as ``Media.from_config``.
    """
    return media_of(run.data.dataset_param.preprocess_parameters, run.described)


def media_of(preprocess: PreprocessParameters, model: ModelConfig) -> Media | None:
    """As ``build_media``, from its parts."""
    return Media.from_config(preprocess, model.image_encoder.vision_encoder) if model.image_encoder else None


def global_batch_size(run: RunConfig, data_parallel_size: int) -> int:
    """Samples of one optimizer step."""
    training = run.training
    return training.global_batch_size or training.micro_batch_size * data_parallel_size * training.gradient_accumulation_steps


def build_dataset(run: RunConfig, split: str = "train") -> ConversationDataset:
    """The samples of a split.

    Raises:
        DataError: as ``ConversationDataset.from_config``.
    """
    data = run.data.dataset_param
    return ConversationDataset.from_config(data.basic_parameters, data.attr, split, run.training.seed)


def build_encoder(run: RunConfig, family: Family, needs_pixels: bool) -> SampleEncoder:
    """What makes tokens and pixels of the run's samples.

    Raises:
        ConfigError: as the parts.
    """
    data = run.data.dataset_param
    return encoder_of(data.basic_parameters, data.preprocess_parameters, run.described, family, cutoff(run), needs_pixels)


def encoder_of(
    basic: BasicParameters, preprocess: PreprocessParameters, model: ModelConfig, family: Family, cutoff: int, needs_pixels: bool
) -> SampleEncoder:
    """As ``build_encoder``, from its parts.

    Args:
        cutoff: longest sample, tokens.

    Raises:
        ConfigError: as the parts.
    """
    return SampleEncoder(
        load_tokenizer(preprocess.model_name_or_path, model),
        select_template(basic, family),
        media_of(preprocess, model),
        cutoff,
        truncation=basic.truncation,
        train_on_prompt=basic.train_on_prompt,
        mask_history=basic.mask_history,
        needs_pixels=needs_pixels,
    )


def build_source(run: RunConfig, family: Family, *, needs_pixels: bool = True, split: str = "train") -> MicroBatchSource:
    """Dataset, encoder, collator and, with ``cache_dir``, the tokenised samples of a run.

    Args:
        split: "train" or "valid".

    Raises:
        ConfigError, DataError: as the parts; with ``bad_samples`` fail, any sample of the cache that cannot be used.
    """
    basic, loading = run.data.dataset_param.basic_parameters, run.data.dataloader_param
    skip = basic.bad_samples == "skip"
    dataset, encoder = build_dataset(run, split), build_encoder(run, family, needs_pixels or skip)
    cache = None
    if basic.cache_dir is not None:
        cache = _cache(run, dataset, encoder, split, Path(basic.cache_dir))
        check_faults(cache.faults, len(dataset), skip)
    collator_type = get_collator(loading.collate_param.model_name or "qwen2vl")
    collator = collator_type(family.rope_index, run.described, encoder.tokenizer.pad_id, loading.pad_to_multiple_of, basic.packing)
    return MicroBatchSource(dataset, encoder, collator, skip_bad=skip, keep_pixels=needs_pixels, cache=cache)


def _cache(run: RunConfig, dataset: ConversationDataset, encoder: SampleEncoder, split: str, folder: Path) -> TokenCache:
    from tangram.data.encode_all import encode_all

    workers = run.data.dataset_param.basic_parameters.preprocessing_num_workers

    def chunks(progress: Progress) -> Iterator[Chunk]:
        return encode_all(dataset, encoder, workers, wants_bytes=True, progress=progress)

    return open_cache(folder, encoding_key(run, encoder, split), chunks, patience(run))


def forget_caches(run: RunConfig, family: Family) -> None:
    """Do what ``overwrite_cache`` says. To be called by one process per run, before any builds a source."""
    basic = run.data.dataset_param.basic_parameters
    if basic.cache_dir is None or not basic.overwrite_cache:
        return
    encoder = build_encoder(run, family, False)
    for split in ("train", *(["valid"] if has_validation(run) else [])):
        forget(Path(basic.cache_dir), encoding_key(run, encoder, split))


def check_faults(faults: list[Skip], total: int, skip: bool) -> None:
    """Say how many samples cannot be used.

    Raises:
        DataError: ``skip`` is false and there is one, or none is left.
    """
    if faults and (not skip or len(faults) == total):
        more = f" (the first of {len(faults)} of {total} samples that cannot be used)" if len(faults) > 1 else ""
        raise DataError(f"{faults[0].reason}{more}")
    if faults:
        logger.info("%d of %d samples cannot be used: skipped=%d", len(faults), total, len(faults))


def patience(run: RunConfig) -> float:
    """Seconds after which a process that does not get on is given up."""
    return 60.0 * run.parallel.distributed_timeout_minutes


def build_loader(
    run: RunConfig,
    family: Family,
    data_parallel_rank: int,
    data_parallel_size: int,
    consumed: int = 0,
    needs_pixels: bool = True,
    split: str = "train",
    *,
    reports: bool = True,
    share: SharedSizes = alone,
) -> StepLoader:
    """The loader of a run on one rank.

    Args:
        consumed: samples consumed by all ranks before, from the checkpoint.
        needs_pixels: False on ranks that hold no vision layers: they read only the headers of images and get no ``pixel_values``.
        split: "train": endless; "valid": one pass over the validation samples in file order, the last batch filled up with rows that have no label.
        reports: this rank lists and logs skipped samples; False: another rank with the same samples does.
        share: gives all ranks the sizes that one computes.

    Raises:
        ConfigError, DataError: as the parts.
    """
    check_choices(run)
    source = build_source(run, family, needs_pixels=needs_pixels, split=split)
    report = bad_sample_report(run) if reports else None
    order = build_order(run, source, data_parallel_size, split, share, report)
    if split == "train" and data_parallel_rank == 0:
        _tell(order, source)
    return step_loader(run, source, order, data_parallel_rank, data_parallel_size, consumed, report)


def step_loader(
    run: RunConfig,
    source: MicroBatchSource,
    order: Order,
    data_parallel_rank: int,
    data_parallel_size: int,
    consumed: int,
    report: BadSampleReport | None = None,
) -> StepLoader:
    """What reads ``order`` from ``source`` as the run says."""
    loading = run.data.dataloader_param
    return StepLoader(
        source,
        order,
        data_parallel_rank=data_parallel_rank,
        data_parallel_size=data_parallel_size,
        micro_batch_size=run.training.micro_batch_size,
        consumed=consumed,
        num_workers=run.training.num_workers,
        prefetch_factor=loading.prefetch_factor,
        pin_memory=loading.pin_memory,
        slow_sample_seconds=loading.slow_sample_seconds,
        patience=patience(run),
        report=report,
    )


def bad_sample_report(run: RunConfig) -> BadSampleReport:
    """Where the run lists skipped samples.

    Raises:
        ConfigError: as ``BadSampleReport``.
    """
    basic, save = run.data.dataset_param.basic_parameters, run.training.save
    default = Path(save, "bad_samples.jsonl") if save is not None and basic.bad_samples == "skip" else None
    return BadSampleReport(default if basic.bad_samples_report is None else Path(basic.bad_samples_report))


def build_order(
    run: RunConfig, source: MicroBatchSource, data_parallel_size: int, split: str, share: SharedSizes, report: BadSampleReport | None
) -> Order:
    """The order that data.json asks for; that of validation is the file's, once.

    Raises:
        DataError: too few samples for a global batch.
    """
    size = global_batch_size(run, data_parallel_size)
    if split == "valid":
        return validation_order(run, size, len(source.dataset))
    if run.data.dataset_param.basic_parameters.streaming:
        return streaming_order(run, size, source.dataset.has)
    sizes = sizes_of(run, source, share, report) if needs_sizes(run) else None
    return training_order(run, size, len(source.dataset), cutoff(run), sizes)


def sizes_of(run: RunConfig, source: MicroBatchSource, share: SharedSizes, report: BadSampleReport | None) -> SampleSizes:
    """The sizes of all samples: the cache's, or computed now by one rank for all.

    Raises:
        DataError: with ``bad_samples`` fail, a sample that cannot be used.
    """
    basic = run.data.dataset_param.basic_parameters
    if source.cache is not None:
        sizes, faults = SampleSizes.of_columns(source.cache.columns), source.cache.faults
    else:
        sizes, faults = share(lambda: compute_sizes(source.dataset, source.encoder, basic.preprocessing_num_workers))
        check_faults(faults, len(source.dataset), source.skip_bad)
    if basic.packing and report is not None:
        # A packed order has no place for them, so the loader never meets them.
        for fault in faults:
            report.add(fault)
    return sizes


def _tell(order: Order, source: MicroBatchSource) -> None:
    if order.dropped_per_epoch:
        logger.info("%d samples, global batch %d: dropped %d in each epoch", len(source.dataset), order.global_batch_size, order.dropped_per_epoch)
    if isinstance(order, PackedOrder):
        logger.info("packed rows: %d samples an epoch, %.1f %% of their tokens", order.samples_per_epoch, 100 * order.efficiency)
    if source.encoder.media is not None:
        logger.info("%s", source.encoder.media)
