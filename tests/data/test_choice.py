"""What data.json asks for: wishes that exclude each other, and the orders that the others lead to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tangram.config.run import RunConfig
from tangram.data.build import build_loader
from tangram.data.check import check_data
from tangram.errors import ConfigError
from tangram.families.base import get_family
from tests.data.test_loader import sample_ids, take

FAMILY = get_family("qwen2_5_vl")
MakeRun = Callable[..., RunConfig]


@pytest.mark.parametrize(
    ("basic", "loading", "training", "message"),
    [
        ({}, {"sampler_type": "SequentialSampler", "shuffle": True}, {}, "SequentialSampler is the order of the file, and shuffle is true"),
        ({"packing": True}, {}, {"micro_batch_size": 2}, "packing fills one row per micro-batch, and micro_batch_size is 2; set it to 1"),
        ({"packing": True}, {"sampler_type": "BucketBatchSampler"}, {}, "packing chooses itself .* and sampler_type is BucketBatchSampler"),
        (
            {"streaming": True},
            {"shuffle": True},
            {},
            "streaming reads samples in file order without looking ahead, and shuffle needs the whole dataset",
        ),
        ({"streaming": True, "packing": True}, {"token_budget": 9}, {}, "and packing, token_budget need the whole dataset; remove them, or set"),
        ({"streaming": True}, {"sampler_type": "LengthGroupedSampler"}, {}, "and sampler_type LengthGroupedSampler needs the whole dataset"),
        ({"streaming": True, "cache_dir": "c"}, {}, {}, "and cache_dir needs the whole dataset"),
        ({"cutoff_len": 300}, {}, {}, r"cutoff_len 300 is larger than seq_length 256; "),
        ({"overwrite_cache": True}, {}, {}, "overwrite_cache does nothing without cache_dir"),
        ({"val_max_samples": 3}, {}, {}, "val_max_samples does nothing without val_dataset or val_rate; give val_dataset or val_rate, or remove it"),
        ({"preprocessing_num_workers": 2}, {}, {}, "preprocessing_num_workers does nothing without cache_dir or an order by size"),
        ({"preprocessing_batch_size": 9}, {}, {}, "preprocessing_batch_size does nothing without packing by knapsack"),
        ({"packing": True, "preprocessing_batch_size": 9}, {"token_budget": 99}, {}, "preprocessing_batch_size does nothing without packing by kna"),
        ({"packing_strategy": "sequential"}, {}, {}, "packing_strategy does nothing without packing; give packing, or remove it"),
    ],
)
def test_wishes_that_exclude_each_other(
    basic: dict[str, Any], loading: dict[str, Any], training: dict[str, Any], message: str, make_run: MakeRun, mixed_dataset: str
) -> None:
    run = make_run(mixed_dataset, basic=basic, loading=loading, **training)
    with pytest.raises(ConfigError, match=message):
        check_data(run)
    with pytest.raises(ConfigError, match=message):
        build_loader(run, FAMILY, 0, 1)


def test_the_cutoff_is_the_smaller_of_two(make_run: MakeRun, record: Any, write_json: Any) -> None:
    path = write_json([record("q", "a", "long " * 40, "b")])
    lengths = [
        take(build_loader(make_run(path, basic=basic, micro_batch_size=1), FAMILY, 0, 1), 1)[0][0]["input_ids"].shape[1]
        for basic in ({}, {"cutoff_len": 40})
    ]
    assert lengths[0] > 60 and lengths[1] <= 40


@pytest.fixture
def lengths(record: Any, write_json: Any) -> str:
    """Twelve samples of very different lengths."""
    return write_json([record("q", "word " * (1 + 17 * number % 60)) for number in range(12)])


def rows(run: RunConfig, size: int = 1, steps: int = 3) -> list[list[list[int]]]:
    """Sample ids of the micro-batches of each step, over all ranks."""
    ranks = [sample_ids(take(build_loader(run, FAMILY, rank, size), steps)) for rank in range(size)]
    return [sorted(ids for rank in ranks for ids in rank[step]) for step in range(steps)]


@pytest.mark.parametrize("cache", [False, True])
def test_samples_of_like_length_come_together(cache: bool, make_run: MakeRun, lengths: str, tmp_path: Path) -> None:
    basic = {"cache_dir": str(tmp_path / "cache")} if cache else {"preprocessing_num_workers": 2}
    run = make_run(lengths, basic=basic, loading={"sampler_type": "LengthGroupedSampler", "shuffle": False}, micro_batch_size=2, global_batch_size=4)
    steps = rows(run)
    assert sorted(sample for step in steps for ids in step for sample in ids) == list(range(12))
    for step in take(build_loader(run, FAMILY, 0, 1), 3):
        longest = [int(batch["attention_mask"].sum(1).max()) for batch in step]
        assert longest == sorted(longest, reverse=True)
    assert rows(run, size=2) == steps


def test_packed_rows_hold_every_sample_once(make_run: MakeRun, lengths: str) -> None:
    run = make_run(lengths, basic={"packing": True}, loading={"tail": "pad"}, micro_batch_size=1, global_batch_size=2, seq_length=128)
    loader = build_loader(run, FAMILY, 0, 1)
    steps = take(loader, 2)
    seen: list[int] = []
    for batch in (batch for step in steps for batch in step):
        assert batch["input_ids"].shape[0] == 1 and batch["input_ids"].shape[1] <= 128
        seen += batch["sample_ids"]
    assert len(seen) > 4, "rows hold several samples"
    assert len([sample for sample in seen if sample >= 0]) == len({sample for sample in seen if sample >= 0})
    assert rows(run, size=2, steps=2) == rows(run, size=1, steps=2)


def test_a_budget_of_tokens_cuts_micro_batches(make_run: MakeRun, lengths: str) -> None:
    run = make_run(lengths, loading={"token_budget": 160}, micro_batch_size=1, global_batch_size=12)
    (step,) = take(build_loader(run, FAMILY, 0, 1), 1)
    assert all(batch["input_ids"].numel() <= 160 for batch in step) and 1 < len(step) < 12
    assert sorted(sample for batch in step for sample in batch["sample_ids"]) == list(range(12))


def test_a_streamed_dataset_is_read_in_file_order_and_resumes(make_run: MakeRun, lengths: str) -> None:
    run = make_run(lengths, basic={"streaming": True}, loading={"tail": "pad"}, micro_batch_size=1, global_batch_size=5)
    check_data(run)
    steps = sample_ids(take(build_loader(run, FAMILY, 0, 1), 4))
    assert [[ids[0] for ids in step] for step in steps] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, -1, -1, -1], [0, 1, 2, 3, 4]]
    assert sample_ids(take(build_loader(run, FAMILY, 0, 1, consumed=10), 2)) == steps[2:]


def test_unusable_samples_of_a_packed_order_are_listed_though_no_row_holds_them(
    make_run: MakeRun, record: Any, write_json: Any, tmp_path: Path
) -> None:
    path = write_json([record("q", "a"), record("<image>", "b"), record("q", "c"), record("q", "d")])
    basic = {"packing": True, "bad_samples": "skip", "bad_samples_report": str(tmp_path / "bad")}
    (step,) = take(build_loader(make_run(path, basic=basic, loading={"tail": "pad"}, micro_batch_size=1, global_batch_size=1), FAMILY, 0, 1), 1)
    assert [batch["sample_ids"] for batch in step] == [[0, 2, 3]]
    assert '"sample": 1' in (tmp_path / "bad").read_text()
