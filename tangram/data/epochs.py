"""How many steps a number of passes over the data is; known before the first of them."""

from __future__ import annotations

from tangram.config.run import RunConfig
from tangram.data.build import build_dataset, global_batch_size
from tangram.data.own import own_datasets
from tangram.errors import ConfigError, DataError


def check_epochs(run: RunConfig) -> None:
    """Refuse passes over data whose length nobody knows beforehand.

    Raises:
        ConfigError: streaming, or packing.
    """
    if run.data.dataset_param.of_plugin:
        return
    basic = run.data.dataset_param.basic_parameters
    if basic.streaming:
        raise ConfigError("training.train_epochs needs the length of the dataset, and basic_parameters.streaming does not look; give train_iters")
    if basic.packing:
        raise ConfigError(
            "training.train_epochs counts samples, and basic_parameters.packing makes rows of them, whose number shows when all are tokenised; "
            "give train_iters"
        )


def steps_of_epochs(run: RunConfig, epochs: int, data_parallel_size: int) -> int:
    """Steps of ``epochs`` passes: samples of an epoch / global batch, rounded down; rounded up where ``tail`` pads the last batch; with ``tail``
    continue the epochs run into one another.

    Raises:
        ConfigError: as ``check_epochs``.
        DataError: an epoch has too few samples for a global batch.
    """
    check_epochs(run)
    samples, batch = len(own_datasets(run)[0] if run.data.dataset_param.of_plugin else build_dataset(run)), global_batch_size(run, data_parallel_size)
    tail = run.data.dataloader_param.tail_policy
    steps = {"drop": epochs * (samples // batch), "pad": epochs * -(-samples // batch), "continue": epochs * samples // batch}[tail]
    if not steps:
        raise DataError(f"{samples} samples are fewer than a global batch of {batch}; lower the batch, or give more data")
    return steps
