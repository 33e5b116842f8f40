"""Datasets of one or several files: ids, faults, the part set aside for evaluation, and streaming."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import count, takewhile
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tangram.config.data import BasicParameters, DatasetAttr
from tangram.config.parsing import parse_section
from tangram.data.conversation import Conversation, Message
from tangram.data.dataset import ConversationDataset
from tangram.data.images import ImageProcessor
from tangram.data.media import Media
from tangram.errors import ConfigError, DataError

Record = Callable[..., dict[str, Any]]
Write = Callable[..., str]


def dataset(path: str, media: Path | str = ".", **kwargs: Any) -> ConversationDataset:
    return ConversationDataset.of_files([path], DatasetAttr(), str(media), **kwargs)


def picture(path: Path) -> str:
    Image.new("RGB", (40, 30)).save(path)
    return path.name


def test_samples_are_read_in_order_and_at_random(record: Record, write_json: Write, tmp_path: Path) -> None:
    path = write_json([record(f"q{i}", f"a{i}") for i in range(5)])
    data = dataset(path)
    assert len(data) == 5
    assert data[3].messages == (Message("user", "q3"), Message("assistant", "a3"))
    assert [sample.id for sample in data] == [0, 1, 2, 3, 4]
    assert data[4] == list(data)[4]


def test_the_same_samples_whatever_the_editor_wrote(record: Record, tmp_path: Path) -> None:
    lines = [json.dumps(record("one\u2028line", "réponse 杭州"), ensure_ascii=False), json.dumps(record("q", "a"))]
    assert "\u2028" in lines[0]
    array = "[" + ",".join(lines) + "]"
    variants = {
        "lf.jsonl": "\n".join(lines) + "\n",
        "crlf.jsonl": "\r\n".join(lines) + "\r\n",
        "bom.jsonl": "\ufeff" + "\n".join(lines) + "\n",
        "no_final_newline.jsonl": "\n".join(lines),
        "blank_lines.jsonl": "\n" + "\n\n".join(lines) + "\n\n",
        "array.json": array,
        "array_bom_crlf.json": "\ufeff" + json.dumps(json.loads(array), ensure_ascii=False, indent=2).replace("\n", "\r\n"),
    }
    for name, text in variants.items():
        (tmp_path / name).write_bytes(text.encode("utf-8"))
        samples = [(s.system, s.messages, s.images) for s in dataset(str(tmp_path / name))]
        assert len(samples) == 2, name
        assert samples[0][1] == (Message("user", "one\u2028line"), Message("assistant", "réponse 杭州")), name
        assert samples[1][1] == (Message("user", "q"), Message("assistant", "a")), name


@pytest.mark.parametrize("text", ["[]", "", " \n", "\ufeff[ ]"])
def test_an_empty_dataset_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "empty.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=r"empty\.json: the dataset is empty: 0 samples"):
        dataset(str(path))


def test_a_missing_dataset_file_is_named() -> None:
    with pytest.raises(DataError, match="/no/such.json: no such dataset file"):
        dataset("/no/such.json")


def test_missing_images_are_named_and_counted_without_decoding(record: Record, write_json: Write, tmp_path: Path) -> None:
    (tmp_path / "there.png").write_bytes(b"not looked into")
    records = [record("<image> q", "a", images=[name]) for name in ("there.png", "gone.png", "lost.png", "gone.png")]
    with pytest.raises(DataError, match=r"gone\.png: no such image file, in .*data\.json, record 1; 2 of 3 media files are missing"):
        dataset(write_json(records), tmp_path).check()


def test_max_samples_takes_the_first_and_refuses_more_than_there_are(record: Record, write_json: Write) -> None:
    path = write_json([record(f"q{i}", "a") for i in range(4)])
    assert [s.messages[0].content for s in dataset(path, max_samples=3)] == ["q0", "q1", "q2"]
    with pytest.raises(IndexError):
        dataset(path, max_samples=3)[3]
    with pytest.raises(DataError, match="max_samples is 5 but the dataset has 4 samples"):
        dataset(path, max_samples=5)


def test_several_files_follow_one_another(record: Record, write_json: Write) -> None:
    paths = [write_json([record(f"{name}{i}", "a") for i in range(n)], f"{name}.json") for name, n in (("x", 2), ("y", 0), ("z", 3))]
    data = ConversationDataset.of_files(paths, DatasetAttr())
    assert [data[i].messages[0].content for i in range(5)] == ["x0", "x1", "z0", "z1", "z2"]
    assert data[4].where.endswith("z.json, record 2")


def test_samples_under_a_key_of_one_object_are_told_so(record: Record, tmp_path: Path) -> None:
    path = tmp_path / "wrapped.json"
    path.write_text(json.dumps({"data": [record(), record()]}))
    with pytest.raises(DataError, match=r"wrapped\.json, record 0: no list of messages .*; save the list under 'data' alone"):
        dataset(str(path))


def test_check_and_faults_agree_on_media_files(record: Record, write_json: Write, tmp_path: Path) -> None:
    """Frames of videos are media files too; headers are read where a processor is given."""
    (tmp_path / "no_image.png").write_bytes(b"text")
    good = picture(tmp_path / "good.png")
    records = [
        record("<image>q", "a", images=[good]),
        record("<video>q", "a", videos=[[good, "gone.png"]]),
        record("<image>q", "a", images=["no_image.png"]),
        record("<image><image>q", "a", images=["lost.png", "gone.png"]),
        record("q"),
    ]
    data = dataset(write_json(records), tmp_path)
    headers = Media(ImageProcessor(14, 2, 2, 0, 84 * 84, (0.5,) * 3, (0.5,) * 3))
    assert [index for index, _ in data.faults()] == [1, 3, 4]
    assert [index for index, _ in data.faults(files=False)] == [4]
    faults = dict(data.faults(headers))
    assert sorted(faults) == [1, 2, 3, 4]
    assert "gone.png: no such video file, in" in str(faults[1]) and "no_image.png: cannot open this image" in str(faults[2])
    assert "lost.png: no such image file" in str(faults[3]) and "record 4: 1 messages" in str(faults[4])
    with pytest.raises(DataError, match="record 4: 1 messages"):
        data.check()
    write_json(records[:4])
    with pytest.raises(DataError, match=r"gone\.png: no such video file, in .*record 1; 2 of 4 media files are missing"):
        dataset(str(tmp_path / "data.json"), tmp_path).check()
    with pytest.raises(DataError, match="no_image.png: cannot open this image"):
        dataset(str(tmp_path / "data.json"), tmp_path).check(headers)


def test_media_that_the_model_does_not_take_are_found_before_the_run(record: Record, write_json: Write, tmp_path: Path) -> None:
    good = picture(tmp_path / "good.png")
    records = [record("<image>q", "a", images=[good]), record("q", "a"), record("<video>q", "a", videos=[[good]])]
    data = dataset(write_json(records), tmp_path)
    data.check()
    assert [index for index, _ in data.faults(kinds=["image"])] == [2]
    assert [index for index, _ in data.faults(kinds=[])] == [0, 2]
    with pytest.raises(DataError, match="record 2: holds 1 videos but this model takes no videos; remove the sample"):
        data.check(kinds=["image"])


# What data.json says


def configured(folder: Path, split: str = "train", seed: int = 0, **keys: Any) -> ConversationDataset:
    """What these keys of basic_parameters name, in a data.json that lies in ``folder``."""
    basic = parse_section(BasicParameters, {"dataset_dir": str(folder), **keys}, "data.json", base=folder)
    return ConversationDataset.from_config(basic, DatasetAttr(), split, seed)


def questions(data: ConversationDataset) -> list[str]:
    return [sample.messages[0].content for sample in data]


@pytest.fixture
def numbered(record: Record, write_json: Write) -> Callable[[str, int], str]:
    """Write a file of so many samples that ask their number after the file's first letter, and return its name."""

    def write(name: str, number: int) -> str:
        write_json([record(f"{name[0]}{i}", "a") for i in range(number)], name)
        return name

    return write


