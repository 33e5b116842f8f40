"""Micro-batches of whole runs: contract, data parallelism, workers, resume, faults."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from tangram.config.run import RunConfig
from tangram.data.build import build_loader, build_source
from tangram.data.check import check_data
from tangram.data.collate import Collator
from tangram.data.encode import EncodedSample
from tangram.data.loader import Batch, StepLoader
from tangram.data.sampler import GlobalOrder
from tangram.errors import ConfigError, DataError
from tangram.families.base import get_family

FAMILY = get_family("qwen2_5_vl")
MakeRun = Callable[..., RunConfig]


def same(one: Batch, two: Batch) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[k], two[k]) if torch.is_tensor(one[k]) else one[k] == two[k] for k in one)


def take(loader: StepLoader, steps: int) -> list[list[Batch]]:
    iterator: Iterator[list[Batch]] = iter(loader)
    return list(islice(iterator, steps))


def sample_ids(steps: list[list[Batch]]) -> list[list[list[int]]]:
    return [[batch["sample_ids"] for batch in step] for step in steps]


def test_the_micro_batch_contract(make_run: MakeRun, mixed_dataset: str) -> None:
    run = make_run(mixed_dataset, loading={"pad_to_multiple_of": 8}, micro_batch_size=4, global_batch_size=8)
    for batch in take(build_loader(run, FAMILY, 0, 1), 1)[0]:
        rows, length = batch["input_ids"].shape
        assert rows == 4 and length % 8 == 0
        for name in ("input_ids", "attention_mask", "labels"):
            assert batch[name].shape == (rows, length) and batch[name].dtype == torch.int64
        assert batch["position_ids"].shape == (3, rows, length) and batch["position_ids"].dtype == torch.int64
        assert (batch["labels"][batch["attention_mask"] == 0] == -100).all()
        assert (batch["input_ids"][batch["attention_mask"] == 0] == 151643).all()
        lengths = batch["attention_mask"].sum(1)
        assert all(batch["attention_mask"][row, : lengths[row]].all() for row in range(rows)), "padding is on the right"
        assert length - int(lengths.max()) < 8
        grids = batch["image_grid_thw"]
        assert grids.dtype == torch.int64 and batch["pixel_values"].dtype == torch.float32
        assert batch["pixel_values"].shape == (int(grids.prod(1).sum()), 1176)
        assert int((batch["input_ids"] == 151655).sum()) == int(grids.prod(1).sum()) // 4
        assert not torch.equal(batch["position_ids"][1], batch["position_ids"][2]), "height and width differ where there are pictures"


def test_text_only_in_its_three_spellings_gives_the_same_row(make_run: MakeRun, mixed_dataset: str) -> None:
    run = make_run(mixed_dataset, micro_batch_size=1)
    source = build_source(run, FAMILY)
    batches = [source[[((0, sample),)]] for sample in (7, 8, 9)]
    for batch in batches:
        assert "pixel_values" not in batch and "image_grid_thw" not in batch
        assert batch.pop("sample_ids")
        assert same(batch, batches[0])
    both = source[[((0, 7),), ((0, 0),)]]
    assert both["image_grid_thw"].shape == (1, 3) and both["input_ids"].shape[0] == 2


def test_every_row_of_tokens_is_padded_together() -> None:
    collate = Collator(FAMILY.rope_index, make_text_model(), pad_id=9, pad_to_multiple_of=8)
    batch = collate([[EncodedSample(0, list(range(13)), list(range(13)))], [EncodedSample(1, [1, 2], [-100, 2])]])
    assert all(batch[name].shape[-1] == 16 for name in ("input_ids", "labels", "attention_mask", "position_ids"))
    assert batch["labels"][1].tolist() == [-100, 2] + [-100] * 14


def make_text_model() -> Any:
    from types import SimpleNamespace

    return SimpleNamespace(image_encoder=None, img_context_token_id=151655, video_token_id=151656)


def test_positions_of_a_row_do_not_depend_on_its_neighbours(make_run: MakeRun, mixed_dataset: str) -> None:
    source = build_source(make_run(mixed_dataset), FAMILY)
    alone = [source[[((0, sample),)]] for sample in (0, 6, 7)]
    together = source[[((0, 0),), ((0, 6),), ((0, 7),)]]
    for row, batch in enumerate(alone):
        length = batch["input_ids"].shape[1]
        for name in ("input_ids", "labels"):
            assert torch.equal(together[name][row, :length], batch[name][0])
        assert torch.equal(together["position_ids"][:, row, :length], batch["position_ids"][:, 0])


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_step_holds_the_same_micro_batches_at_any_data_parallel_size(make_run: MakeRun, mixed_dataset: str, shuffle: bool) -> None:
    run = make_run(mixed_dataset, loading={"shuffle": shuffle}, micro_batch_size=2, global_batch_size=8)
    one = take(build_loader(run, FAMILY, 0, 1), 2)
    for size in (2, 4):
        ranks = [take(build_loader(run, FAMILY, rank, size), 2) for rank in range(size)]
        for step in range(2):
            for number, batch in enumerate(one[step]):
                assert same(batch, ranks[number % size][step][number // size])
    if not shuffle:
        assert sample_ids(one)[0] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_resume_continues_where_another_size_stopped(make_run: MakeRun, mixed_dataset: str) -> None:
    run = make_run(mixed_dataset, loading={"shuffle": True, "drop_last": False}, micro_batch_size=1, global_batch_size=4)
    straight = sample_ids(take(build_loader(run, FAMILY, 0, 1, needs_pixels=False), 5))
    first = build_loader(run, FAMILY, 1, 2, needs_pixels=False)
    take(first, 2)
    assert first.consumed == 8, "steps read ahead do not count"
    resumed = build_loader(run, FAMILY, 0, 1, consumed=first.consumed, needs_pixels=False)
    assert sample_ids(take(resumed, 3)) == straight[2:]
    eleven = [sample for step in straight for batch in step for sample in batch][:11]
    assert sorted(eleven) == list(range(11))
    with pytest.raises(DataError, match="has consumed 6 samples, no multiple of global_batch_size 4"):
        build_loader(run, FAMILY, 0, 1, consumed=6)


@pytest.mark.parametrize(("method", "workers"), [("fork", 2), ("spawn", 1)])
def test_workers_change_nothing(make_run: MakeRun, mixed_dataset: str, method: str, workers: int) -> None:
    run = make_run(mixed_dataset, loading={"shuffle": True}, micro_batch_size=2, global_batch_size=4, seed=3)
    source = build_source(run, FAMILY)
    order = GlobalOrder(len(source.dataset), 4, seed=3, shuffle=True)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    alone = take(StepLoader(source, order, micro_batch_size=2), 3)
    helped = take(StepLoader(source, order, micro_batch_size=2, num_workers=workers, start_method=method), 3)
    assert torch.equal(torch.get_rng_state(), state), "reading data moves no global random state"
    assert all(same(a, b) for x, y in zip(alone, helped, strict=True) for a, b in zip(x, y, strict=True))


def test_ranks_without_vision_get_all_but_pixels(make_run: MakeRun, mixed_dataset: str) -> None:
    run = make_run(mixed_dataset, micro_batch_size=2, global_batch_size=8)
    full, light = (take(build_loader(run, FAMILY, 0, 1, needs_pixels=needs), 1)[0] for needs in (True, False))
    for one, two in zip(full, light, strict=True):
        assert "pixel_values" not in two
        assert same({k: v for k, v in one.items() if k != "pixel_values"}, two)


def test_validation_is_one_pass_and_padding_carries_no_label(make_run: MakeRun, mixed_dataset: str) -> None:
    run = make_run(mixed_dataset, basic={"val_dataset": mixed_dataset, "val_max_samples": 3}, micro_batch_size=1, global_batch_size=4)
    steps = list(build_loader(run, FAMILY, 0, 1, split="valid"))
    assert sample_ids(steps) == [[[0], [1], [2], [-1]]]
    assert (steps[0][3]["labels"] == -100).all() and steps[0][3]["attention_mask"].sum() == 1
    ranks = [list(build_loader(run, FAMILY, rank, 2, split="valid")) for rank in range(2)]
    assert [len(rank[0]) for rank in ranks] == [2, 2]
    both = build_source(run, FAMILY, split="valid")[[((0, 0),), ((0, -1),)]]
    assert both["pixel_values"].shape[0] == steps[0][0]["pixel_values"].shape[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_picture_ends_the_run_with_one_line(make_run: MakeRun, mixed_dataset: str, tmp_path: Path, workers: int) -> None:
    broken = tmp_path / "coffee.png"
    data = broken.read_bytes()
    broken.unlink()
    broken.write_bytes(data[: len(data) // 2])
    run = make_run(mixed_dataset, micro_batch_size=1, global_batch_size=1, num_workers=workers)
    with pytest.raises(DataError) as caught:
        take(build_loader(run, FAMILY, 0, 1), 5)
    message = str(caught.value)
    assert message.startswith(str(broken)) and "data.json, record 2" in message and "\n" not in message


def test_sizes_that_do_not_divide_are_refused(make_run: MakeRun, mixed_dataset: str) -> None:
    run = make_run(mixed_dataset, micro_batch_size=2, global_batch_size=6)
    with pytest.raises(ConfigError, match="global_batch_size 6 is not a multiple of micro_batch_size 2 times the data-parallel size 2 = 4"):
        build_loader(run, FAMILY, 0, 2)
    with pytest.raises(ConfigError, match="unknown collator 'qwen2v'"):
        build_loader(make_run(mixed_dataset, loading={"collate_param": {"model_name": "qwen2v"}}), FAMILY, 0, 1)


def test_the_log_tells_what_is_dropped_and_which_limits_hold(make_run: MakeRun, mixed_dataset: str, caplog: pytest.LogCaptureFixture) -> None:
    run = make_run(mixed_dataset, preprocess={"image_max_pixels": 7840, "image_min_pixels": 784}, micro_batch_size=1, global_batch_size=4)
    with caplog.at_level("INFO"):
        build_loader(run, FAMILY, 0, 1)
    assert "11 samples, global batch 4: dropped 3 in each epoch" in caplog.text
    assert "min_pixels 784, max_pixels 7840" in caplog.text


@pytest.mark.parametrize("workers", [0, 1])
def test_turns_left_out_are_counted_and_told(make_run: MakeRun, record: Any, write_json: Any, caplog: pytest.LogCaptureFixture, workers: int) -> None:
    path = write_json([record("q", "a", "long " * 60, "b", "c", "d"), record("q", "a")])
    loader = build_loader(make_run(path, seq_length=40, micro_batch_size=1, global_batch_size=2, num_workers=workers), FAMILY, 0, 1)
    take(loader, 1)
    assert loader.turns_dropped == 2
    assert caplog.text.count("samples [0]: turns beyond the cutoff are left out") == 1


def test_check_finds_faults_before_the_run(make_run: MakeRun, mixed_dataset: str, tmp_path: Path, record: Any, write_json: Any) -> None:
    check_data(make_run(mixed_dataset, basic={"val_dataset": mixed_dataset}, global_batch_size=11))
    with pytest.raises(DataError, match="has 11 samples, too few for one global batch of 12"):
        check_data(make_run(mixed_dataset, global_batch_size=12))
    with pytest.raises(DataError, match="too few for one global batch of 16"):
        check_data(make_run(mixed_dataset, micro_batch_size=2), data_parallel_size=8)
    bad = write_json([record("<image>", "a", images=["gone.png"])], "bad.json")
    with pytest.raises(DataError, match=r"gone\.png: no such image file, in .*bad\.json, record 0"):
        check_data(make_run(mixed_dataset, basic={"val_dataset": bad}))
    (tmp_path / "empty.png").write_bytes(b"")
    run = make_run(write_json([record("<image>", "a", images=["empty.png"])], "bad.json"))
    with pytest.raises(DataError, match=r"empty\.png: cannot open this image"):
        check_data(run)
    check_data(run, read_headers=False)


def test_nothing_heavy_is_imported_for_the_check() -> None:
    code = "import sys, tangram.data.check; print(*(m for m in ('torch', 'transformers', 'megatron', 'numpy') if m in sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=250)
    assert out.stdout.strip() == ""


def test_no_worker_outlives_the_loader(make_run: MakeRun, mixed_dataset: str) -> None:
    iterator = iter(build_loader(make_run(mixed_dataset, micro_batch_size=1, num_workers=2), FAMILY, 0, 1))
    next(iterator)
    assert len(multiprocessing.active_children()) == 2
    iterator.close()  # type: ignore[attr-defined]
    assert multiprocessing.active_children() == []
