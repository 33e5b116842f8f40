"""Global batches as one data-parallel rank sees them, read by worker processes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tangram.config.run import RunConfig
from tangram.data.collate import Collator, get_collator
from tangram.data.dataset import ConversationDataset
from tangram.data.encode import SampleEncoder
from tangram.data.images import ImageProcessor
from tangram.data.media import Media
from tangram.data.sampler import PADDING, GlobalOrder, MicroBatch, Row
from tangram.data.template import get_template
from tangram.data.tokenizer import PAD, load_tokenizer
from tangram.errors import ConfigError, DataError
from tangram.families.base import Family

logger = logging.getLogger(__name__)

Batch = Mapping[str, Any]


class Reading(NamedTuple):
    """A micro-batch and what there is to say of how it was made."""

    batch: dict[str, Any]
    turns_dropped: int


class MicroBatchSource:
    """What a worker process holds: ``source[rows]`` is the micro-batch of those rows."""

    def __init__(self, dataset: ConversationDataset, encoder: SampleEncoder, collator: Collator) -> None:
        self.dataset = dataset
        self.encoder = encoder
        self.collator = collator

    def __getitem__(self, rows: Sequence[Row]) -> dict[str, Any]:
        return self.read(rows).batch

    def read(self, rows: Sequence[Row]) -> Reading:
        """The micro-batch of ``rows``.

        Raises:
            DataError: a sample that cannot be used.
        """
        read = [[self.encoder.blank() if sample == PADDING else self.encoder(self.dataset[sample]) for _, sample in row] for row in rows]
        return Reading(self.collator(read), sum(sample.turns_dropped for row in read for sample in row))


class _FaultsAsValues:
    """Hands faults back as values: torch's own way buries the one line of a DataError in a worker's stack trace."""

    def __init__(self, source: MicroBatchSource) -> None:
        self.source = source

    def __getitem__(self, rows: Sequence[Row]) -> Reading | DataError:
        try:
            return self.source.read(rows)
        except DataError as fault:
            return fault


class StepLoader:
    """Iterates over optimizer steps; each is the list of this rank's micro-batches, in order.

    The content is a function of the order alone: the same for any number of workers, and the set of micro-batches of a step the same for any
    data-parallel size. Torch's global random state is neither read nor moved.

    Args:
        source: makes micro-batches.
        order: which samples; also the global batch size.
        consumed: places consumed before, by all ranks: where to resume.
        num_workers: 0: read in this process.
        prefetch_factor: micro-batches that each worker reads ahead.
        pin_memory: as torch's.
        start_method: "fork", "spawn" or None for the platform's default.

    Raises:
        ConfigError: the global batch size is not a multiple of micro-batch size times data-parallel size.
        DataError: ``consumed`` is no multiple of the global batch size; while iterating, a sample that cannot be used.
    """

    def __init__(
        self,
        source: MicroBatchSource,
        order: GlobalOrder,
        *,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        micro_batch_size: int = 1,
        consumed: int = 0,
        num_workers: int = 0,
        prefetch_factor: int = 4,
        pin_memory: bool = False,
        start_method: str | None = None,
    ) -> None:
        step = micro_batch_size * data_parallel_size
        if order.global_batch_size % step:
            raise ConfigError(
                f"global_batch_size {order.global_batch_size} is not a multiple of micro_batch_size {micro_batch_size} times the data-parallel size "
                f"{data_parallel_size} = {step}"
            )
        if consumed % order.global_batch_size:
            raise DataError(
                f"the run to resume has consumed {consumed} samples, no multiple of global_batch_size {order.global_batch_size}; "
                "resume with the global_batch_size it had"
            )
        self.source = source
        self.order = order
        self.consumed = consumed
        """Places consumed by the steps handed out so far, by all ranks: the state to save."""
        self.turns_dropped = 0
        """Turns that this rank left out so far because their sample was longer than the cutoff."""
        self.micro_batches_per_step = order.global_batch_size // step
        self._rank, self._size, self._micro = data_parallel_rank, data_parallel_size, micro_batch_size
        self._num_workers, self._prefetch_factor, self._pin_memory, self._start_method = num_workers, prefetch_factor, pin_memory, start_method

    def __iter__(self) -> Iterator[list[Batch]]:
        """Steps from ``consumed`` on; ends only where the order does."""
        import torch
        from torch.utils.data import DataLoader

        workers: dict[str, Any] = {}
        if self._num_workers:
            workers = {"prefetch_factor": self._prefetch_factor, "multiprocessing_context": self._start_method}
        loader: DataLoader[Any] = DataLoader(
            _FaultsAsValues(self.source),  # type: ignore[arg-type]
            sampler=self._micro_batches(),
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=self._num_workers,
            pin_memory=self._pin_memory,
            generator=torch.Generator().manual_seed(self.order.seed * 65536 + self._rank),
            **workers,
        )
        step: list[Batch] = []
        for reading in loader:
            if isinstance(reading, DataError):
                raise reading
            self._count(reading)
            step.append(reading.batch)
            if len(step) == self.micro_batches_per_step:
                self.consumed += self.order.global_batch_size
                yield step
                step = []

    def _count(self, reading: Reading) -> None:
        if reading.turns_dropped and not self.turns_dropped:
            logger.warning("samples %s: turns beyond the cutoff are left out; this is said once, and counted", reading.batch["sample_ids"])
        self.turns_dropped += reading.turns_dropped

    def _micro_batches(self) -> Iterator[MicroBatch]:
        """This rank's micro-batches from ``consumed`` on."""
        number = self.consumed // self.order.global_batch_size
        while self.order.num_batches is None or number < self.order.num_batches:
            yield from self.order.step(number, self._micro, self._rank, self._size)
            number += 1


