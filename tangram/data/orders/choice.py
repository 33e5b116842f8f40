"""The orders of training and validation that a run's data.json asks for."""

from __future__ import annotations

from collections.abc import Callable

from tangram.config.run import RunConfig
from tangram.data.orders.balance import BalancedOrder
from tangram.data.orders.budget import BudgetOrder
from tangram.data.orders.grouped import BucketOrder, LengthGroupedOrder
from tangram.data.orders.packed import PackedOrder
from tangram.data.orders.streaming import StreamingOrder
from tangram.data.sampler import GlobalOrder, Order
from tangram.data.sizes import SampleSizes


def streaming_order(run: RunConfig, global_batch_size: int, has: Callable[[int], bool]) -> Order:
    """The order of a streamed dataset.

    Raises:
        DataError: as ``StreamingOrder``.
    """
    return StreamingOrder(has, global_batch_size, seed=run.training.seed, tail=run.data.dataloader_param.tail_policy)


def training_order(run: RunConfig, global_batch_size: int, num_samples: int, cutoff: int, sizes: SampleSizes | None) -> Order:
    """The order of a dataset whose length is known.

    Args:
        num_samples: samples of the dataset.
        cutoff: longest sample, tokens.
        sizes: of all samples; None: data.json asks for no order that needs them.

    Raises:
        ConfigError, DataError: as the orders.
    """
    loading, basic, seed = run.data.dataloader_param, run.data.dataset_param.basic_parameters, run.training.seed
    if sizes is None:
        return GlobalOrder(num_samples, global_batch_size, seed=seed, shuffle=loading.shuffle, tail=loading.tail_policy)
    if basic.packing and loading.token_budget is None:
        order: Order = PackedOrder(
            sizes,
            global_batch_size,
            cutoff,
            strategy=basic.packing_strategy,
            window=basic.preprocessing_batch_size,
            pad_to_multiple_of=loading.pad_to_multiple_of,
            seed=seed,
            shuffle=loading.shuffle,
            tail=loading.tail_policy,
        )
    else:
        order = _of_samples(run, global_batch_size, sizes)
    if loading.token_budget is not None:
        order = BudgetOrder(
            order,
            sizes,
            loading.token_budget,
            packing=basic.packing,
            strategy=basic.packing_strategy,
            pad_to_multiple_of=loading.pad_to_multiple_of,
            micro_batches_multiple_of=micro_batches_multiple_of(run),
        )
    return BalancedOrder(order, sizes.patches) if loading.balance_vision else order


def validation_order(run: RunConfig, global_batch_size: int, num_samples: int) -> Order:
    """File order, once; the last global batch is filled up with empty rows.

    A token budget cuts training alone, so with it ``global_batch_size`` need not give each rank the micro-batches that an interleaved pipeline needs.

    Raises:
        DataError: no samples.
    """
    order = GlobalOrder(num_samples, global_batch_size, seed=run.training.seed, tail="pad", endless=False)
    order.micro_batches_multiple_of = micro_batches_multiple_of(run)
    return order


def micro_batches_multiple_of(run: RunConfig) -> int:
    """What each rank's number of micro-batches must be a multiple of: an interleaved pipeline's size."""
    return run.parallel.pipeline_model_parallel_size if run.parallel.virtual_pipeline_model_parallel_size is not None else 1


def _of_samples(run: RunConfig, global_batch_size: int, sizes: SampleSizes) -> Order:
    """An order of one sample a row."""
    loading, seed, tail = run.data.dataloader_param, run.training.seed, run.data.dataloader_param.tail_policy
    if loading.sampler_type == "LengthGroupedSampler":
        return LengthGroupedOrder(sizes, global_batch_size, seed=seed, shuffle=loading.shuffle, tail=tail)
    if loading.sampler_type == "BucketBatchSampler":
        return BucketOrder(sizes, global_batch_size, run.training.micro_batch_size, seed=seed, shuffle=loading.shuffle, tail=tail)
    return GlobalOrder(len(sizes.tokens), global_batch_size, seed=seed, shuffle=loading.shuffle, tail=tail)
