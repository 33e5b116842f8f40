"""Datasets of plug-ins: micro-batches, order, errors; what needs no ranks is tested in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tangram.config.preflight import check_run
from tangram.config.run import RunConfig
from tangram.config.yaml_config import read_run
from tangram.data.own import OwnSource, own_fingerprint, own_loader
from tangram.data.own_batch import check_batch, collate
from tangram.errors import ConfigError, DataError
from tangram.families.registry import data_register
from tests.fsdp2.own import WORDS_PLUGIN, llama, write
from tests.ranks import on_ranks

CASES = Path(__file__).with_name("cases_own.py")
LINES = ["one", "three", "five one", "seven", "nine is", "eleven", "twelve", "a"]


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("words")
    (folder / "words.txt").write_text("\n".join(LINES), encoding="utf-8")
    plugin = WORDS_PLUGIN.replace('"words"', '"other_words"')
    return write(folder, llama(), plugin, {"data": {"dataset_param": {"dataset_type": "other_words", "own": {"start": 1}}}})


def rows_of(run: RunConfig, ranks: int, consumed: int = 0, steps: int = 2) -> list[set[tuple[int, tuple[int, ...]]]]:
    """Sample ids and tokens of each global batch."""
    loaders = [iter(own_loader(run, rank, ranks, consumed)) for rank in range(ranks)]
    found: list[set[tuple[int, tuple[int, ...]]]] = []
    for _ in range(steps):
        found.append(set())
        for loader in loaders:
            for batch in next(loader):
                real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
                rows = zip(batch["sample_ids"], batch["input_ids"], real, strict=True)
                found[-1] |= {(sample, tuple(ids[mask].tolist())) for sample, ids, mask in rows}
    return found


def test_a_global_batch_is_the_same_on_any_number_of_ranks_and_after_resuming(run_file: Path) -> None:
    accumulated = read_run(run_file, ["training.gradient_accumulation_steps=2"])
    alone, two = rows_of(accumulated, 1), rows_of(read_run(run_file), 2)
    assert alone == two
    assert all(len(batch) == 4 for batch in alone) and alone[0] | alone[1] == {
        (number, (1, *(ord(letter) % 64 for letter in line))) for number, line in enumerate(LINES)
    }
    assert rows_of(read_run(run_file), 2, consumed=4, steps=1) == alone[1:]
    workers = read_run(run_file, ["data.dataloader_param.num_workers=2"])
    assert rows_of(workers, 2) == two


def test_samples_are_padded_stacked_and_joined() -> None:
    long = {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "pixels": torch.ones(2, 3), "kinds": [1, 1, 2]}
    short = {"input_ids": [8], "labels": [8], "pixels": torch.zeros(1, 3), "kinds": [1]}
    batch = collate([long, short], pad_to_multiple_of=2)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 0], [8, 0, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 6, 7, -100], [8, -100, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    assert batch["kinds"].tolist() == [[1, 1, 2, 0], [1, 0, 0, 0]]
    assert batch["pixels"].tolist() == [[1.0] * 3] * 2 + [[0.0] * 3]
    assert "attention_mask" not in collate([short, short])
    with pytest.raises(DataError, match=r"kinds has the shapes \[3\], nothing for \[3, 1\] labels"):
        collate([long, {key: value for key, value in short.items() if key != "kinds"}])


def source(get: Callable[[int], Any], collate_fn: Any = None) -> OwnSource:
    class Data:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, number: int) -> Any:
            return get(number)

    if collate_fn is not None:
        Data.collate_fn = staticmethod(collate_fn)  # type: ignore[attr-defined]
    return OwnSource(Data(), "mine")


def test_faults_name_the_sample_and_the_line() -> None:
    def fails(_: int) -> Any:
        return {}["no"]  # type: ignore[typeddict-item]

    rows = [((0, 2),)]
    with pytest.raises(DataError, match=r"^sample 2 of mine: KeyError: 'no' \(test_own_data.py, line \d+\)$"):
        source(fails).read(rows)
    with pytest.raises(DataError, match="sample 2 of mine: SystemExit: 3"):
        source(lambda _: exec("raise SystemExit(3)")).read(rows)
    with pytest.raises(DataError, match="sample 2 of mine: it is list; a sample maps names"):
        source(lambda _: [1, 2]).read(rows)
    with pytest.raises(DataError, match=r"a mapping without labels \(input_ids\)"):
        source(lambda _: {"input_ids": [1]}).read(rows)
    with pytest.raises(DataError, match=r"samples \[2\] of mine: a micro-batch needs labels, a tensor \[rows, tokens\], and these gave \[1\]"):
        source(lambda _: {"labels": [1]}, lambda samples: {"labels": torch.tensor(samples[0]["labels"])}).read(rows)


IDS = torch.tensor([[1, 2], [3, 4]])


@pytest.mark.parametrize(
    ("sample", "batch", "said"),
    [
        ({"labels": [1.0, 2.0]}, None, "labels are float32, not whole numbers"),
        ({"input_ids": [1, 64]}, None, r"input_ids reach from 1 to 64, which are no tokens of the model's 64; -100 marks"),
        ({"labels": [-5, 2]}, None, "labels reach from -5 to 2, which are no tokens"),
        ({"input_ids": [1, 2, 3]}, None, r"input_ids has the shape \[3\], and labels \[1, 2\]; give one value for each token"),
        ({"attention_mask": [1]}, None, r"attention_mask has the shape \[1\], and labels \[1, 2\]"),
        ({"labels": []}, None, r"labels are \[0\]; a sample needs one for each of its tokens"),
        ({"labels": 3}, None, r"labels are \[\]; a sample needs one"),
        ({"labels": None}, None, "labels are nothing; a sample needs one"),
        ({"question": "why"}, None, "question is a str, which makes no tensor"),
        ({"labels": [1, 2, 3, 4, 5], "input_ids": [1, 2, 3, 4, 5]}, None, "sample 2 of mine: 5 tokens, but training.seq_length allows 4; cut"),
        ({}, {"input_ids": IDS, "labels": IDS, "pixel_values": [IDS]}, "pixel_values is a list, and a model is given tensors alone"),
        ({}, {"input_ids": IDS.numpy(), "labels": IDS}, r"input_ids is \[2, 2\], and a model is given tensors alone"),
        ({}, {"labels": IDS, 0: IDS}, "0 is no name"),
        ({}, [IDS], "collate_fn gave a list; a micro-batch maps names to tensors"),
    ],
)
def test_what_no_model_can_take_is_told_before_it_does(sample: dict[str, Any], batch: Any, said: str) -> None:
    data = source(lambda _: {"input_ids": [1, 2], "labels": [1, 2], **sample}, None if batch is None else lambda _: batch).dataset
    with pytest.raises(DataError, match=said):
        OwnSource(data, "mine", vocabulary=64, longest=4).read([((0, 2),)])


def test_whole_numbers_of_any_type_are_taken() -> None:
    made = check_batch({"input_ids": IDS.int(), "labels": IDS.to(torch.uint8), "attention_mask": torch.ones(2, 1, 2, 2), "pixel_values": None}, 5)
    assert (made["input_ids"].dtype, made["labels"].dtype) == (torch.int64, torch.int64) and "pixel_values" not in made


def test_a_dataset_that_does_not_know_its_length_is_told(run_file: Path) -> None:
    class Endless:
        def __len__(self) -> int:
            raise NotImplementedError("it never ends")

        def __getitem__(self, number: int) -> Any:
            return {}

    data_register.register("endless", lambda *_: Endless())
    run = read_run(run_file, ["data.dataset_param.dataset_type=endless"])
    with pytest.raises(DataError, match=r"dataset_type 'endless': len\(\) of its Endless failed: NotImplementedError: it never ends \(test_own"):
        own_fingerprint(run)


def test_ranks_that_see_other_numbers_of_samples_are_told() -> None:
    told = "samples of the train data: 8 on rank 0, 9 on rank 1; give every node the same files"
    assert on_ranks(2, CASES, "said_of", [8, 9]) == [told, told]


def test_a_place_without_a_sample_is_learnt_nothing_from() -> None:
    reading = source(lambda number: {"input_ids": [number + 1, 4], "labels": [number + 1, 4]}).read([((0, 1),), ((0, -1),)])
    assert reading.batch["labels"].tolist() == [[2, 4], [-100, -100]]
    assert reading.batch["sample_ids"] == [1, -1]


def test_what_a_plug_ins_data_cannot_do_is_refused_before_the_run(run_file: Path) -> None:
    def error(*overrides: str) -> str:
        with pytest.raises((ConfigError, DataError)) as caught:
            check_run(read_run(run_file, overrides), 1).raise_errors()
        return str(caught.value)

    check_run(read_run(run_file), 1).raise_errors()
    assert "'other_word' is not registered (did you mean 'other_words'?)" in error("data.dataset_param.dataset_type=other_word")
    assert "bad_samples skip" in error("data.dataset_param.basic_parameters.bad_samples=skip")
    assert "token_budget" in error("data.dataloader_param.token_budget=64")
    assert "of no registered family" in error("data.dataset_param.dataset_type=huggingface", "data.dataset_param.own={}")
    assert "own {'start': 1} is for the dataset of a plug-in" in error("data.dataset_param.dataset_type=huggingface")


def test_other_data_are_other_data(run_file: Path) -> None:
    """A run is not continued with data that differ in number or in what the plug-in is told."""
    first = own_fingerprint(read_run(run_file))
    assert "8 samples of other_words" in first
    assert own_fingerprint(read_run(run_file, ["data.dataset_param.own.start=2"])) != first
