"""Which order a run's data.json asks for, and which wishes exclude each other."""

from __future__ import annotations

from tangram.config.run import RunConfig
from tangram.errors import ConfigError

GROUPING = ("LengthGroupedSampler", "BucketBatchSampler")


def cutoff(run: RunConfig) -> int:
    """Longest sample, tokens.

    Raises:
        ConfigError: ``cutoff_len`` is larger than ``seq_length``.
    """
    given, most = run.data.dataset_param.basic_parameters.cutoff_len, run.training.seq_length
    if given is not None and given > most:
        raise ConfigError(f"basic_parameters.cutoff_len {given} is larger than seq_length {most}; lower the first or raise the second")
    return most if given is None else given


def has_validation(run: RunConfig) -> bool:
    """Whether data.json names validation data."""
    basic = run.data.dataset_param.basic_parameters
    return basic.val_dataset is not None or basic.val_rate is not None


def needs_sizes(run: RunConfig) -> bool:
    """Whether the training order depends on how large samples are, so that all must be tokenised before the first step."""
    loading = run.data.dataloader_param
    return (
        run.data.dataset_param.basic_parameters.packing
        or loading.sampler_type in GROUPING
        or loading.token_budget is not None
        or loading.balance_vision
    )


def check_choices(run: RunConfig) -> None:
    """Refuse settings of data.json that exclude each other, or that would do nothing.

    Raises:
        ConfigError: naming both.
    """
    basic, loading = run.data.dataset_param.basic_parameters, run.data.dataloader_param
    cutoff(run)
    if loading.sampler_type == "SequentialSampler" and loading.shuffle:
        raise ConfigError("dataloader_param: sampler_type SequentialSampler is the order of the file, and shuffle is true; set shuffle to false")
    if basic.packing and run.training.micro_batch_size != 1:
        raise ConfigError(
            f"basic_parameters.packing fills one row per micro-batch, and micro_batch_size is {run.training.micro_batch_size}; set it to 1"
        )
    if basic.packing and loading.sampler_type in GROUPING:
        raise ConfigError(
            f"basic_parameters.packing chooses itself which samples share a row, and sampler_type is {loading.sampler_type}; "
            "set sampler_type to BaseRandomBatchSampler, or packing to false"
        )
    if loading.token_budget is not None and run.training.micro_batch_size != 1:
        raise ConfigError(
            f"dataloader_param.token_budget decides how many samples a micro-batch has, and micro_batch_size is {run.training.micro_batch_size}; "
            "set it to 1, or remove the budget"
        )
    if basic.streaming:
        _check_streaming(run)
    if basic.bad_samples_report is not None and basic.bad_samples != "skip":
        raise ConfigError(
            f"basic_parameters.bad_samples_report {basic.bad_samples_report} stays empty as long as bad_samples is fail; "
            "set bad_samples to skip, or remove the report"
        )
    _check_effects(run)


def _check_effects(run: RunConfig) -> None:
    """Refuse keys that need another one which is not given."""
    basic = run.data.dataset_param.basic_parameters
    tokenised = basic.cache_dir is not None or needs_sizes(run)
    knapsack = basic.packing and basic.packing_strategy == "knapsack" and run.data.dataloader_param.token_budget is None
    window = basic.preprocessing_batch_size != type(basic).model_fields["preprocessing_batch_size"].default
    for key, given, needed, there in (
        ("overwrite_cache", basic.overwrite_cache, "cache_dir", basic.cache_dir is not None),
        ("val_max_samples", basic.val_max_samples is not None, "val_dataset or val_rate", has_validation(run)),
        ("packing_strategy", basic.packing_strategy != "knapsack", "packing", basic.packing),
        ("preprocessing_batch_size", window, "packing by knapsack", knapsack),
        ("preprocessing_num_workers", basic.preprocessing_num_workers > 0, "cache_dir or an order by size", tokenised),
    ):
        if given and not there:
            raise ConfigError(f"basic_parameters.{key} does nothing without {needed}; give {needed}, or remove it")


def _check_streaming(run: RunConfig) -> None:
    basic, loading = run.data.dataset_param.basic_parameters, run.data.dataloader_param
    wishes = {
        "shuffle": loading.shuffle,
        f"sampler_type {loading.sampler_type}": loading.sampler_type in GROUPING,
        "packing": basic.packing,
        "token_budget": loading.token_budget is not None,
        "balance_vision": loading.balance_vision,
        "cache_dir": basic.cache_dir is not None,
    }
    asked = [name for name, wanted in wishes.items() if wanted]
    if asked:
        raise ConfigError(
            f"basic_parameters.streaming reads samples in file order without looking ahead, and {', '.join(asked)} "
            f"need{'s' if len(asked) == 1 else ''} the whole dataset; remove {'it' if len(asked) == 1 else 'them'}, or set streaming to false"
        )