Numbered = Callable[[str, int], str]


@pytest.mark.parametrize("number", [11, 2, 10, 100])
def test_val_rate_parts_the_dataset_in_two(numbered: Numbered, tmp_path: Path, number: int) -> None:
    """0.1 of 11 rounds up to 2, of 10 is 1, of 2 is 1."""
    keys = {"dataset": numbered("x.json", number), "val_rate": 0.1}
    train, valid = (configured(tmp_path, split, 7, **keys) for split in ("train", "valid"))
    assert len(valid) == {11: 2, 2: 1, 10: 1, 100: 10}[number]
    assert sorted([*questions(train), *questions(valid)]) == sorted(f"x{i}" for i in range(number))
    assert [sample.id for sample in valid] == list(range(len(valid)))
    assert valid[0].where.endswith(f"x.json, record {questions(valid)[0][1:]}")
    again, other = (questions(configured(tmp_path, "valid", seed, **keys)) for seed in (7, 8))
    assert again == questions(valid) and (other != again or number < 11)


def test_what_is_set_aside_does_not_depend_on_max_samples(numbered: Numbered, tmp_path: Path) -> None:
    keys = {"dataset": numbered("x.json", 30), "val_rate": 0.2}

    def read(split: str, **more: Any) -> list[str]:
        return questions(configured(tmp_path, split, 3, **keys, **more))

    assert read("valid", max_samples=5) == read("valid") and len(read("valid")) == 6
    assert read("train", max_samples=5) == read("train")[:5]
    assert read("valid", val_max_samples=2) == read("valid")[:2]
    with pytest.raises(DataError, match="max_samples is 25 but the dataset has 24 samples"):
        read("train", max_samples=25)


