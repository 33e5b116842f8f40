"""Parquet files give the samples that JSON files of the same records give, one row group in memory at a time."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tangram.config.data import DatasetAttr
from tangram.data import parquet as parquet_module
from tangram.data.conversation import Video
from tangram.data.dataset import ConversationDataset
from tangram.data.parquet import ParquetRecords
from tangram.errors import DataError

Record = Callable[..., dict[str, Any]]


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Write records as parquet and return the path."""

    def table(records: list[dict[str, Any]], rows: int = 3, name: str = "data.parquet") -> str:
        path = tmp_path / name
        columns = dict.fromkeys(key for record in records for key in record)
        pq.write_table(pa.table({key: [record.get(key) for record in records] for key in columns}), path, row_group_size=rows)
        return str(path)

    return table


Write = Callable[..., str]


def content(path: str, **attr: Any) -> list[Any]:
    return [(s.system, s.messages, s.images, s.videos) for s in ConversationDataset.of_files([path], DatasetAttr(**attr), "/m")]


def test_the_same_samples_as_from_json(write: Write, record: Record, write_json: Callable[..., str]) -> None:
    """Lists and structs of messages, absent columns as nulls, text beyond ASCII."""
    records = [
        record("<image>réponse\u2028杭州", "a", images=["a.png"]),
        record("<video>q", "a", "q", "a", videos=[["1.png", "2.png"]]),
        record("q", "a", images=[]),
        *(record(f"q{i}", "a") for i in range(5)),
    ]
    want = content(write_json(records))
    assert content(write(records)) == want
    assert want[1][3] == (Video(("/m/1.png", "/m/2.png"), is_frames=True),)


def test_openai_parts_with_the_nulls_that_structs_have(write: Write) -> None:
    """A struct has all keys of all parts; those that a part does not have are null."""
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "q"}]
    answer = [{"type": "text", "text": "a"}]
    path = write([{"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]}])
    assert pq.read_table(path).to_pylist()[0]["messages"][0]["content"][1] == {"type": "text", "image": None, "text": "q"}
    ((_, messages, images, _),) = content(path, formatting="openai")
    assert [message.content for message in messages] == ["<image>q", "a"] and images == ("/m/a.png",)


def test_pictures_as_structs(write: Write, record: Record) -> None:
    """The hub's image column: a struct of bytes and path."""
    path = write([record("<image>", "a", images=[{"bytes": raw, "path": "a.png"}]) for raw in (None, b"\x89PNG")])
    data = ConversationDataset.of_files([path], DatasetAttr(), "/m")
    assert data[0].images == ("/m/a.png",)
    with pytest.raises(DataError, match=r"data\.parquet, record 1: 'images' holds the file's bytes; save it as a file"):
        data[1]


def test_any_row_in_any_order_with_few_groups_in_memory(write: Write, record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write([record(f"q{i}", "a") for i in range(20)], rows=3)
    records = ParquetRecords(path)
    assert records.known_length() == 20 and records.has(19) and not records.has(20)
    assert [row["messages"][0]["content"] for row in islice(records.head(), 5)] == [f"q{i}" for i in range(5)]
    assert not records._groups, "neither the length nor a look at the beginning takes a whole row group"
    for index in (19, 0, 7, 3, 11, 14, 2, 19):
        assert records[index]["messages"][0]["content"] == f"q{index}"
        assert len(records._groups) <= parquet_module.GROUPS_KEPT
    monkeypatch.setattr(parquet_module, "BYTES_KEPT", 1)
    assert records[4]["messages"][0]["content"] == "q4" and len(records._groups) == 1
    assert pickle.loads(pickle.dumps(records))[5]["messages"][0]["content"] == "q5"


def _ask(records: ParquetRecords, answers: Any) -> None:
    answers.put([records[index]["messages"][0]["content"] for index in range(len(records._ends) * 3)])


def test_forked_processes_read_for_themselves(write: Write, record: Record) -> None:
    records = ParquetRecords(write([record(f"q{i}", "a") for i in range(9)], rows=3))
    context = get_context("fork")
    answers = context.Queue()
    processes = [context.Process(target=_ask, args=(records, answers)) for _ in range(2)]
    for process in processes:
        process.start()
    assert [answers.get(timeout=250) for _ in processes] == [[f"q{i}" for i in range(9)]] * 2
    for process in processes:
        process.join(60)


def test_files_that_are_no_parquet(tmp_path: Path, write: Write, record: Record) -> None:
    path = tmp_path / "bad.parquet"
    for raw in (b"", b"PAR1", json.dumps([record("q", "a")]).encode()):
        path.write_bytes(raw)
        with pytest.raises(DataError, match=r"bad\.parquet: not a parquet file, or a damaged one \(.*\); write it again"):
            ParquetRecords(str(path))
    whole = bytearray(Path(write([record(f"q{i}" * 50, "a") for i in range(9)], rows=3)).read_bytes())
    whole[20:60] = b"\xff" * 40  # within the first row group
    path.write_bytes(whole)
    faults = dict(ConversationDataset.of_files([str(path)], DatasetAttr()).faults())
    assert sorted(faults) == [0, 1, 2]
    assert "bad.parquet, record 1: cannot decode this row" in str(faults[1])


def test_a_parquet_file_without_rows_is_empty(write: Write, tmp_path: Path) -> None:
    path = tmp_path / "none.parquet"
    pq.write_table(pa.table({"messages": pa.array([], pa.list_(pa.string()))}), path)
    with pytest.raises(DataError, match=r"none\.parquet: the dataset is empty: 0 samples"):
        ConversationDataset.of_files([str(path)], DatasetAttr())


def test_values_that_json_does_not_know_are_named(write: Write, record: Record) -> None:
    good = record("q", "a")
    path = write([good, {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": None}]}])
    data = ConversationDataset.of_files([path], DatasetAttr())
    assert [index for index, _ in data.faults()] == [1]
    pq.write_table(pa.table({"messages": [good["messages"]], "images": pa.array([b"raw"])}), path)
    with pytest.raises(DataError, match=r"data\.parquet, record 0: 'images' must be a path or a list of paths, got b'raw'"):
        ConversationDataset.of_files([path], DatasetAttr())[0]