def _as_it_is(batch: Any) -> Any:
    return batch


def image_processor(run: RunConfig) -> ImageProcessor | None:
    """The run's image processor; None for a model without a vision encoder.

    Raises:
        ConfigError: as ``ImageProcessor.from_config``.
    """
    encoder = run.model.config.image_encoder
    return ImageProcessor.from_config(run.data.dataset_param.preprocess_parameters, encoder.vision_encoder) if encoder else None


def global_batch_size(run: RunConfig, data_parallel_size: int) -> int:
    """Samples of one optimizer step."""
    return run.training.global_batch_size or run.training.micro_batch_size * data_parallel_size


def build_source(run: RunConfig, family: Family, *, needs_pixels: bool = True, split: str = "train") -> MicroBatchSource:
    """Dataset, encoder and collator of a run.

    Args:
        split: "train" or "valid".

    Raises:
        ConfigError, DataError: as the parts.
    """
    data, model = run.data.dataset_param, run.model.config
    basic = data.basic_parameters
    dataset = ConversationDataset.from_config(basic, data.attr, split, run.training.seed)
    tokenizer = load_tokenizer(data.preprocess_parameters.model_name_or_path, model)
    images = image_processor(run)
    encoder = SampleEncoder(
        tokenizer,
        get_template(basic.template or family.template),
        Media(images) if images else None,
        run.training.seq_length,
        train_on_prompt=basic.train_on_prompt,
        mask_history=basic.mask_history,
        needs_pixels=needs_pixels,
    )
    loading = run.data.dataloader_param
    collator = get_collator(loading.collate_param.model_name or "qwen2vl")(family.rope_index, model, tokenizer.id(PAD), loading.pad_to_multiple_of)
    return MicroBatchSource(dataset, encoder, collator)


def build_loader(
    run: RunConfig,
    family: Family,
    data_parallel_rank: int,
    data_parallel_size: int,
    consumed: int = 0,
    needs_pixels: bool = True,
    split: str = "train",
) -> StepLoader:
    """The loader of a run on one rank.

    Args:
        consumed: samples consumed by all ranks before, from the checkpoint.
        needs_pixels: False on ranks that hold no vision layers: they read only the headers of images and get no ``pixel_values``.
        split: "train": endless; "valid": one pass over ``val_dataset`` in file order, the last batch filled up with rows that have no label.

    Raises:
        ConfigError, DataError: as the parts.
    """
    source = build_source(run, family, needs_pixels=needs_pixels, split=split)
    loading, size = run.data.dataloader_param, global_batch_size(run, data_parallel_size)
    if split == "train":
        order = GlobalOrder(len(source.dataset), size, seed=run.training.seed, shuffle=loading.shuffle, tail=loading.tail_policy)
        if data_parallel_rank == 0 and order.dropped_per_epoch:
            logger.info("%d samples, global batch %d: dropped %d in each epoch", order.num_samples, size, order.dropped_per_epoch)
    else:
        order = GlobalOrder(len(source.dataset), size, seed=run.training.seed, tail="pad", endless=False)
    if source.encoder.media and data_parallel_rank == 0:
        logger.info("%s", source.encoder.media)
    return StepLoader(
        source,
        order,
        data_parallel_rank=data_parallel_rank,
        data_parallel_size=data_parallel_size,
        micro_batch_size=run.training.micro_batch_size,
        consumed=consumed,
        num_workers=run.training.num_workers,
        pin_memory=loading.pin_memory,
    )


def check_data(run: RunConfig, data_parallel_size: int = 1, read_headers: bool = True) -> None:
    """All that can be said of a run's data before it starts; nothing is decoded or tokenised and torch is not imported.

    Every record's format, placeholders against images, every image file's existence and header, enough samples for a global batch.

    Args:
        read_headers: False: only look whether image files are there.

    Raises:
        ConfigError, DataError: the first fault.
    """
    data = run.data.dataset_param
    images = image_processor(run)
    for split in ("train", "valid"):
        if split == "valid" and data.basic_parameters.val_dataset is None:
            continue
        dataset = ConversationDataset.from_config(data.basic_parameters, data.attr, split, run.training.seed)
        if split == "train":
            GlobalOrder(len(dataset), global_batch_size(run, data_parallel_size), tail=run.data.dataloader_param.tail_policy)
        dataset.check(images if read_headers else None)
