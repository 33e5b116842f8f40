"""LLaVA-Instruct records become records with messages and images: whole, in order, or not at all."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tangram.cli.main import main
from tangram.data.llava import Report, convert_llava
from tangram.errors import DataError

ROOT = Path(__file__).parents[2]


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"from": ("human", "gpt")[number % 2], "value": text} for number, text in enumerate(texts)]


@pytest.fixture
def coco(tmp_path: Path) -> Path:
    """A COCO folder with two image files."""
    folder = tmp_path / "COCO"
    (folder / "train2017").mkdir(parents=True)
    for name in ("000000000042.jpg", "000000000043.jpg"):
        (folder / "train2017" / name).touch()
    return folder


@pytest.fixture
def convert(tmp_path: Path, coco: Path) -> Callable[..., tuple[Any, Report]]:
    """Convert records and return what was written, as JSON, and the report."""

    def run(records: Any, **options: Any) -> tuple[Any, Report]:
        source, output = tmp_path / "llava.json", tmp_path / "out.json"
        source.write_bytes(records if isinstance(records, bytes) else json.dumps(records, ensure_ascii=False).encode())
        report = convert_llava(coco, source, output, **{"overwrite": True, **options})
        return json.loads(output.read_bytes()), report

    return run


def left(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("out"))


def plain(record: dict[str, Any]) -> dict[str, Any]:
    """The rules of the public tool, as its documentation tells them."""
    return {
        "images": [f"./train2017/{record['image']}"] if record.get("image") else [],
        "messages": [{"role": {"human": "user", "gpt": "assistant"}[t["from"]], "content": t["value"]} for t in record["conversations"]],
    }


def test_the_public_example(convert: Callable[..., tuple[Any, Report]]) -> None:
    written, report = convert(
        [
            {
                "id": "000000000042",
                "image": "000000000042.jpg",
                "conversations": turns("<image>\nWhat is on the table?", "A blue cup.", "Is it full?", "Half full."),
            },
            {"id": "text", "conversations": turns("Say hi.", "Hi.")},
        ]
    )
    assert written == [
        {
            "images": ["./train2017/000000000042.jpg"],
            "messages": [
                {"role": "user", "content": "<image>\nWhat is on the table?"},
                {"role": "assistant", "content": "A blue cup."},
                {"role": "user", "content": "Is it full?"},
                {"role": "assistant", "content": "Half full."},
            ],
        },
        {"images": [], "messages": [{"role": "user", "content": "Say hi."}, {"role": "assistant", "content": "Hi."}]},
    ]
    assert (report.records, report.written, report.without_image, report.images_found, report.images_used) == (2, 2, 1, 2, 1)


def test_a_string_is_one_image_and_a_list_several(convert: Callable[..., tuple[Any, Report]]) -> None:
    """hiyouga/LlamaFactory#5883: a string was taken for a list of characters."""
    talk = turns("<image>\nhi", "ok")
    one, two = "000000000042.jpg", "000000000043.jpg"
    written, _ = convert([{"image": image, "conversations": talk} for image in (one, [one], [one, two], [], "", None)])
    assert [record["images"] for record in written] == [
        [f"./train2017/{one}"],
        [f"./train2017/{one}"],
        [f"./train2017/{one}", f"./train2017/{two}"],
        [],
        [],
        [],
    ]
    assert written[0] == written[1]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"image": 7, "conversations": turns("a", "b")}, "record 1 (id None): 'image' must be a name or a list of names, got 7"),
        ({"id": "x", "image": [""], "conversations": turns("a", "b")}, "record 1 (id 'x'): 'image' must be a name or a list of names, got ['']"),
        ({"id": "x", "conversations": []}, "record 1 (id 'x'): 'conversations' must be a list of messages, got []"),
        ({"id": "x", "conversations": [{"from": "human"}]}, "(id 'x'): message 0: needs the strings 'from' and 'value', got {'from': 'human'}"),
        (
            {"id": "x", "conversations": [{"from": "system", "value": "s"}]},
            "record 1 (id 'x'): message 0: role 'system'; the roles are 'human' and 'gpt'",
        ),
        ([], "record 1 is a list; every record must be an object with conversations"),
        ({"conversations": turns("half \ud83d", "b")}, "record 1 holds half of a surrogate pair"),
    ],
)
def test_records_of_another_form_are_named(tmp_path: Path, convert: Callable[..., tuple[Any, Report]], record: Any, message: str) -> None:
    good = {"conversations": turns("Say hi.", "Hi.")}
    with pytest.raises(DataError) as fault:
        convert(json.dumps([good, record, good]).encode())
    assert message in str(fault.value)
    assert left(tmp_path) == []


