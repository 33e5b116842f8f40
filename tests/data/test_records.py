"""Records of JSON files: the same whatever the editor wrote, found as far as they are asked for, and damage named by its line."""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tangram.data import records as records_module
from tangram.data.records import JsonRecords, open_records
from tangram.errors import DataError

CHARACTERS = st.characters(exclude_categories=["Cs"])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(CHARACTERS, max_size=12)
OBJECTS = st.dictionaries(st.text(CHARACTERS, max_size=4), st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3)))
WHITE = st.text(st.sampled_from(" \t\r\n"), max_size=3)


def read(path: str, lazy: bool = False) -> list[Any]:
    records = JsonRecords(path, lazy)
    found = []
    while records.has(len(found)):
        found.append(records[len(found)])
    assert records.known_length() == len(found)
    return found


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(OBJECTS, max_size=6), st.booleans(), st.booleans(), WHITE, st.sampled_from(["\n", "\r\n"]), st.integers(1, 40), st.data())
def test_every_way_to_write_records_gives_what_the_json_module_reads(
    tmp_path: Path, wanted: list[Any], as_array: bool, ascii_only: bool, white: str, line_end: str, window: int, data: st.DataObject
) -> None:
    """Array or lines, with and without BOM, escapes, white space, carriage returns and final newline, in windows of a few bytes."""
    texts = [json.dumps(record, ensure_ascii=ascii_only) for record in wanted]
    if as_array:
        text = white + "[" + white + ("," + white).join(texts) + white + "]" + white
    else:
        text = line_end.join(texts) + (line_end if data.draw(st.booleans()) else "")
    path = tmp_path / "data.json"
    path.write_bytes((b"\xef\xbb\xbf" if data.draw(st.booleans()) else b"") + text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records_module, "WINDOW", window)
        assert read(str(path)) == read(str(path), lazy=True) == wanted


