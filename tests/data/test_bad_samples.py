"""Samples that cannot be used: the run ends, or their places stay empty, counted and listed."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tangram.config.run import RunConfig
from tangram.data.bad_samples import BadSampleReport, Skip
from tangram.data.build import build_loader
from tangram.data.check import check_data
from tangram.errors import ConfigError, DataError
from tangram.families.base import get_family
from tests.data.test_loader import same, sample_ids, take

FAMILY = get_family("qwen2_5_vl")
MakeRun = Callable[..., RunConfig]


@pytest.fixture
def three(record: Any, write_json: Any, tmp_path: Path, photo: Callable[[str], str]) -> str:
    """hiyouga/LlamaFactory 5329: an image with its mark, an image without, a mark without."""
    (tmp_path / "rocket.jpg").symlink_to(photo("rocket.jpg"))
    rows = [
        record("<image>?", "a", images=["rocket.jpg"]),
        record("no mark", "b", images=["rocket.jpg"]),
        record("<image>, but no image", "c"),
    ]
    return write_json(rows)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_three_records_of_which_one_is_kept(make_run: MakeRun, three: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(DataError, match="record 1: 0 <image> placeholders but 1 images; each image needs one placeholder"):
        check_data(make_run(three))
    run = make_run(three, basic={"bad_samples": "skip"}, micro_batch_size=1, global_batch_size=3, save=str(tmp_path / "ckpt"))
    assert check_data(run) == f"{three}; 2 of 3 samples of train cannot be used and will be skipped"
    loader = build_loader(run, FAMILY, 0, 1)
    first, second = take(loader, 2)
    assert [batch["sample_ids"] for batch in first] == [[0], [-1], [-1]]
    assert [batch.get("skipped_samples") for batch in first] == [None, [1], [2]]
    for batch in first[1:]:
        assert batch["attention_mask"].sum() == 1 and (batch["labels"] == -100).all() and "image_grid_thw" not in batch
    assert all(same(one, two) for one, two in zip(first, second, strict=True)) and loader.skipped == 4
    assert lines(tmp_path / "ckpt" / "bad_samples.jsonl") == [
        {"sample": 1, "where": "sample 1", "reason": f"{three}, record 1: 0 <image> placeholders but 1 images; each image needs one placeholder"},
        {"sample": 2, "where": "sample 2", "reason": f"{three}, record 2: 1 <image> placeholders but 0 images; each image needs one placeholder"},
    ]
    assert caplog.text.count("sample 1 is skipped: ") == 1 == caplog.text.count("sample 2 is skipped: ")


@pytest.fixture
def one_broken(mixed_dataset: str, tmp_path: Path) -> str:
    """Sample 2's picture is cut off behind its header."""
    broken = tmp_path / "coffee.png"
    data = broken.read_bytes()
    broken.unlink()
    broken.write_bytes(data[: len(data) // 2])
    return mixed_dataset


@pytest.mark.parametrize("workers", [0, 2])
def test_no_other_sample_moves(make_run: MakeRun, one_broken: str, workers: int) -> None:
    settings: dict[str, Any] = {"micro_batch_size": 2, "global_batch_size": 4, "num_workers": workers}
    run = make_run(one_broken, basic={"bad_samples": "skip"}, **settings)
    assert sample_ids(take(build_loader(run, FAMILY, 0, 1), 2)) == [[[0, 1], [-1, 3]], [[4, 5], [6, 7]]]
    with pytest.raises(DataError, match=r"coffee.png.*record 2"):
        take(build_loader(make_run(one_broken, **settings), FAMILY, 0, 1), 2)


def test_ranks_without_vision_skip_the_same_samples(make_run: MakeRun, one_broken: str) -> None:
    """The picture's header is whole, so a rank that does not decode it would go on with its tokens."""
    run = make_run(one_broken, basic={"bad_samples": "skip"}, micro_batch_size=2, global_batch_size=8)
    full, light = (take(build_loader(run, FAMILY, 0, 1, needs_pixels=needs), 1)[0] for needs in (True, False))
    for one, two in zip(full, light, strict=True):
        assert "pixel_values" not in two and same({key: value for key, value in one.items() if key != "pixel_values"}, two)
    assert full[1]["skipped_samples"] == light[1]["skipped_samples"] == [2]
    assert torch.is_tensor(full[1]["pixel_values"])


def test_nothing_left_is_an_error(make_run: MakeRun, record: Any, write_json: Any) -> None:
    rows = [record("<image>", "a", images=["gone.png"]), record("<image>", "b")]
    run = make_run(write_json(rows), basic={"bad_samples": "skip"})
    with pytest.raises(DataError, match=r"gone.png: no such image file, in .*record 0 \(the first of 2 of 2 samples that cannot be used\)"):
        check_data(run)


def test_a_report_that_would_stay_empty_is_refused(make_run: MakeRun, mixed_dataset: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="bad_samples_report .* stays empty as long as bad_samples is fail"):
        check_data(make_run(mixed_dataset, basic={"bad_samples_report": str(tmp_path / "bad")}))
    run = make_run(mixed_dataset, basic={"bad_samples_report": str(tmp_path), "bad_samples": "skip"})
    with pytest.raises(ConfigError, match="bad_samples_report .*: a folder; give the path of a file"):
        build_loader(run, FAMILY, 0, 1)


def test_a_sample_is_listed_once_over_ranks_epochs_and_resumed_runs(tmp_path: Path) -> None:
    path = tmp_path / "new" / "bad.jsonl"
    skips = [Skip(number, "here", f"“{number}”") for number in (3, 5)]
    one, two = BadSampleReport(path), BadSampleReport(path)
    assert one.add(skips[0]) and not one.add(skips[0]) and not two.add(skips[0]) and two.add(skips[1])
    with path.open("a") as file:
        file.write('{"sample": 9, "whe')  # killed while it wrote
    resumed = BadSampleReport(path)
    assert not resumed.add(skips[1]) and resumed.add(Skip(9, "x", "y"))
    assert [line["sample"] for line in lines(path)] == [3, 5, 9]
    fresh = BadSampleReport(path)
    fresh.start_anew()
    assert fresh.add(skips[0]) and len(lines(path)) == 1


def add_many(path: Path) -> None:
    report = BadSampleReport(path)
    for number in range(40):
        report.add(Skip(number, "where", "why " * 200))


def test_ranks_that_write_at_once_do_not_mix_lines(tmp_path: Path) -> None:
    processes = [multiprocessing.get_context("fork").Process(target=add_many, args=(tmp_path / "bad",)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert sorted(line["sample"] for line in lines(tmp_path / "bad")) == list(range(40))
