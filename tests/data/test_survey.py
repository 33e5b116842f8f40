"""``tangram data check`` finds what is wrong with a dataset, all of it, and goes on."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tangram.cli.main import main
from tangram.config.data import DatasetAttr
from tangram.data.dataset import ConversationDataset
from tangram.data.subject import SubjectOptions, build_subject
from tangram.data.survey import Survey, kind_of, survey
from tangram.data.walk import CHUNK, Died, walk

Record = Callable[..., dict[str, Any]]


@pytest.fixture
def bad_dataset(tmp_path: Path, record: Record, write_json: Callable[..., str], photo: Callable[[str], str]) -> str:
    """Good samples and one of every fault; the sample's number is in the comment."""
    with Image.open(photo("rocket.jpg")) as image:
        image.resize((112, 84)).save(tmp_path / "rocket.jpg")
    whole = Path(photo("rocket.jpg")).read_bytes()
    (tmp_path / "half.jpg").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.png").touch()
    rocket = record("<image>What is this?", "A rocket.", images=["rocket.jpg"])
    return write_json(
        [
            rocket,  # 0
            record("<image>What is this?", "A rocket.", images=[]),  # 1: no image
            record("What is this?", "A rocket.", images=["rocket.jpg"]),  # 2: no placeholder
            {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]},  # 3: roles
            rocket,  # 4: as 0
            record("<image>a", "b", images=["half.jpg"]),  # 5: truncated file
            record("<image><image>a", "b", images=["empty.png", "gone.png"]),  # 6: two faults
            record("Say nothing.", ""),  # 7: empty answer
            record("One.", "word " * 40, "Two.", "word " * 400),  # 8: loses its second turn at 300
            record("word " * 400, "b"),  # 9: the first turn does not fit
            record("<image>Another?", "No.", images=["gone.png"]),  # 10
            record("Say hi.", "Hi."),  # 11
        ]
    )


def found(dataset: str, model_dir: Path | None = None, **options: Any) -> Survey:
    given = {"dataset": dataset, "tokenizer": str(model_dir) if model_dir else None, "cutoff": options.pop("cutoff", None)}
    subject = build_subject(SubjectOptions(**given), needs_pixels=False)
    return survey(subject.dataset, subject.encoding.encoder if subject.encoding else None, **options)


@pytest.mark.parametrize("workers", [0, 2])
def test_every_fault_is_found_and_none_ends_the_walk(bad_dataset: str, model_dir: Path, workers: int) -> None:
    result = found(bad_dataset, model_dir, cutoff=300, workers=workers)
    assert [(fault.sample, fault.stage) for fault in result.faults] == [
        (1, "record"),
        (2, "record"),
        (3, "record"),
        (5, "media"),
        (6, "media"),
        (6, "media"),
        (7, "record"),
        (9, "tokens"),
        (10, "media"),
    ]
    assert result.bad_samples == 8
    assert result.truncated == [8]
    assert result.duplicates == [(4, 0)]
    missing = next(kind for kind in result.kinds() if "no such" in kind.kind)
    assert (missing.count, missing.samples) == (2, (6, 10))
    assert all(f"record {fault.sample}" in fault.message for fault in result.faults)


def test_headers_alone_do_not_show_a_truncated_file(bad_dataset: str, model_dir: Path) -> None:
    faults = {fault.sample for fault in found(bad_dataset, model_dir, decode=False).faults}
    assert 5 not in faults and 6 in faults


def test_without_a_tokenizer_format_and_media_are_checked(bad_dataset: str) -> None:
    result = found(bad_dataset)
    assert {fault.sample for fault in result.faults} == {1, 2, 3, 5, 6, 7, 10}
    assert result.tokens is None


