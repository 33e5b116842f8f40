"""What ``dataset`` may name: paths, folders, and datasets registered in dataset_info.json."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tangram.config.data import BasicParameters, DatasetAttr
from tangram.config.parsing import parse_section
from tangram.data.dataset import ConversationDataset
from tangram.data.files import find_sources
from tangram.errors import ConfigError, DataError

Record = Callable[..., dict[str, Any]]


def basic(folder: Path, **keys: Any) -> BasicParameters:
    return parse_section(BasicParameters, {"dataset_dir": str(folder), **keys}, "data.json", base=folder)


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., list[str]]:
    """``read(dataset)``: the questions of what data.json in the temporary folder names so."""

    def questions(dataset: Any, attr: DatasetAttr | None = None, **keys: Any) -> list[str]:
        data = ConversationDataset.from_config(basic(tmp_path, dataset=dataset, **keys), attr or DatasetAttr(), "train", 3)
        return [sample.messages[0].content for sample in data]

    return questions


Read = Callable[..., list[str]]


@pytest.fixture
def folder(tmp_path: Path, record: Record) -> Path:
    """Samples in files of every kind, with ASCII and other names, beside files that are none."""
    inside = tmp_path / "samples é 杭"
    inside.mkdir()
    (inside / "b.jsonl").write_text(json.dumps(record("b0", "a")) + "\n" + json.dumps(record("b1", "a")))
    (inside / "a.json").write_text(json.dumps([record("a0", "a")]))
    pq.write_table(pa.table({"messages": [record("c0", "a")["messages"]]}), inside / "c.parquet")
    (inside / "README.md").write_text("no samples")
    (inside / "sub.json").mkdir()
    return inside


def test_files_are_read_in_the_order_given_and_folders_in_that_of_names(read: Read, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "tangram"):
        assert read(folder.name) == ["a0", "b0", "b1", "c0"]
    assert f"{folder}: not read, for it is no dataset file: README.md, sub.json" in caplog.messages
    assert read(f"{folder}/c.parquet, {folder.name}/b.jsonl") == ["c0", "b0", "b1"]
    assert read([f"{folder}/b.jsonl", folder.name]) == ["b0", "b1", "a0", "b0", "b1", "c0"]


def test_a_list_of_paths_may_hold_no_commas(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.json: dataset: 'a,b.json' in a list of paths holds a comma; rename the file"):
        basic(tmp_path, dataset=["c.json", "a,b.json"])


def test_files_of_a_folder_may_be_written_each_in_its_own_way(read: Read, folder: Path) -> None:
    talk = [{"from": "human", "value": "z0"}, {"from": "gpt", "value": "a"}]
    (folder / "z.json").write_text(json.dumps([{"image": None, "conversations": talk}]))
    assert read(folder.name) == ["a0", "b0", "b1", "c0", "z0"]


@pytest.mark.parametrize(("names", "found"), [((), "it is empty"), (("x.txt", "y.csv"), "it holds x.txt, y.csv")])
def test_a_folder_without_samples_is_an_error(read: Read, tmp_path: Path, names: tuple[str, ...], found: str) -> None:
    inside = tmp_path / "none"
    inside.mkdir()
    for name in names:
        (inside / name).write_text("")
    with pytest.raises(DataError, match=rf"none: a folder without dataset files \(\.json, \.jsonl, \.parquet\); {found}"):
        read("none")


@pytest.mark.parametrize("name", ["no/such.json", "such.jsonl", "/no/such", "such"])
def test_what_is_not_there_is_named(read: Read, name: str) -> None:
    with pytest.raises(DataError, match=f"{name}: no such dataset file.*; check basic_parameters.dataset"):
        read(name)


@pytest.mark.parametrize("names", ["", " , "])
def test_no_name_at_all(names: str) -> None:
    with pytest.raises(DataError, match="basic_parameters.dataset names no file"):
        find_sources(names, ".", DatasetAttr())


@pytest.mark.parametrize("names", ["", " , ", []])
def test_no_name_in_data_json_is_not_its_folder(tmp_path: Path, record: Record, names: Any) -> None:
    (tmp_path / "other.json").write_text(json.dumps([record("a", "b")]))
    with pytest.raises(DataError, match="basic_parameters.dataset names no file"):
        find_sources(basic(tmp_path, dataset=names).dataset, ".", DatasetAttr())


# dataset_info.json


def register(folder: Path, **entries: Any) -> None:
    (folder / "dataset_info.json").write_text(json.dumps(entries), encoding="utf-8")


def test_registered_datasets_bring_their_own_columns_and_tags(read: Read, tmp_path: Path, folder: Path) -> None:
    """The entry is that of LLaMA-Factory's demo of images; one without formatting is alpaca, as there."""
    register(
        tmp_path,
        demo={
            "file_name": "demo.json",
            "formatting": "sharegpt",
            "columns": {"messages": "talk", "images": "pics"},
            "tags": {"role_tag": "who", "content_tag": "what", "user_tag": "asks", "assistant_tag": "says"},
        },
        plain={"file_name": "plain.json", "columns": {"prompt": "ask"}},
        all={"file_name": folder.name, "formatting": "sharegpt", "split": "train", "ranking": False, "hf_hub_url": None},
    )
    talk = [{"who": "asks", "what": "<image>d0"}, {"who": "says", "what": "a"}]
    (tmp_path / "demo.json").write_text(json.dumps([{"talk": talk, "pics": ["x.png"]}]))
    (tmp_path / "plain.json").write_text(json.dumps([{"ask": "p0", "output": "a"}]))
    assert read("plain,demo", DatasetAttr(messages="another")) == ["p0", "<image>d0"], "attr is for paths alone"
    assert read(["all", f"{folder}/c.parquet"]) == ["a0", "b0", "b1", "c0", "c0"]