def test_spellings_of_a_file_give_the_same_records(convert: Callable[..., tuple[Any, Report]]) -> None:
    """pydantic-ai#8316, minimind#551: byte-order marks, CRLF, U+2028 inside a string, no line end after the last line."""
    records = [{"conversations": turns("one\u2028line é 🙂", "b")}, {"conversations": turns("c", "d")}]
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    expected = [plain(record) for record in records]
    with_ends = ["\n".join(lines), "\r\n".join(lines) + "\r\n", "\ufeff" + "\n".join(lines) + "\n"]
    for text in (*with_ends, json.dumps(records, indent=3), "\ufeff" + json.dumps(records)):
        assert convert(text.encode())[0] == expected
    with pytest.raises(DataError, match=r"llava.json: line 2: not UTF-8 at byte 3"):
        convert(b"[\n \xe6]")
    with pytest.raises(DataError, match=r"line 2: not a JSON dataset: a comma before"):
        convert(b'[{"conversations": [{"from": "human", "value": "x"}]},\n]')
    with pytest.raises(DataError, match=r"line 3: not a JSON dataset: .*one array or one object a line"):
        convert(b'[{"conversations":\n [{"from": "human",\n "value": ?')
    with pytest.raises(DataError, match="0 records"):
        convert(b"[]")


def test_faults_far_into_the_file_are_named_by_their_line(convert: Callable[..., tuple[Any, Report]]) -> None:
    """Behind the first windows: 40,000 lines are 3 MB."""
    line = json.dumps({"conversations": turns("a" * 20, "b")}).encode() + b"\n"
    with pytest.raises(DataError, match=r"line 40001: not a JSON dataset: "):
        convert(line * 40_000 + b"{]\n" + line * 10)
    with pytest.raises(DataError, match=rf"line 40001: not UTF-8 at byte {40_000 * len(line) + 2}; save"):
        convert(line * 40_000 + b'{"\xff": 1}\n' + line * 10)
    with pytest.raises(DataError, match=r"line 40001: not a JSON dataset: a record that runs over several lines"):
        convert(line * 40_000 + b'{"a":\n 1}\n')


def test_records_that_lie_across_windows(convert: Callable[..., tuple[Any, Report]]) -> None:
    """Characters of two, three and four bytes at the edges of every window, and one record larger than a window."""
    records = [{"conversations": turns("é☃🙂" * (20 + number % 7), "b" * (number % 5))} for number in range(9000)]
    records.insert(4000, {"conversations": turns("é☃🙂" * 300_000, "b")})
    assert convert(records)[0] == [plain(record) for record in records]


def test_a_missing_image_ends_the_conversion_with_count_and_names(tmp_path: Path, convert: Callable[..., tuple[Any, Report]]) -> None:
    names = ["000000000042.jpg", *(f"gone{number}.jpg" for number in range(7)), "gone0.jpg"]
    with pytest.raises(DataError) as fault:
        convert([{"image": name, "conversations": turns("<image>a", "b")} for name in names])
    assert "7 image files of 8 records are missing: gone0.jpg, gone1.jpg, gone2.jpg, gone3.jpg, gone4.jpg and 2 more" in str(fault.value)
    assert left(tmp_path) == []


def test_skipped_records_are_listed(tmp_path: Path, convert: Callable[..., tuple[Any, Report]]) -> None:
    talk = turns("<image>a", "b")
    records = [
        {"id": "a", "image": "gone.jpg", "conversations": talk},
        {"id": "b", "image": "000000000042.jpg", "conversations": talk},
        {"id": 3, "image": ["000000000042.jpg", "gone.jpg"], "conversations": talk},
    ]
    written, report = convert(records, skip_missing=True)
    assert written == [plain(records[1])]
    assert (report.written, report.skipped, report.images_used) == (1, 2, 1)
    lines = (tmp_path / "out.json.skipped.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"index": 0, "id": "a", "image": "gone.jpg"},
        {"index": 2, "id": 3, "image": ["000000000042.jpg", "gone.jpg"]},
    ]
    convert(records[1:2])
    assert left(tmp_path) == ["out.json"], "a list that is not of this output would mislead"


@pytest.mark.parametrize("skip", [False, True])
def test_a_folder_of_coco_2014_is_told(tmp_path: Path, coco: Path, convert: Callable[..., tuple[Any, Report]], skip: bool) -> None:
    """haotian-liu/LLaVA#80, #13."""
    for path in (coco / "train2017").iterdir():
        path.rename(path.with_name(f"COCO_train2014_{path.name}"))
    with pytest.raises(DataError) as fault:
        convert([{"image": f"00000000004{n}.jpg", "conversations": turns("<image>a", "b")} for n in (2, 3)], skip_missing=skip)
    assert "all images are missing: 2 files of 2 records" in str(fault.value) and "COCO_train2014_000000000042.jpg" in str(fault.value)
    assert left(tmp_path) == []


def test_the_number_of_images_is_compared_first(tmp_path: Path, convert: Callable[..., tuple[Any, Report]], coco: Path) -> None:
    (coco / "train2017" / "readme.txt").touch()
    with pytest.raises(DataError, match="train2017: 2 image files where 118287 are expected"):
        convert(b"no JSON at all", expect_images=118287)
    assert convert([{"conversations": turns("a", "b")}], expect_images=2)[1].written == 1
    with pytest.raises(DataError, match="no such folder; coco_path must be the folder that holds train2017"):
        convert_llava(tmp_path, tmp_path / "llava.json", tmp_path / "out2.json")