def test_token_statistics_against_transformers(
    tmp_path: Path, model_dir: Path, record: Record, write_json: Callable[..., str], photo: Callable[[str], str]
) -> None:
    """Ids of the whole chat from transformers' tokenizer; image tokens worked out by hand: 640 x 427 at 28 pixels a token."""
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast(tokenizer_file=str(model_dir / "tokenizer.json"))
    (tmp_path / "rocket.jpg").symlink_to(photo("rocket.jpg"))
    talks = [
        ("What is this?", "A rocket, lit at dusk."),
        ("Hi", "Ho"),
        ("Count to five.", "One two three four five."),
        ("a b c", "d e f g h i j k l m n o p"),
    ]
    records = [record(*talk) for talk in talks]
    records[0] = record("<image>" + talks[0][0], talks[0][1], images="rocket.jpg")
    image_tokens = round(427 / 28) * round(640 / 28)

    def tokens(text: str) -> int:
        return len(reference(text)["input_ids"])

    system = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    lengths = [tokens(f"{system}<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n{a}<|im_end|>\n") for q, a in talks]
    lengths[0] += image_tokens + 2
    statistics = found(write_json(records), model_dir).tokens
    assert statistics is not None
    assert (statistics.samples, statistics.min, statistics.max, statistics.total) == (4, min(lengths), max(lengths), sum(lengths))
    ordered = sorted(lengths)
    assert statistics.median == (ordered[1] + ordered[2]) / 2
    assert statistics.p95 == pytest.approx(ordered[2] + 0.85 * (ordered[3] - ordered[2]))
    assert statistics.supervised == sum(tokens(f"{answer}<|im_end|>") for _, answer in talks)
    assert statistics.media == image_tokens


def test_kinds_join_messages_that_differ_in_their_samples() -> None:
    one = kind_of("/a/b.json, record 7, message 12: role 'x' where 'user' must stand; 'user' and 'assistant' take turns")
    assert one == kind_of("c.json, record 11, message 0: role 'it\\'s' where 'assistant' must stand; 'user' and 'assistant' take turns")
    assert one == "role '...' where '...' must stand"
    assert kind_of("/a/b c-1.png: no such image file", "/a/b c-1.png") == "no such image file"
    assert kind_of("x.json, record 3: 2 <image> placeholders but 1 images; each") == "N <image> placeholders but N images"


def test_a_killed_process_costs_its_sample_alone() -> None:
    def examine(index: int) -> int:
        if index in (5, CHUNK + 1, 3 * CHUNK):
            os.kill(os.getpid(), signal.SIGKILL)
        if index == 70:
            os._exit(3)
        return index * index

    length = 4 * CHUNK + 7
    results = dict(walk(examine, length, workers=2))
    died = {index: str(result) for index, result in results.items() if isinstance(result, Died)}
    assert died == {
        **dict.fromkeys((5, CHUNK + 1, 3 * CHUNK), "the process that read it was ended by SIGKILL"),
        70: "the process that read it ended with status 3",
    }
    assert {index: result for index, result in results.items() if index not in died} == {n: n * n for n in range(length) if n not in died}