def test_a_path_that_exists_wins_over_a_registered_name(read: Read, tmp_path: Path, record: Record) -> None:
    (tmp_path / "demo").write_text(json.dumps([record("path", "a")]))
    (tmp_path / "other.json").write_text(json.dumps([record("registered", "a")]))
    register(tmp_path, demo={"file_name": "other.json", "formatting": "sharegpt"})
    assert read("demo") == ["path"]
    (tmp_path / "demo").unlink()
    assert read("demo") == ["registered"]


def test_num_samples_draws_from_its_dataset_alone(read: Read, tmp_path: Path, record: Record) -> None:
    for name in "xy":
        (tmp_path / f"{name}.json").write_text(json.dumps([record(f"{name}{i}", "a") for i in range(50)]))
    register(tmp_path, some={"file_name": "x.json", "formatting": "sharegpt", "num_samples": 5})
    asked = read("some,y.json")
    assert asked[5:] == [f"y{i}" for i in range(50)]
    drawn = [int(text[1:]) for text in asked[:5]]
    assert all(text[0] == "x" for text in asked[:5]) and drawn == sorted(set(drawn)) and drawn != list(range(5))
    assert read("some,y.json") == asked
    register(tmp_path, some={"file_name": "x.json", "formatting": "sharegpt", "num_samples": 51})
    with pytest.raises(DataError, match="some: num_samples is 51 but the dataset has 50 samples; lower num_samples or remove it"):
        read("some")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"hf_hub_url": "a/b"}, "hf_hub_url 'a/b' would have to be fetched; download it, and give the file as file_name"),
        ({"script_url": "a.py", "file_name": "x.json"}, "script_url 'a.py' would have to be fetched"),
        ({"cloud_file_name": "s3://a"}, "cloud_file_name 's3://a' would have to be fetched"),
        ({"file_name": "x.json", "ranking": True}, "ranking is true, but pairs of chosen and rejected answers cannot be trained on"),
        ({"file_name": "x.json", "subset": "a"}, "key 'subset' is not supported; remove it"),
        ({"file_name": "x.json", "split": "test"}, "key 'split' is not supported"),
        ({"file_name": "x.json", "colums": {}}, "key 'colums' is not supported (did you mean 'columns'?)"),
        ({}, "file_name must be the path of a file or folder"),
        ({"file_name": "x.json", "num_samples": 0}, "num_samples must be a whole number above 0, got 0"),
        ({"file_name": "x.json", "num_samples": True}, "num_samples must be a whole number above 0, got True"),
        ({"file_name": "gone.json"}, "gone.json: no such dataset file, named by"),
        ({"file_name": "x.json", "formatting": "csv"}, "formatting: Input should be 'sharegpt', 'openai' or 'alpaca', got 'csv'"),
        ({"file_name": "x.json", "columns": {"chosen": "good"}}, "columns.chosen is not supported; remove it"),
        ({"file_name": "x.json", "tags": {"role": "who"}}, "tags.role is not supported (did you mean 'role_tag'?)"),
        ({"file_name": "x.json", "tags": ["who"]}, "tags must be a mapping of keys to names, got list"),
        ({"file_name": "x.json", "columns": {"images": 3}}, "images: Input should be a valid string, got 3"),
        ("x.json", "expected a mapping of keys to values, got str"),
    ],
)
def test_entries_that_cannot_be_used(read: Read, tmp_path: Path, entry: Any, message: str) -> None:
    (tmp_path / "x.json").write_text("[]")
    register(tmp_path, demo=entry)
    with pytest.raises(DataError) as error:
        read("demo")
    assert message in str(error.value) and f"{tmp_path}/dataset_info.json, 'demo'" in str(error.value)


def test_unknown_names_list_the_known_ones(read: Read, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="demo: no such dataset file, and .* holds no dataset_info.json with registered names"):
        read("demo")
    register(tmp_path, demos={"file_name": "x.json"}, other={"file_name": "y.json"})
    message = r"demo: no such dataset file, and no name in .*dataset_info.json \(did you mean 'demos'\?\); it knows demos, other"
    with pytest.raises(DataError, match=message):
        read("demo")
    (tmp_path / "dataset_info.json").write_text("[1]")
    with pytest.raises(DataError, match=r"dataset_info.json: expected a mapping of keys to values, got list"):
        read("demo")
