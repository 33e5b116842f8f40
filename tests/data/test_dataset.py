from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tangram.config.data import DatasetAttr
from tangram.data.conversation import Message
from tangram.data.dataset import ConversationDataset
from tangram.errors import DataError

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


def test_records_longer_than_the_reading_window(record: Record, write_json: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tangram.data.records.WINDOW", 7)
    path = write_json([record("é" * i, "a" + "b" * i) for i in range(30)])
    assert [len(sample.messages[0].content) for sample in dataset(path)] == list(range(30))


def test_bytes_that_are_not_utf8_name_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b"\xe6")
    with pytest.raises(DataError, match=r"bad\.jsonl: line 1: .*not UTF-8 at byte 0"):
        dataset(str(path))
    path.write_bytes(b'{"messages": []}\n{"messages": "\xe6"}\n')
    with pytest.raises(DataError, match=r"bad\.jsonl: line 2: .*not UTF-8 at byte 31"):
        dataset(str(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"a": 1} {"a": 2}]', "line 1: not a JSON dataset: expected ',' or ']'"),
        ('[{"a": 1},\n]', "line 2: not a JSON dataset: a comma before"),
        ('[{"a": 1}] x', "text after the array"),
        ('[{"a": 1},\n {"a": ', "line 2: not a JSON dataset: Expecting value"),
        ('{\n "a": 1\n}', "runs over several lines"),
        ('[{"a": 1}, {"b" 2},\n\n\n\n\n\n{"c": 3}]', "line 1: not a JSON dataset: Expecting ':' delimiter"),
        ("[" * 100_000, "line 1: not a JSON dataset: maximum recursion depth exceeded"),
        ('[{"messages": ' + "9" * 5000 + "}]", "line 1: not a JSON dataset: Exceeds the limit"),
        ("hello", "line 1: not a JSON dataset: Expecting value; the file must be one array or one object a line"),
    ],
)
def test_damaged_files_name_the_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(DataError, match=message.replace("[", r"\[")):
        dataset(str(path))


def test_half_a_surrogate_pair_is_named(tmp_path: Path) -> None:
    turn = '{"role": "%s", "content": "%s"}'
    path = tmp_path / "half.json"
    for text, fine in ((r"\ud83d\ude00", True), (r"\ud83d", False)):
        path.write_text(f'[{{"messages": [{turn % ("user", text)}, {turn % ("assistant", "a")}]}}]')
        if fine:
            assert dataset(str(path))[0].messages[0].content == "\U0001f600"
        else:
            with pytest.raises(DataError, match=r"half\.json, record 0: holds half of a surrogate pair"):
                dataset(str(path))[0]


@pytest.mark.parametrize("text", ["[]", "", " \n", "\ufeff[ ]"])
def test_an_empty_dataset_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "empty.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=r"empty\.json: the dataset is empty: 0 samples"):
        dataset(str(path))


def test_a_missing_dataset_file_is_named() -> None:
    with pytest.raises(DataError, match="/no/such.json: no such dataset file"):
        dataset("/no/such.json")


def test_images_missing_null_and_empty_mean_text_only(record: Record, write_json: Write) -> None:
    path = write_json([record("q", "a"), record("q", "a", images=None), record("q", "a", images=[])])
    assert [(s.messages, s.images) for s in dataset(path)] == [((Message("user", "q"), Message("assistant", "a")), ())] * 3


def test_a_string_is_one_image(record: Record, write_json: Write, tmp_path: Path) -> None:
    name = picture(tmp_path / "ein Bild é 杭.png")
    path = write_json([record("<image>\nhi", "ok", images=name), record("<image>\nhi", "ok", images=[name])])
    data = dataset(path, tmp_path)
    assert data[0].images == data[1].images == (str(tmp_path / name),)
    data.check()


@pytest.mark.parametrize("value", [3, {"a": 1}, ["a.png", 3], [""], ""])
def test_images_of_another_kind_are_an_error(record: Record, write_json: Write, value: Any) -> None:
    with pytest.raises(DataError, match="data.json, record 0: 'images' must be a path or a list of paths, got"):
        dataset(write_json([record("<image>", "a", images=value)])).check()


def test_placeholders_and_images_must_agree(record: Record, write_json: Write, tmp_path: Path) -> None:
    name = picture(tmp_path / "a.png")
    good = record("<image> q", "a", images=[name])
    with pytest.raises(DataError, match="data.json, record 1: 0 <image> placeholders but 1 images"):
        dataset(write_json([good, record("q", "a", images=[name])]), tmp_path).check()
    with pytest.raises(DataError, match="data.json, record 2: 1 <image> placeholders but 0 images"):
        dataset(write_json([good, good, record("<image> q", "a")]), tmp_path).check()


def test_missing_images_are_named_and_counted_without_decoding(record: Record, write_json: Write, tmp_path: Path) -> None:
    (tmp_path / "there.png").write_bytes(b"not looked into")
    records = [record("<image> q", "a", images=[name]) for name in ("there.png", "gone.png", "lost.png", "gone.png")]
    with pytest.raises(DataError, match=r"gone\.png: no such image file, in .*data\.json, record 1; 2 of 3 media files are missing"):
        dataset(write_json(records), tmp_path).check()


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([("assistant", "a")], "message 0: role 'assistant' where 'user' must stand"),
        ([("user", "q"), ("user", "q")], "message 1: role 'user' where 'assistant' must stand"),
        ([("user", "q"), ("assistant", "a"), ("user", "q")], "3 messages; a conversation ends with an answer"),
        ([("user", "q"), ("asistant", "a")], "message 1: role 'asistant'"),
        ([("user", "q"), ("system", "s")], "message 1: role 'system'"),
        ([("system", "s")], "0 messages"),
        ([("user", 3), ("assistant", "a")], "message 0: needs the strings 'role' and 'content'"),
    ],
)
def test_roles_take_turns(write_json: Write, messages: list[tuple[str, Any]], message: str) -> None:
    path = write_json([{"messages": [{"role": role, "content": content} for role, content in messages]}])
    with pytest.raises(DataError, match="record 0.*" + message):
        dataset(path).check()


def test_system_prompts_come_from_a_message_or_a_column(write_json: Write, record: Record) -> None:
    pair = record("q", "a")["messages"]
    path = write_json([{"messages": [{"role": "system", "content": "S"}, *pair]}, {"messages": pair, "prompt": "T"}, {"messages": pair}])
    data = ConversationDataset.of_files([path], DatasetAttr(system="prompt"))
    assert [sample.system for sample in data] == ["S", "T", None]
    path = write_json([{"messages": [{"role": "system", "content": "S"}, *pair], "prompt": "T"}])
    with pytest.raises(DataError, match="both in column 'prompt' and as first message"):
        ConversationDataset.of_files([path], DatasetAttr(system="prompt"))[0]


def test_columns_and_tags_by_other_names(write_json: Write) -> None:
    attr = DatasetAttr(images="image", messages="conversations", role_tag="from", content_tag="value", user_tag="human", assistant_tag="gpt")
    path = write_json([{"image": "a.jpg", "conversations": [{"from": "human", "value": "<image>\nhi"}, {"from": "gpt", "value": "ok"}]}])
    sample = ConversationDataset.of_files([path], attr, "/media")[0]
    assert sample.images == ("/media/a.jpg",) and sample.messages[1] == Message("assistant", "ok")


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