def test_a_death_is_a_fault_of_its_sample(bad_dataset: str, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = ConversationDataset.__getitem__

    def deadly(self: ConversationDataset, index: int) -> Any:
        if index == 11:
            os.kill(os.getpid(), signal.SIGKILL)
        return read(self, index)

    monkeypatch.setattr(ConversationDataset, "__getitem__", deadly)
    result = found(bad_dataset, model_dir, workers=1)
    assert [(f.stage, f.message) for f in result.faults if f.sample == 11] == [("process", "the process that read it was ended by SIGKILL")]
    assert {fault.sample for fault in result.faults} == {1, 2, 3, 5, 6, 7, 10, 11}


def test_a_fault_of_ours_ends_the_walk() -> None:
    def broken(index: int) -> int:
        return 1 // (index - 3)

    with pytest.raises(ZeroDivisionError):
        list(walk(broken, 10, workers=1))


def test_the_command(
    tmp_path: Path, bad_dataset: str, model_dir: Path, capsys: pytest.CaptureFixture[str], record: Record, write_json: Callable[..., str]
) -> None:
    report = tmp_path / "report.json"
    words = ["data", "check", bad_dataset, "--tokenizer", str(model_dir), "--cutoff", "300", "--workers", "1"]
    assert main([*words, "--json", str(report)]) == 1
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "12 samples, 4 media files: 8 cannot be used" in shown
    assert "truncated at 300 tokens: 1 samples lose turns: 8" in shown and "repeated: 1 samples say what an earlier one says: 4 (as 0)" in shown
    content = json.loads(report.read_text())
    assert (content["samples"], content["bad_samples"], len(content["faults"]), content["truncated"]) == (12, 8, 9, [8])
    assert sum(kind["count"] for kind in content["kinds"]) == 9

    good = write_json([record("Say hi.", "Hi."), record("Say ho.", "Ho.")], "good.json")
    assert main(["data", "check", good, "--workers", "0"]) == 0
    shown = capsys.readouterr().out
    assert "2 samples, 0 media files: all can be used" in shown and "with --tokenizer HF or --config FILE" in shown
    assert main(["data", "check", str(tmp_path / "none.json")]) == 2
    assert main(["data", "check"]) == 2
    assert "give the dataset's path, or --config" in capsys.readouterr().err


def test_a_config_file_gives_what_is_not_given(tmp_path: Path, bad_dataset: str, model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = {
        "dataset_param": {
            "preprocess_parameters": {"model_name_or_path": str(model_dir), "image_max_pixels": 84 * 84},
            "basic_parameters": {"dataset": bad_dataset, "dataset_dir": str(tmp_path), "cutoff_len": 300},
        }
    }
    (tmp_path / "config.json").write_text(json.dumps(data))
    assert main(["data", "check", "--config", str(tmp_path / "config.json"), "--workers", "1"]) == 1
    assert "truncated at 300 tokens" in capsys.readouterr().out
    run = {"data": data, "model": {"hf_dir": str(model_dir)}, "training": {"lr": 1e-3, "seq_length": 320}}
    (tmp_path / "run.json").write_text(json.dumps(run))
    assert main(["data", "check", "--config", str(tmp_path / "run.json"), "--workers", "1"]) == 1
    assert "truncated at 300 tokens" in capsys.readouterr().out
    assert main(["data", "check", "--config", str(tmp_path / "run.json"), "--cutoff", "310", "--workers", "1"]) == 1
    assert "truncated at 310 tokens" in capsys.readouterr().out


def test_a_dataset_of_ones_own_is_not_mixed_as_that_of_the_file(
    tmp_path: Path, model_dir: Path, record: Record, write_json: Callable[..., str]
) -> None:
    """The shares of data.json are those of its two datasets."""
    names = [write_json([record(f"{name}{number}", "a") for number in range(3)], f"{name}.json") for name in "xyz"]
    basic = {"dataset": ",".join(names[:2]), "mix_strategy": "interleave_over", "interleave_probs": "0.5,0.5"}
    data = {"dataset_param": {"preprocess_parameters": {"model_name_or_path": str(model_dir)}, "basic_parameters": basic}}
    (tmp_path / "config.json").write_text(json.dumps(data))
    subject = build_subject(SubjectOptions(dataset=names[2], config=str(tmp_path / "config.json")), needs_pixels=False)
    assert [sample.messages[0].content for sample in subject.dataset] == ["z0", "z1", "z2"]


def test_missing_frames_are_one_kind_of_fault(tmp_path: Path, record: Record, write_json: Callable[..., str]) -> None:
    Image.new("RGB", (56, 56)).save(tmp_path / "first.png")
    data = write_json([record("<video>What?", "It.", videos=[["first.png", f"frame_{name}.png"]]) for name in "abc"])
    found = survey(ConversationDataset.of_files([data], DatasetAttr(), str(tmp_path)), None)
    assert [(kind.kind, kind.count, kind.samples) for kind in found.kinds()] == [("no such video file", 3, (0, 1, 2))]


def test_an_output_that_cannot_be_written_is_refused_before_the_walk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = str(tmp_path / "none.json")
    assert main(["data", "check", data, "--json", str(tmp_path)]) == 2
    assert f"error: --json {tmp_path}: a folder; give the path of a file" in capsys.readouterr().err
    assert main(["data", "show", data, "0", "--html", str(tmp_path / "no" / "page.html")]) == 2
    assert f"error: --html {tmp_path}/no/page.html: there is no folder {tmp_path}/no; make it" in capsys.readouterr().err