@pytest.mark.parametrize(("number", "rate"), [(1, 0.1), (11, 0.95)])
def test_val_rate_must_leave_something_to_train_on(numbered: Numbered, tmp_path: Path, number: int, rate: float) -> None:
    with pytest.raises(DataError, match=rf"val_rate {rate} of {number} samples sets {number} aside and leaves 0 to train on"):
        configured(tmp_path, dataset=numbered("x.json", number), val_rate=rate)


@pytest.mark.parametrize("strategy", ["interleave_under", "interleave_over"])
def test_nothing_that_is_set_aside_is_trained_on_however_datasets_are_mixed(numbered: Numbered, tmp_path: Path, strategy: str) -> None:
    names = f"{numbered('x.json', 20)},{numbered('y.json', 40)}"
    keys = {"dataset": names, "val_rate": 0.2, "mix_strategy": strategy}
    train, valid = (questions(configured(tmp_path, split, 1, **keys)) for split in ("train", "valid"))
    assert len(valid) == len(set(valid)) == 12 and not set(train) & set(valid)
    every = {f"x{i}" for i in range(20)} | {f"y{i}" for i in range(40)}
    assert (set(train) | set(valid) == every) == (strategy == "interleave_over")


def test_interleaved_samples_keep_their_file_and_get_ids_of_their_own(numbered: Numbered, tmp_path: Path) -> None:
    names = f"{numbered('x.json', 3)},{numbered('y.json', 300)}"
    data = configured(tmp_path, dataset=names, mix_strategy="interleave_over", interleave_probs="0.5,0.5", max_samples=500)
    assert len(data) == 500
    assert [sample.id for sample in data] == list(range(500)) == [data[i].id for i in range(500)]
    asked = questions(data)
    assert [text for text in asked if text[0] == "x"][:7] == ["x0", "x1", "x2", "x0", "x1", "x2", "x0"]
    assert asked[:100].count("x0") + asked[:100].count("x1") + asked[:100].count("x2") == 50
    place = asked.index("y4")
    assert data[place].where.endswith("y.json, record 4")


def test_a_worker_process_reads_what_this_one_reads(numbered: Numbered, tmp_path: Path, record: Record) -> None:
    """Also one that was started afresh, and gets the dataset by pickle after some of it has been read."""
    pq.write_table(pa.table({"messages": [record(f"p{i}", "a")["messages"] for i in range(7)]}), tmp_path / "p.parquet", row_group_size=2)
    names = ["p.parquet", numbered("x.json", 9)]
    ways: list[dict[str, Any]] = [{"mix_strategy": "interleave_over"}, {"streaming": True}, {"val_rate": 0.3}]
    datasets = [configured(tmp_path, dataset=names, **keys) for keys in ways]
    assert [data[4].id for data in datasets] == [4, 4, 4]
    with ProcessPoolExecutor(1, get_context("spawn")) as fresh, ProcessPoolExecutor(1, get_context("fork")) as forked:
        answers = [list(pool.map(read_all, datasets)) for pool in (fresh, forked)]
    assert answers[0] == answers[1] == [read_all(data) for data in datasets]
    assert [len(samples) for samples in answers[0]][1:] == [16, 11]


def read_all(data: ConversationDataset) -> list[Conversation]:
    return [data[index] for index in takewhile(data.has, count())]


def test_val_dataset_is_read_in_its_own_order(numbered: Numbered, tmp_path: Path) -> None:
    keys = {"dataset": numbered("x.json", 3), "val_dataset": f"{numbered('y.json', 2)},{numbered('z.json', 1)}", "streaming": True}
    data = configured(tmp_path, "valid", 0, **keys, val_max_samples=2)
    assert questions(data) == ["y0", "y1"] and len(data) == 2, "it is never streamed"
    with pytest.raises(DataError, match="basic_parameters.val_dataset names no file"):
        configured(tmp_path, "valid", 0, dataset="x.json")