@pytest.mark.parametrize("around", range(-6, 3))
def test_records_that_lie_across_the_edge_of_a_window(tmp_path: Path, around: int) -> None:
    """At the real size of the window: the edge falls on each byte of a character of three bytes and of an escape."""
    filler = {"a": "x" * (records_module.WINDOW - len('{"a": ""}\n{"b": "') + around)}
    path = tmp_path / "edge.jsonl"
    path.write_text(json.dumps(filler) + '\n{"b": "杭\\u676d\u2028"}\n{"c": 3}', encoding="utf-8")
    assert read(str(path)) == read(str(path), lazy=True) == [filler, {"b": "杭杭\u2028"}, {"c": 3}]


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("lines", [False, True])
def test_numbers_that_lie_across_the_edge_of_a_window_are_one_record(
    tmp_path: Path, lines: bool, lazy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number is no sample, but it counts as one record, so that its fault is named by the right index."""
    path = tmp_path / "numbers.json"
    path.write_text("123456\n7.5e3\n-1" if lines else "[123456,7.5e3,-1]")
    for window in range(1, 9):
        monkeypatch.setattr(records_module, "WINDOW", window)
        records = JsonRecords(str(path), lazy)
        assert [records.has(index) for index in range(4)] == [True, True, True, False], window
        kinds = [str(content).partition("record ")[2].partition(";")[0] for _, content in records.at(range(3))]
        assert kinds == ["0: a int", "1: a float", "2: a int"]


def test_a_lazy_index_reads_no_further_than_it_must(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps({"i": i, "text": "x" * 90}) + "\n" for i in range(200)) + "broken")
    monkeypatch.setattr(records_module, "WINDOW", 1000)
    records = JsonRecords(str(path), lazy=True)
    assert records.known_length() is None
    assert records[3] == {"i": 3, "text": "x" * 90}
    assert 8 < len(records._starts) < 30, "what a window holds is found at once"
    assert records.has(150) and records[7]["i"] == 7
    copy = pickle.loads(pickle.dumps(records))
    assert copy[180]["i"] == 180 and records.known_length() is None
    with pytest.raises(DataError, match=r"long\.jsonl: line 201: not a JSON dataset: Expecting value"):
        records.has(200)
    with pytest.raises(DataError, match="line 201"):
        JsonRecords(str(path))


def test_bytes_that_are_not_utf8_name_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b"\xe6")
    with pytest.raises(DataError, match=r"bad\.jsonl: line 1: .*not UTF-8 at byte 0"):
        JsonRecords(str(path))
    path.write_bytes(b'{"messages": []}\n{"messages": "\xe6"}\n')
    with pytest.raises(DataError, match=r"bad\.jsonl: line 2: .*not UTF-8 at byte 31"):
        JsonRecords(str(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"a": 1} {"a": 2}]', "line 1: not a JSON dataset: expected ',' or ']'"),
        ('[{"a": 1},\n]', "line 2: not a JSON dataset: a comma before"),
        ('[{"a": 1}] x', "text after the array"),
        ('[{"a": 1},\n {"a": ', "line 2: not a JSON dataset: Expecting value"),
        ('[{"a": 1},', "line 1: not a JSON dataset: Expecting value"),
        ('[{"a": 1}', "expected ',' or ']' after a record"),
        ("[", "line 1: not a JSON dataset: Expecting value"),
        ('{\n "a": 1\n}', "runs over several lines; write one record a line, or one array"),
        ('{\n "data": [{"a": 1}]\n}', "runs over several lines; save the list under 'data' alone"),
        ('[{"a": 1}, {"b" 2},\n\n\n\n\n\n{"c": 3}]', "line 1: not a JSON dataset: Expecting ':' delimiter"),
        ("[" * 100_000, "line 1: not a JSON dataset: maximum recursion depth exceeded"),
        ('[{"messages": ' + "9" * 5000 + "}]", "line 1: not a JSON dataset: Exceeds the limit"),
        ("hello", "line 1: not a JSON dataset: Expecting value; the file must be one array or one object a line"),
    ],
)
@pytest.mark.parametrize("lazy", [False, True])
def test_damaged_files_name_the_line(tmp_path: Path, text: str, message: str, lazy: bool) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(DataError, match=message.replace("[", r"\[")):
        read(str(path), lazy)


def test_half_a_surrogate_pair_is_named(tmp_path: Path) -> None:
    path = tmp_path / "half.json"
    path.write_text(r'[{"a": "\ud83d\ude00"}, {"a": "\ud83d"}]')
    records = JsonRecords(str(path))
    assert records[0] == {"a": "\U0001f600"}
    with pytest.raises(DataError, match=r"half\.json, record 1: holds half of a surrogate pair"):
        records[1]


@pytest.mark.parametrize("text", ["[]", "", " \n", "\ufeff[ ]"])
@pytest.mark.parametrize("lazy", [False, True])
def test_a_file_without_records(tmp_path: Path, text: str, lazy: bool) -> None:
    path = tmp_path / "empty.json"
    path.write_text(text, encoding="utf-8")
    assert read(str(path), lazy) == []


def test_a_file_that_changed_is_told_so(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    records = JsonRecords(str(path))
    path.write_text('{"abcdef": 1}\n')
    with pytest.raises(DataError, match=r"data\.jsonl, record 1: not JSON any more .*; the file changed after it was opened"):
        records[1]


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"/no/such\.json: no such dataset file; check basic_parameters.dataset"):
        open_records("/no/such.json")
    path = tmp_path / "data.json"
    path.write_text("[]")

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=r"data\.json: cannot read this dataset file \(Permission denied\); check its permissions"):
        open_records(str(path))


def test_opening_reads_the_file_once_parses_each_record_once_and_keeps_16_bytes_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it takes no longer than the json module; at the end of a window a record is begun a second time."""
    path = tmp_path / "many.json"
    text = "What is on the table, and what stands beside it? "
    record = {"image": "000000000042.jpg", "conversations": [{"from": "human", "value": "<image>\n" + text}, {"from": "gpt", "value": text * 8}]}
    path.write_text(json.dumps([record] * 8_000))

    read: list[int] = []
    parsed: list[int] = []

    class File(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            read.append(super().readinto(buffer))
            return read[-1]

        def read(self, size: int = -1) -> bytes:
            content = super().read(size)
            read.append(len(content))
            return content

    class Decoder(json.JSONDecoder):
        def raw_decode(self, text: str, at: int = 0) -> Any:
            parsed.append(at)
            return super().raw_decode(text, at)

    monkeypatch.setattr(Path, "open", lambda self, mode: io.BufferedReader(File(self)))
    monkeypatch.setattr(json, "JSONDecoder", Decoder)
    records = JsonRecords(str(path))
    monkeypatch.undo()
    size = path.stat().st_size
    assert records.known_length() == 8_000 and size > 4 * records_module.WINDOW
    assert size <= sum(read) < size + 2 * io.DEFAULT_BUFFER_SIZE
    assert 8_000 <= len(parsed) <= 8_000 + size // records_module.WINDOW + 1
    assert len(pickle.dumps(records)) < 16 * 8_000 + 1_000