def test_a_wrong_number_of_placeholders_is_counted(convert: Callable[..., tuple[Any, Report]]) -> None:
    """hiyouga/LlamaFactory#5329: the converter is where it shows first."""
    image = {"image": "000000000042.jpg"}
    records = [
        {**image, "conversations": turns("<image>a", "b")},
        {**image, "conversations": turns("a", "b")},
        {"conversations": turns("<image>a", "b")},
    ]
    assert convert(records)[1].miscounted == [1, 2]


def test_an_existing_output_is_kept_unless_told(tmp_path: Path, convert: Callable[..., tuple[Any, Report]], coco: Path) -> None:
    output = tmp_path / "out.json"
    output.write_text("mine")
    with pytest.raises(DataError, match="out.json: exists already; give --overwrite"):
        convert([{"conversations": turns("a", "b")}], overwrite=False)
    with pytest.raises(DataError, match="missing"):
        convert([{"image": "gone.jpg", "conversations": turns("a", "b")}])
    assert output.read_text() == "mine" and left(tmp_path) == ["out.json"]
    with pytest.raises(DataError, match="is the file to convert"):
        convert_llava(coco, output, tmp_path / "." / "out.json", overwrite=True)
    assert convert([{"conversations": turns("a", "b")}])[1].written == 1


def test_the_command(tmp_path: Path, coco: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = tmp_path / "llava.json", tmp_path / "sub" / "out.json"
    source.write_text(json.dumps([{"image": "000000000042.jpg", "conversations": turns("no mark", "b")}, {"conversations": turns("a", "b")}]))
    words = ["data", "llava-to-mllm", "--coco_path", str(coco), "--llava-json-path", str(source), "--output_json_path", str(output)]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "2 of 2 records, 1 of them without an image; 1 of 2 image files are used" in shown
    assert "1 records hold another number of <image> than images, which training refuses: 0" in shown
    first = output.read_bytes()
    assert main(words) == 2
    assert capsys.readouterr().err == f"tangram: error: {output}: exists already; give --overwrite to replace it, or write elsewhere\n"
    assert main([*words, "--overwrite"]) == 0
    assert output.read_bytes() == first


def test_memory_does_not_grow_with_the_file(tmp_path: Path, coco: Path) -> None:
    record = json.dumps({"image": "000000000042.jpg", "conversations": turns("<image>" + "what? " * 60, "that. " * 60)})
    peaks = []
    for count in (2_000, 10_000):
        source = tmp_path / f"{count}.jsonl"
        source.write_text("\n".join([record] * count))
        tracemalloc.start()
        convert_llava(coco, source, tmp_path / f"out{count}.json")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 1e6 < 25e6, "6 MB of records more"


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, coco: Path) -> None:
    """A limit on the size of files stands for a full disk: the write fails in the middle."""
    source, output = tmp_path / "llava.json", tmp_path / "out.json"
    source.write_text(json.dumps([{"conversations": turns("a" * 1000, "b")}] * 3000))
    words = ["data", "llava-to-mllm", "--coco_path", coco, "--llava_json_path", source, "--output_json_path", output]
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 21, 1 << 21));"
        "from tangram.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    ended = subprocess.run([sys.executable, "-c", code, *map(str, words)], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode != 0 and "File too large" in ended.stderr
    assert left(tmp_path) == []


@pytest.mark.parametrize("moment", [0.0, 0.3, 0.9, 1.0])
def test_a_kill_leaves_a_whole_file_or_none(tmp_path: Path, coco: Path, moment: float) -> None:
    """Killed when so much is written, at the end before the file gets its name; the next run cleans up and writes the same bytes."""
    source, output = tmp_path / "llava.json", tmp_path / "out.json"
    record = {"image": "000000000042.jpg", "conversations": turns("<image>" + "what? " * 60, "that. " * 60)}
    source.write_text("\n".join([json.dumps(record)] * 8_000))
    convert_llava(coco, source, output)
    whole = output.read_bytes()
    output.unlink()

    def die() -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # A write behind the limit raises this signal, whose default is to kill; Python ignores it.
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        if moment < 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(moment * len(whole)), resource.RLIM_INFINITY))
        sys.addaudithook(lambda event, _: os.kill(os.getpid(), signal.SIGKILL) if event in ("os.rename", "os.link") else None)
        convert_llava(coco, source, output)

    child = multiprocessing.get_context("fork").Process(target=die)
    child.start()
    child.join()
    assert child.exitcode == (-signal.SIGXFSZ if moment < 1 else -signal.SIGKILL)
    assert not output.exists() and any(".tmp-" in path.name for path in tmp_path.iterdir())
    convert_llava(coco, source, output)
    assert left(tmp_path) == ["out.json"] and output.read_bytes() == whole