# Streaming


def test_a_streamed_dataset_is_found_as_it_is_asked_for(numbered: Numbered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: Record) -> None:
    monkeypatch.setattr("tangram.data.records.WINDOW", 200)
    names = ",".join([numbered("x.json", 50), numbered("empty.json", 0), numbered("y.json", 3)])
    data = configured(tmp_path, dataset=names, streaming=True)
    whole = configured(tmp_path, dataset=names)
    assert data.known_length() is None
    with pytest.raises(TypeError, match="known at its end"):
        len(data)
    assert data[20] == whole[20] and data[3] == whole[3]
    assert data.has(49) and len(data.samples._files) == 1, "the next file is not opened yet"
    assert data.has(50) and data[50].where.endswith("y.json, record 0")
    assert data.has(52) and not data.has(53) and data.known_length() == len(data) == 53
    with pytest.raises(IndexError):
        data[53]
    assert list(data) == list(whole)
    resumed = configured(tmp_path, dataset=names, streaming=True)
    assert resumed[51] == whole[51], "a resumed run asks for a later sample first"


def test_streaming_opens_a_file_without_looking_through_it(tmp_path: Path, record: Record) -> None:
    """A file that is damaged behind its first windows opens, and the damage is named where the stream gets there."""
    line = json.dumps(record("q" * 1000, "a")) + "\n"
    path = tmp_path / "long.jsonl"
    path.write_text(line * 3000 + "damaged\n")
    data = configured(tmp_path, dataset="long.jsonl", streaming=True)
    data.check()
    assert data.has(2000) and data[2000].id == 2000
    with pytest.raises(DataError, match=r"long\.jsonl: line 3001: not a JSON dataset"):
        data.has(3000)


def test_max_samples_of_a_stream(numbered: Numbered, tmp_path: Path) -> None:
    def read(limit: int) -> ConversationDataset:
        return configured(tmp_path, dataset=numbered("x.json", 5), streaming=True, max_samples=limit)

    data = read(3)
    assert data.has(2) and not data.has(3) and questions(data) == ["x0", "x1", "x2"]
    for ask in (lambda: read(6).has(5), lambda: list(read(6)), lambda: list(read(6).faults()), lambda: read(6)[5]):
        with pytest.raises(DataError, match="max_samples is 6 but the dataset has 5 samples"):
            ask()


def test_a_stream_that_is_empty_is_told_so_at_the_start(numbered: Numbered, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the dataset is empty: 0 samples"):
        configured(tmp_path, dataset=f"{numbered('x.json', 0)},{numbered('y.json', 0)}", streaming=True)


def test_shares_of_datasets_that_are_not_there_are_refused(numbered: Numbered, tmp_path: Path) -> None:
    keys = {"dataset": numbered("x.json", 9), "mix_strategy": "interleave_over", "val_dataset": numbered("y.json", 4)}
    with pytest.raises(DataError, match="interleave_probs '0.7,0.3': 2 shares but dataset names 1 datasets"):
        configured(tmp_path, **keys, interleave_probs="0.7,0.3")
    assert len(configured(tmp_path, **keys, interleave_probs="1")) == 9
    assert len(configured(tmp_path, "valid", **keys, interleave_probs="0.7,0.3")) == 4, "evaluation is not mixed"


def test_parquet_files_tell_their_length_at_once(tmp_path: Path, record: Record) -> None:
    for name in ("a", "b"):
        table = pa.table({"messages": [record(f"{name}{i}", "a")["messages"] for i in range(4)]})
        pq.write_table(table, tmp_path / f"{name}.parquet")
    data = configured(tmp_path, dataset="a.parquet,b.parquet", streaming=True)
    assert data.known_length() == 8 and data[6].where.endswith("b.parquet, record 2")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"val_rate": 0.5}, "streaming and val_rate 0.5 exclude each other"),
        ({"mix_strategy": "interleave_over"}, "streaming and mix_strategy interleave_over exclude each other"),
        ({"dataset": "some"}, "streaming and num_samples of dataset 'some' exclude each other"),
    ],
)
def test_what_needs_all_samples_cannot_be_streamed(numbered: Numbered, tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    (tmp_path / "dataset_info.json").write_text(json.dumps({"some": {"file_name": "x.json", "formatting": "sharegpt", "num_samples": 2}}))
    with pytest.raises(ConfigError, match=message):
        configured(tmp_path, **{"dataset": numbered("x.json", 3), "streaming": True, **keys})
